"""Answers a question: ranks the layouts, drops what cannot run, and says why."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass

import numpy as np

from harness.planner.cluster.calibration import Calibration
from harness.planner.cluster.candidates import enumerate_layouts
from harness.planner.cluster.device_power import Energy, energy
from harness.planner.cluster.layout_ranking import ranked
from harness.planner.cluster.layouts import AXES, Floats, Ints, Layout, Layouts
from harness.planner.cluster.prediction import Predictions, predict
from harness.planner.cluster.question import Question
from harness.planner.cluster.schedule import one_forward_one_backward
from harness.planner.cluster.step_time import stage_seconds
from harness.spec.errors import UsageError

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


@dataclass(frozen=True)
class Parts:
    """Seconds of a step."""

    compute: float
    activation_exchange: float
    data: float
    bubble: float
    launch: float
    offload: float
    update: float


@dataclass(frozen=True)
class Candidate:
    """A layout and what is predicted of it. Each `low` and `high` bound an 80 % interval."""

    layout: Layout
    strategy: str
    seconds: float
    seconds_low: float
    seconds_high: float
    tokens_per_second: float
    """Of all devices together."""
    parts: Parts
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
class Plan:
    """The answer."""

    question: Question
    goal: str
    candidates: tuple[Candidate, ...]
    """Best first."""
    considered: int
    dropped: dict[str, int]
    """Layouts that cannot run, by the reason."""


def strategy_of(layout: Layout) -> str:
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
    question: Question,
    calibration: Calibration,
    goal: str = "throughput",
    top: int = 10,
    price_per_hour: float | None = None,
    layouts: Layouts | None = None,
) -> Plan:
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
    return Plan(
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
    question: Question, result: Predictions, rows: Ints, calibration: Calibration
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
    question: Question,
    result: Predictions,
    row: int,
    seconds: float,
    price_per_hour: float | None,
) -> Candidate:
    layout, time, memory = result.layouts[row], result.time, result.memory
    wide = float(np.exp(result.half_width[row]))
    wide_memory = float(np.exp(result.memory_half_width[row]))
    reserved = float(memory.reserved[row])
    rate = question.tokens / seconds
    price = None
    if price_per_hour is not None:
        price = price_per_hour * question.devices / 3600 / rate * 1e9
    return Candidate(
        layout=layout,
        strategy=strategy_of(layout),
        seconds=seconds,
        seconds_low=seconds / wide,
        seconds_high=seconds * float(np.exp(result.upper[row])),
        tokens_per_second=rate,
        parts=Parts(
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


def _with_energy(candidate: Candidate, used: Energy | None, row: int) -> Candidate:
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


def _nothing_fits(question: Question, result: Predictions, calibration: Calibration) -> str:
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


def _what_is_missing(question: Question, result: Predictions) -> str:
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


def _fits(question: Question, calibration: Calibration) -> bool:
    """Whether some layout is not refused."""
    try:
        layouts = enumerate_layouts(question)
    except UsageError:
        return False
    return not predict(question, layouts, calibration).refused.all()


def _more_devices(question: Question, calibration: Calibration) -> int:
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


def _shorter_sequence(question: Question, calibration: Calibration) -> int:
    """The largest power of two of tokens, fewer than asked for, with which a layout fits; 0 if not
    even one token does."""
    low, high = -1, (question.sequence_length - 1).bit_length()
    while high - low > 1:
        middle = (low + high) // 2
        fewer = dataclasses.replace(question, sequence_length=2**middle)
        low, high = (middle, high) if _fits(fewer, calibration) else (low, middle)
    return 2**low if low >= 0 else 0
