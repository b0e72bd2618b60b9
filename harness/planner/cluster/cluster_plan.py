"""Ranks the layouts of a question, drops what cannot run and says why; and does so for models and
numbers of devices around the question."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr, ndtri

from harness.planner.cluster.calibration import ClusterCalibration
from harness.planner.cluster.layouts import AXES, PlannedLayout, PlannedLayouts
from harness.planner.cluster.model_shape import ModelShape, named_shapes
from harness.planner.cluster.prediction import LayoutEnergy, Predictions, energy, predict
from harness.planner.cluster.question import ClusterQuestion, enumerate_layouts
from harness.planner.cluster.step_time import one_forward_one_backward, stage_seconds
from harness.planner.fitting import Floats, Ints
from harness.spec.errors import UsageError

TIE = 0.01
"""Logarithm of speeds that no measurement of single steps tells apart: of these layouts the one
that needs less memory is preferred."""
TRIED = 3
"""Places of the list whose layouts are chosen to be tried beside each other."""
CONSIDERED = 512
"""Layouts, the fastest by prediction and the first by speed times the probability to fit, that are
considered for the places after the first."""
STEPS, DEVIATIONS = 96, 5.0
"""Points of the integral over speed, and how many standard deviations it spans on both sides."""
GOALS = ("throughput", "memory", "cost", "energy")
REFINED = 256
"""Layouts, best first, whose pipelines are simulated."""
MOST_STAGES, MOST_SIMULATED = 64, 128
"""Stages, and micro-batches, of a simulated pipeline; further micro-batches each take as long as
the slowest stage."""
MOST_DEVICES = 2**16
"""Up to which devices are added where nothing fits."""
SURE = 0.9
"""Probability to fit from which a layout counts as fitting, where memory is the goal."""
MOST_SIZES = 5
SPAN = 16.0
"""Models are compared whose parameters are at most so many times more or fewer."""
STEPS_BELOW, STEPS_ABOVE = 3, 2
"""Doublings of the devices below and above those that are asked for."""


def ranked(seconds: Floats, fits: Floats, memory_bytes: Floats, half_width: Floats) -> Ints:
    """Row numbers, best first (all arrays of shape [rows]).

    The first place is for who runs one layout: the largest product of speed and probability to fit,
    in classes of TIE, and within a class the least memory. The next places, up to TRIED, are for
    who tries these layouts and keeps the fastest that ran: each goes to the layout that adds most
    to the expected best speed of those before it (expected improvement: Jones, Schonlau and Welch,
    1998). So a faster layout that may not fit comes second, where a layout that fits as surely as
    the first and is slower would add little. All others follow by speed times probability.

    `half_width` is of the 80 % interval of the logarithm of the seconds; errors, and whether memory
    suffices, are taken as independent between layouts.
    """
    score = np.log(np.maximum(fits, 1e-300) / seconds)
    classes = np.floor((score.max() - score) / TIE) if len(score) else score
    order = np.lexsort((memory_bytes, classes))
    fastest = np.argsort(seconds / np.maximum(fits > 0, 1e-300), kind="stable")
    rows = np.unique(np.concatenate([order[:CONSIDERED], fastest[:CONSIDERED]]))
    picked = order[:1].tolist()
    if len(rows) > 1:
        gains = _Gains(-np.log(seconds[rows]), fits[rows], half_width[rows] / ndtri(0.9))
        places = {int(row): place for place, row in enumerate(rows)}
        best = places[picked[0]]
        for _ in range(min(TRIED, len(rows)) - 1):
            best = gains.after(best)
            picked.append(int(rows[best]))
    rest = order[~np.isin(order, picked)]
    return np.concatenate([np.array(picked, order.dtype), rest])


class _Gains:
    """Expected improvements over what is picked, of layouts with log-normal speeds that are 0 where
    they do not fit."""

    def __init__(self, log_speed: Floats, fits: Floats, deviation: Floats) -> None:
        reach = DEVIATIONS * float(deviation.max())
        grid = np.linspace(log_speed.min() - reach, log_speed.max() + reach, STEPS)
        self.widths = np.diff(np.exp(grid), prepend=0.0)
        """Of each step in speed; the first reaches down to 0."""
        passed = ndtr((grid - log_speed[:, None]) / np.maximum(deviation, 1e-9)[:, None])
        self.slower = 1 - fits[:, None] * (1 - passed)
        """Probability that a layout is slower than each point (shape [rows, STEPS])."""
        self.all_slower = np.ones(STEPS)
        """That all picked ones are."""
        self.not_picked = np.ones(len(log_speed), bool)

    def after(self, picked: int) -> int:
        """The row that adds most, once this one is picked too."""
        self.all_slower = self.all_slower * self.slower[picked]
        self.not_picked[picked] = False
        # E[max(a, b)] - E[b] is the integral of P(a > x) P(b < x) over x.
        gains = (1 - self.slower) @ (self.all_slower * self.widths)
        return int(np.argmax(np.where(self.not_picked, gains, -1.0)))


@dataclass(frozen=True)
class ClusterStepParts:
    """Seconds of a step."""

    compute: float
    activation_exchange: float
    data: float
    bubble: float
    launch: float
    offload: float
    update: float


@dataclass(frozen=True)
class ClusterCandidate:
    """A layout and what is predicted of it. Each `low` and `high` bound an 80 % interval."""

    layout: PlannedLayout
    strategy: str
    seconds: float
    seconds_low: float
    seconds_high: float
    tokens_per_second: float
    """Of all devices together."""
    parts: ClusterStepParts
    states_bytes: float
    activations_bytes: float
    working_bytes: float
    allocated_bytes: float
    reserved_bytes: float
    reserved_low: float
    reserved_high: float
    """May exceed the device's memory: then it may not fit."""
    fits: float
    """Probability to run at full speed."""
    doublings_beyond: float
    """How far outside of the calibrated range the question is; 0 inside."""
    price: float | None = None
    """Of a billion tokens, in the unit of the price given; None without a price."""
    joules_per_token: float | None = None
    """Of all devices; None unless energy is the goal. The next two bound its interval."""
    joules_low: float | None = None
    joules_high: float | None = None


@dataclass(frozen=True)
class ClusterPlan:
    """The answer."""

    question: ClusterQuestion
    goal: str
    candidates: tuple[ClusterCandidate, ...]
    """Best first."""
    considered: int
    dropped: dict[str, int]
    """Layouts that cannot run, by the reason."""


def strategy_of(layout: PlannedLayout) -> str:
    """The name by which people know a layout."""
    words = []
    shards = layout.data * layout.context
    if shards > 1:
        words.append(("DDP", "ZeRO-1", "ZeRO-2", "FSDP / ZeRO-3")[layout.zero])
    words += [axis for axis in AXES[1:4] if getattr(layout, axis) > 1]
    if layout.offload:
        words.append("offload")
    return " + ".join(words) or "single device"


def plan(
    question: ClusterQuestion,
    calibration: ClusterCalibration,
    goal: str = "throughput",
    top: int = 10,
    price_per_hour: float | None = None,
    layouts: PlannedLayouts | None = None,
) -> ClusterPlan:
    """Ranks all layouts of a question.

    `price_per_hour` is of one device. Raises UsageError where no layout divides or none fits; the
    sentence says what is missing and the nearest question that has an answer.
    """
    if goal not in GOALS:
        raise UsageError(f"goal {goal!r} is not known; known are {', '.join(GOALS)}")
    if layouts is None:
        layouts = enumerate_layouts(question)
    result = predict(question, layouts, calibration)
    refused = result.refused
    if refused.all():
        raise UsageError(_nothing_fits(question, result, calibration))
    rows = np.flatnonzero(~refused)
    order = rows[np.argsort(-result.score[rows], kind="stable")]
    seconds = _refined(question, result, order[:REFINED], calibration)
    used = None
    if goal == "energy":
        used = energy(question, result.time, seconds, result.half_width)
    if goal == "memory":
        kept = order[result.fits[order] >= SURE]
        kept = kept if len(kept) else order
        best = kept[np.argsort(result.memory.demand[kept], kind="stable")]
    else:
        # On given devices, the cost follows from the time alone.
        ranks = seconds if used is None else used.per_token
        columns = (ranks, result.fits, result.memory.demand, result.half_width)
        best = order[ranked(*(column[order] for column in columns))]
    return ClusterPlan(
        question,
        goal,
        tuple(
            _with_energy(
                _candidate(question, result, int(row), float(seconds[row]), price_per_hour),
                used,
                int(row),
            )
            for row in best[:top]
        ),
        len(layouts),
        _reasons(result, np.flatnonzero(refused)),
    )


def _refined(
    question: ClusterQuestion, result: Predictions, rows: Ints, calibration: ClusterCalibration
) -> Floats:
    """The seconds of all layouts, those of the first few by a simulation of their schedule."""
    seconds = result.seconds.copy()
    layouts = result.layouts
    simulated = [
        row for row in rows if 1 < layouts.pipeline[row] <= MOST_STAGES and layouts.chunks[row] == 1
    ]
    groups: dict[tuple[int, int], list[int]] = {}
    for row in simulated:
        stages = int(layouts.pipeline[row])
        count = min(int(layouts.accumulation[row]), 2 * stages, MOST_SIMULATED)
        groups.setdefault((stages, count), []).append(int(row))
    for (_, count), members in groups.items():
        part = np.array(members)
        chosen = layouts.take(part)
        constants = calibration.time_on(question.cluster.links)
        times = stage_seconds(question, chosen, constants)
        first = one_forward_one_backward(times / 3, times * 2 / 3, count)
        rest = (chosen.accumulation - count) * times.max(axis=1)
        closed = times.sum(axis=1) + (chosen.accumulation - 1) * times.max(axis=1)
        seconds[part] += first + rest - closed
    return seconds


def _candidate(
    question: ClusterQuestion,
    result: Predictions,
    row: int,
    seconds: float,
    price_per_hour: float | None,
) -> ClusterCandidate:
    layout, time, memory = result.layouts[row], result.time, result.memory
    wide = float(np.exp(result.half_width[row]))
    wide_memory = float(np.exp(result.memory_half_width[row]))
    reserved = float(memory.reserved[row])
    rate = question.tokens / seconds
    price = None
    if price_per_hour is not None:
        price = price_per_hour * question.devices / 3600 / rate * 1e9
    return ClusterCandidate(
        layout=layout,
        strategy=strategy_of(layout),
        seconds=seconds,
        seconds_low=seconds / wide,
        seconds_high=seconds * float(np.exp(result.upper[row])),
        tokens_per_second=rate,
        parts=ClusterStepParts(
            compute=float(time.compute[row]),
            activation_exchange=float(time.activation_exchange[row]),
            data=float(time.data[row]),
            # The simulation changes nothing but the waiting.
            bubble=float(time.bubble[row] + seconds - result.seconds[row]),
            launch=float(time.launch[row]),
            offload=float(time.offload[row]),
            update=float(time.update[row]),
        ),
        states_bytes=float(memory.states[row]),
        activations_bytes=float(memory.activations[row]),
        working_bytes=float(memory.working[row]),
        allocated_bytes=float(memory.allocated[row]),
        reserved_bytes=reserved,
        reserved_low=reserved / wide_memory,
        reserved_high=reserved * wide_memory,
        fits=float(result.fits[row]),
        doublings_beyond=float(result.beyond[row]),
        price=price,
    )


def _with_energy(
    candidate: ClusterCandidate, used: LayoutEnergy | None, row: int
) -> ClusterCandidate:
    """The candidate with the energy of its row, where energy is known."""
    if used is None:
        return candidate
    joules, wide = float(used.per_token[row]), float(np.exp(used.half_width[row]))
    return dataclasses.replace(
        candidate, joules_per_token=joules, joules_low=joules / wide, joules_high=joules * wide
    )


def _reasons(result: Predictions, rows: Ints) -> dict[str, int]:
    """How many layouts cannot run for which reason."""
    reasons = Counter(
        "an empty stage of the pipeline"
        if not result.filled[row]
        else "fewer micro-batches than the pipeline needs"
        if not result.fed[row]
        else "memory"
        if result.stored[row]
        else "what a node can hold of what is offloaded"
        for row in rows
    )
    return dict(reasons.most_common())


def _nothing_fits(
    question: ClusterQuestion, result: Predictions, calibration: ClusterCalibration
) -> str:
    """What is missing where no layout fits, and the nearest question in which one does: with a
    larger batch where pipelines lack micro-batches, on more devices, or with a shorter sequence."""
    cluster, name, count = question.cluster, question.shape.name, len(result.layouts)
    if not result.fed.any():
        return (
            f"a batch of {question.global_batch} gives the pipelines of all {count} layouts of"
            f" {name} too few micro-batches; one of {_fed_batch(result)} gives enough"
        )
    words = (
        f"{name} with {question.sequence_length} tokens in a sequence fits {question.devices} x"
        f" {cluster.device} in none of {count} layouts: {_what_is_missing(question, result)}"
    )
    if devices := _more_devices(question, calibration):
        return f"{words}; it fits {devices} of them"
    remedies = []
    if len(cluster.reduce.nodes) == 1:
        remedies.append(f"say what links more than one node of {cluster.per_node} would have")
    if shorter := _shorter_sequence(question, calibration):
        remedies.append(f"give a sequence of {shorter} tokens, which fits")
    else:
        remedies.append("give a device with more memory")
    return f"{words}; {', or '.join(remedies)}"


def _fed_batch(result: Predictions) -> int:
    """The smallest batch that gives a pipeline, with the other sizes of its layout, as many
    micro-batches as its schedule needs."""
    layouts = result.layouts
    plain = layouts.chunks == 1
    needed = layouts.data * layouts.micro_batch * (layouts.pipeline - 1)
    return int(needed[plain].min())


def _what_is_missing(question: ClusterQuestion, result: Predictions) -> str:
    """The least memory of the layouts whose nodes hold what they offload, and whether others do
    not."""
    cluster, words = question.cluster, []
    stored = result.filled & result.fed & result.stored
    if stored.any():
        least = float(np.min(result.memory.allocated[stored]))
        words.append(
            f"the least memory that one needs is {least / 1e9:.1f} GB on a device, which has"
            f" {cluster.memory_bytes / 1e9:.1f} GB"
        )
    if not result.stored.all():
        words.append("others offload more than a node's memory and disks hold")
    return ", and ".join(words)


def _fits(question: ClusterQuestion, calibration: ClusterCalibration) -> bool:
    """Whether some layout is not refused."""
    try:
        layouts = enumerate_layouts(question)
    except UsageError:
        return False
    return not predict(question, layouts, calibration).refused.all()


def _more_devices(question: ClusterQuestion, calibration: ClusterCalibration) -> int:
    """The fewest devices, by doubling up to MOST_DEVICES, on which a layout fits; 0 if none does or
    the links between nodes are not known."""
    cluster, devices = question.cluster, question.devices
    while devices < MOST_DEVICES:
        devices = (
            devices * 2
            if devices < cluster.per_node
            else devices + cluster.per_node * max(1, devices // cluster.per_node)
        )
        if devices > cluster.per_node and devices % cluster.per_node:
            devices = cluster.per_node
        if devices > cluster.per_node and len(cluster.reduce.nodes) == 1:
            return 0
        if _fits(dataclasses.replace(question, devices=devices), calibration):
            return devices
    return 0


def _shorter_sequence(question: ClusterQuestion, calibration: ClusterCalibration) -> int:
    """The largest power of two of tokens, fewer than asked for, with which a layout fits; 0 if not
    even one token does."""
    low, high = -1, (question.sequence_length - 1).bit_length()
    while high - low > 1:
        middle = (low + high) // 2
        fewer = dataclasses.replace(question, sequence_length=2**middle)
        low, high = (middle, high) if _fits(fewer, calibration) else (low, middle)
    return 2**low if low >= 0 else 0


@dataclass(frozen=True)
class SweepSquare:
    """The answer for one model on one number of devices."""

    model: str
    parameters: float
    devices: int
    winner: str
    """The strategy; empty where nothing fits."""
    tokens_per_second: float
    """Of all devices; this and the next bounds are 0 where nothing fits."""
    tokens_low: float
    tokens_high: float
    memory_bytes: float
    """Of the fullest device."""
    memory_low: float
    memory_high: float
    reason: str = ""
    """Why nothing fits."""


def neighbours(shape: ModelShape) -> list[ModelShape]:
    """The model that is asked about among published ones of about its size, smallest first.

    Of several with nearly the same parameters one is enough.
    """
    chosen = [shape]
    near = [
        other
        for other in named_shapes().values()
        if 1 / SPAN <= other.parameters / shape.parameters <= SPAN
        and (other.experts > 1) == (shape.experts > 1)
    ]
    for other in sorted(near, key=lambda other: abs(other.parameters - shape.parameters)):
        apart = all(not 0.7 < other.parameters / one.parameters < 1.4 for one in chosen)
        if apart and len(chosen) < MOST_SIZES:
            chosen.append(other)
    return sorted(chosen, key=lambda one: one.parameters)


def device_counts(question: ClusterQuestion) -> list[int]:
    """The devices that are asked for with doublings below and above, as whole nodes fill them."""
    counts = [round(question.devices * 2.0**step) for step in range(-STEPS_BELOW, STEPS_ABOVE + 1)]
    per_node = question.cluster.per_node
    return [n for n in counts if n >= 1 and (n <= per_node or n % per_node == 0)]


def sweep(
    question: ClusterQuestion, calibration: ClusterCalibration, goal: str
) -> list[SweepSquare]:
    """The best layout of each model on each number of devices, with the batch of the question."""
    return [
        _square(dataclasses.replace(question, shape=shape, devices=devices), calibration, goal)
        for shape in neighbours(question.shape)
        for devices in _possible(question, device_counts(question))
    ]


def _possible(question: ClusterQuestion, counts: Sequence[int]) -> list[int]:
    """Those for which the question says enough of the links."""
    several = len(question.cluster.reduce.nodes) > 1
    return [n for n in counts if several or n <= question.cluster.per_node]


def _square(question: ClusterQuestion, calibration: ClusterCalibration, goal: str) -> SweepSquare:
    shape = question.shape
    try:
        best: ClusterCandidate = plan(question, calibration, goal, top=1).candidates[0]
    except UsageError as error:
        return SweepSquare(
            shape.name, float(shape.parameters), question.devices, "", 0, 0, 0, 0, 0, 0, str(error)
        )
    return SweepSquare(
        shape.name,
        float(shape.parameters),
        question.devices,
        best.strategy,
        best.tokens_per_second,
        question.tokens / best.seconds_high,
        question.tokens / best.seconds_low,
        best.reserved_bytes,
        best.reserved_low,
        best.reserved_high,
    )
