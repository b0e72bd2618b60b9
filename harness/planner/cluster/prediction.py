"""Predicts step time, memory, energy and the probability of fitting, with 80% intervals."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml
from pydantic import TypeAdapter
from scipy.special import ndtr, ndtri

from harness.cell.errors import UsageError
from harness.host.gpu_models import gpu_named
from harness.planner.cluster.calibration import Bools, ClusterCalibration, Floats, Ints
from harness.planner.cluster.device_rates import HOPPER
from harness.planner.cluster.footprint import MOST_CERTAIN, usable_bytes
from harness.planner.cluster.layout_memory import (
    LayoutMemory,
    NativeMemory,
    memory,
    native_memory,
    offload_fits,
    with_native,
)
from harness.planner.cluster.model_shape import empty_stages
from harness.planner.cluster.question import ClusterQuestion, PlannedLayouts
from harness.planner.cluster.recipe import STATES
from harness.planner.cluster.step_time import LayoutStepTime, step_time

COMPUTING, WAITING = 0.85, 0.45
"""Assumed shares of maximum power while computing, and while communicating or waiting, when clocks
stay high."""
SPREAD = 0.2
"""Assumed half-width of the 80% interval of log energy."""

PENDING_DONE = 0.5
"""Assumed share of pending activations freed while the allocator waits."""
REFUSED_BELOW = 1 / 3
"""Probability of running below which layouts are refused. It is less than one half, because
refusing a layout that runs is worse than offering one that does not."""
UNMEASURED = 0.07
"""Half-width that each of `unmeasured_kinds` adds. With it, intervals cover 80% of other programs'
published runs (docs/studies/planner_widths.py)."""
NEW_DEVICE = 0.2
"""Half-width for devices whose family was never compared: times on B200 and MI325X are 10 to 24%
off."""
COMPARED = ("a100", "h100", "h200")
"""Starts of the names of devices whose runs were compared with predictions."""
OFFLOADED = 0.2
"""Assumed half-width of layouts with offload, for which no published run was found."""
TIE = 0.01
"""Difference in log speed up to which layouts are tied."""
TRIED = 3
"""Number of top layouts that are meant to be tried together."""
CONSIDERED = 512
"""Number of layouts considered for TRIED, by speed and by speed times probability."""
STEPS, DEVIATIONS = 96, 5.0
"""Points of the integral over speed, and standard deviations on each side."""


@functools.cache
def watts() -> dict[str, float]:
    text = Path(__file__).parents[1].joinpath("power.yaml").read_text(encoding="utf-8")
    return TypeAdapter(dict[str, float]).validate_python(yaml.safe_load(text)["watts"])


def energy(
    question: ClusterQuestion, time: LayoutStepTime, seconds: Floats, half_width: Floats
) -> tuple[Floats, Floats]:
    """Returns all devices' joules per token, which are devices x power x seconds over a step's
    tokens, and the half-widths of their log 80% intervals.

    Maximum power is from data sheets (power.yaml), without hosts, networks and cooling. `seconds`
    and `half_width` (shape [layouts]) are the step's. Raises UsageError for unknown power.
    """
    device = question.cluster.device
    if device not in watts():
        raise UsageError(
            f"the maximum power of device {device!r} is unknown; use one of {', '.join(watts())}"
        )
    busy = np.minimum(seconds, time.compute + time.update)
    joules = watts()[device] * (COMPUTING * busy + WAITING * (seconds - busy))
    return question.devices * joules / question.tokens, np.hypot(half_width, SPREAD)


@dataclass(frozen=True)
class Predictions:
    """Predictions (shape [layouts]); half-widths are those of log 80% intervals."""

    layouts: PlannedLayouts
    time: LayoutStepTime
    memory: LayoutMemory
    seconds: Floats
    half_width: Floats
    """Half-width for seconds, if memory suffices."""
    upper: Floats
    """Upper half-width, including slowness near the memory limit."""
    memory_half_width: Floats
    least: Floats
    """Bytes on the fullest device that cannot be freed."""
    fits: Floats
    """Probability of running at full speed, without freeing memory; 0 with an empty stage."""
    runs: Floats
    """Probability of running at all, perhaps many times slower."""
    filled: Bools
    """Whether no pipeline stage is empty."""
    fed: Bools
    """Whether the schedule has enough micro-batches."""
    stored: Bools
    """Whether a node can hold what its devices offload."""
    beyond: Floats

    @property
    def refused(self) -> Bools:
        return self.runs < REFUSED_BELOW

    @property
    def score(self) -> Floats:
        result: Floats = self.fits / self.seconds
        return result


def predict(
    question: ClusterQuestion,
    layouts: PlannedLayouts,
    calibration: ClusterCalibration,
    first_stage_only: bool = False,
) -> Predictions:
    """Predicts every layout; `first_stage_only` selects the memory of rank 0, as measured."""
    shape, cluster, spread = question.shape, question.cluster, calibration.spread
    anchor = calibration.anchor
    hopper = cluster.flops_per_second >= HOPPER
    time = step_time(question, layouts, calibration.time_on(question.like, cluster.links, hopper))
    time = time.scaled(anchor.factor) if anchor else time
    native = native_memory(question, layouts)

    def needs(first_stage: bool) -> LayoutMemory:
        counted = memory(
            shape,
            question.sequence_length,
            cluster,
            layouts,
            calibration.memory_on(question.like, cluster.links),
            time.ahead,
            first_stage,
            question.precision,
        )
        return with_native(counted, native)

    needed = needs(False)
    least = needed.allocated - PENDING_DONE * needed.pending
    counts, places = np.unique(layouts.pipeline, return_inverse=True)
    filled = np.array([empty_stages(shape, int(count)) == 0 for count in counts])[places]
    # nanotron's 1F1B needs a micro-batch for each stage after the first; Megatron-LM fewer.
    fed = layouts.accumulation >= layouts.pipeline - 1
    fed |= not calibration.is_of(question.like, cluster.links)
    stored = offload_fits(cluster, layouts, time.owned, STATES[question.precision])
    nodes = np.maximum(1, -(-layouts.devices // cluster.per_node))
    larger = calibration.range.model_beyond(shape.parameters)
    more = calibration.range.layout_beyond(nodes, layouts.tensor, layouts.pipeline)
    unmeasured = _unmeasured(question, layouts, calibration)
    half_width, memory_half_width = _half_widths(calibration, nodes, larger, more, unmeasured)
    memory_half_width[native.rows] = ndtri(0.9) * native.spread
    certain = np.where((unmeasured > 0) | (larger + more > 0), MOST_CERTAIN, 1.0)
    fits, runs = certain * _chances(question, needed, least, calibration, native, unmeasured)
    slow = 1 - fits / np.maximum(runs, 1e-12)
    return Predictions(
        layouts=layouts,
        time=time,
        memory=needs(True) if first_stage_only else needed,
        seconds=time.total,
        half_width=half_width,
        upper=spread.upper(half_width, slow),
        memory_half_width=memory_half_width,
        least=least,
        fits=np.where(filled & fed & stored, fits, 0.0),
        runs=np.where(filled & fed & stored, runs, 0.0),
        filled=filled,
        fed=fed,
        stored=stored,
        beyond=larger + more,
    )


def _chances(
    question: ClusterQuestion,
    needed: LayoutMemory,
    least: Floats,
    calibration: ClusterCalibration,
    native: NativeMemory,
    unmeasured: Floats,
) -> tuple[Floats, Floats]:
    cluster, spread = question.cluster, calibration.spread
    deviation = unmeasured / ndtri(0.9)
    runs = spread.end.passed(least, cluster.memory_bytes, deviation)
    fits = spread.room.passed(needed.demand, cluster.memory_bytes, deviation)
    room = usable_bytes(gpu_named(cluster.device), question.devices)
    for limited, demand in ((runs, least), (fits, needed.demand)):
        limited[native.rows] = ndtr(np.log(room / demand[native.rows]) / native.spread)
    return fits, np.maximum(runs, fits)


def _half_widths(
    calibration: ClusterCalibration, nodes: Ints, larger: float, more: Floats, unmeasured: Floats
) -> tuple[Floats, Floats]:
    """Returns the half-widths of time and memory.

    `larger`, `more`: doublings beyond measured models and nodes.
    """
    spread = calibration.spread
    doublings = np.log2(np.maximum(nodes, calibration.range.nodes[0]))
    usual = max(spread.time, calibration.anchor.half_width) if calibration.anchor else spread.time
    time = usual + spread.time_per_doubling * doublings
    time = time + spread.shape.time * larger + spread.nodes.time * more
    of_memory = spread.memory + spread.shape.memory * larger + spread.nodes.memory * more
    return np.hypot(time, unmeasured), np.hypot(of_memory, unmeasured)


def _unmeasured(
    question: ClusterQuestion, layouts: PlannedLayouts, calibration: ClusterCalibration
) -> Floats:
    kinds = unmeasured_kinds(question, layouts, calibration)
    squares = UNMEASURED**2 * np.sum(list(kinds.values()), axis=0)
    if not question.cluster.measured and not question.cluster.device.startswith(COMPARED):
        squares = squares + NEW_DEVICE**2
    result: Floats = np.sqrt(squares + OFFLOADED**2 * (layouts.offload > 0))
    return result


def unmeasured_kinds(
    question: ClusterQuestion, layouts: PlannedLayouts, calibration: ClusterCalibration
) -> dict[str, Bools]:
    """Returns by kind of difference which layouts differ from all calibrated runs."""
    cluster, shape = question.cluster, question.shape
    seen = calibration.is_of(question.like, cluster.links) and cluster.links == calibration.links
    return {
        "cluster": np.full(len(layouts), not seen),
        "precision": np.full(len(layouts), question.precision != "bf16"),
        "shape": np.full(len(layouts), shape.experts > 1 or not shape.gated),
        "sharding": layouts.zero >= 2,
        "recompute": layouts.recompute > 0,
        "axes": (layouts.context > 1) | (layouts.expert > 1) | (layouts.chunks > 1),
    }


def ranked(seconds: Floats, fits: Floats, memory_bytes: Floats, half_width: Floats) -> Ints:
    """Returns row numbers, best first (arrays of shape [rows]).

    The first row has the highest speed times probability of fitting; ties (TIE) go to the least
    memory. The next rows, up to TRIED, add the largest expected improvement (Jones, Schonlau and
    Welch, 1998). All further rows follow by speed times probability. `half_width`: that of the 80%
    interval of log seconds.
    """
    score = np.log(np.maximum(fits, 1e-300) / seconds)
    classes = np.floor((score.max() - score) / TIE) if len(score) else score
    order = np.lexsort((memory_bytes, classes))
    fastest = np.argsort(seconds / np.maximum(fits > 0, 1e-300), kind="stable")
    rows = np.unique(np.concatenate([order[:CONSIDERED], fastest[:CONSIDERED]]))
    picked = order[:1].tolist()
    if len(rows) > 1:
        gains = _Gains(-np.log(seconds[rows]), fits[rows], half_width[rows] / ndtri(0.9))
        places = {int(row): position for position, row in enumerate(rows)}
        best = places[picked[0]]
        for _ in range(min(TRIED, len(rows)) - 1):
            best = gains.after(best)
            picked.append(int(rows[best]))
    rest = order[~np.isin(order, picked)]
    return np.concatenate([np.array(picked, order.dtype), rest])


class _Gains:
    """Expected improvements over picked layouts; speed is log-normal, or 0."""

    def __init__(self, log_speed: Floats, fits: Floats, deviation: Floats) -> None:
        reach = DEVIATIONS * float(deviation.max())
        grid = np.linspace(log_speed.min() - reach, log_speed.max() + reach, STEPS)
        self.widths = np.diff(np.exp(grid), prepend=0.0)
        passed = ndtr((grid - log_speed[:, None]) / np.maximum(deviation, 1e-9)[:, None])
        self.slower = 1 - fits[:, None] * (1 - passed)
        """Probability that a layout is slower than each point (shape [rows, STEPS])."""
        self.all_slower = np.ones(STEPS)
        self.not_picked = np.ones(len(log_speed), bool)

    def after(self, picked: int) -> int:
        """Picks a row, and returns the row that would then add most."""
        self.all_slower = self.all_slower * self.slower[picked]
        self.not_picked[picked] = False
        # E[max(a, b)] - E[b] is the integral of P(a > x) P(b < x) over x.
        gains = (1 - self.slower) @ (self.all_slower * self.widths)
        return int(np.argmax(np.where(self.not_picked, gains, -1.0)))
