"""Ranks the layouts of a question, and sweeps models and device counts."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from harness.cell.errors import UsageError
from harness.host.gpu_models import gpu_named
from harness.planner.cluster.calibration import ClusterCalibration, Floats, Ints
from harness.planner.cluster.device_rates import missing_bf16
from harness.planner.cluster.layout_memory import model_states, offloaded_bytes, owned_parameters
from harness.planner.cluster.model_shape import stages
from harness.planner.cluster.prediction import (
    COMPUTING,
    WAITING,
    Predictions,
    energy,
    predict,
    ranked,
)
from harness.planner.cluster.question import (
    AXES,
    ClusterQuestion,
    PlannedLayout,
    PlannedLayouts,
    enumerate_layouts,
)
from harness.planner.cluster.recipe import STATES

GIB = 2**30
SLOW_LINK = 64e9
"""Bytes per second of PCIe 5.0, below which links within a node count as slow."""
GOALS = ("throughput", "memory", "cost", "energy")
MOST_DEVICES = 2**16
SURE = 0.9
"""Probability of fitting from which a layout counts as fitting, if memory is the goal."""
LIKELY = 0.5
"""Probability of fitting without offload from which layouts with offload are left out."""
PART_WORDS = {
    "compute": "computing",
    "activation_exchange": "exposed communication of tensor, context and expert parallelism",
    "data": "exposed communication of gradients and parameters",
    "bubble": "waiting in the pipeline",
    "launch": "waiting for the processor's launches",
    "offload": "moving offloaded tensors",
    "update": "the optimizer's update",
}
RISKIER = 0.95
"""Share of the winner's probability of fitting below which the probability of another layout is
mentioned."""
_Bounded: TypeAlias = tuple[float, float, float]
"""Predicted value, and the lower and upper bounds of its 80% interval."""


@dataclass(frozen=True)
class ClusterCandidate:
    """A layout and its predictions; `low` and `high` bound 80% intervals."""

    layout: PlannedLayout
    strategy: str
    seconds: float
    seconds_low: float
    seconds_high: float
    tokens_per_second: float
    parts: dict[str, float]
    """Seconds by key of PART_WORDS."""
    states_bytes: float
    activations_bytes: float
    working_bytes: float
    allocated_bytes: float
    reserved_bytes: float
    reserved_low: float
    reserved_high: float
    fits: float
    doublings_beyond: float
    price: float | None = None
    """Price per billion tokens."""
    joules_per_token: float | None = None
    """Energy of all devices."""
    joules_low: float | None = None
    joules_high: float | None = None
    rehearsed_bytes: float | None = None
    """Peak that a rehearsal of the suite's code found. None if no rehearsal was asked for."""
    rehearsal: str = ""
    """Rehearsed strategy, or the reason why there is no rehearsal."""


@dataclass(frozen=True)
class ClusterPlan:
    question: ClusterQuestion
    goal: str
    candidates: tuple[ClusterCandidate, ...]
    considered: int
    dropped: dict[str, int]


def strategy_of(layout: PlannedLayout) -> str:
    options = []
    shards = layout.data * layout.context
    if shards > 1:
        options.append(("DDP", "ZeRO-1", "ZeRO-2", "FSDP / ZeRO-3")[layout.zero])
    options += [axis for axis in AXES[1:4] if getattr(layout, axis) > 1]
    if layout.offload:
        options.append("offload")
    return " + ".join(options) or "single device"


def plan(
    question: ClusterQuestion,
    calibration: ClusterCalibration,
    goal: str = "throughput",
    top: int = 10,
    price_per_hour: float | None = None,
    layouts: PlannedLayouts | None = None,
) -> ClusterPlan:
    """Ranks all layouts of a question. `price_per_hour`: of one device. Raises UsageError with the
    nearest answerable question if no layout fits."""
    if top < 1:
        raise UsageError(f"top {top}: give the number of layouts to return, at least 1")
    if goal not in GOALS:
        raise UsageError(f"unknown goal {goal!r}; known goals are {', '.join(GOALS)}")
    if layouts is None:
        layouts = enumerate_layouts(question)
        within = layouts.take(layouts.offload == 0)
        # Offload is slower and hardly measured, so it is for models that do not fit without it.
        if predict(question, within, calibration).fits.max() >= LIKELY:
            layouts = within
    result = predict(question, layouts, calibration)
    refused = result.refused
    if refused.all():
        raise UsageError(_nothing_fits(question, result, calibration))
    rows = np.flatnonzero(~refused)
    order = rows[np.argsort(-result.score[rows], kind="stable")]
    used = None
    if goal == "energy":
        used = energy(question, result.time, result.seconds, result.half_width)
    if goal == "memory":
        fitting = order[result.fits[order] >= SURE]
        fitting = fitting if len(fitting) else order
        best = fitting[np.argsort(result.memory.demand[fitting], kind="stable")]
    else:
        # With a fixed device count, cost depends on time alone.
        ranks = result.seconds if used is None else used[0]
        columns = (ranks, result.fits, result.memory.demand, result.half_width)
        best = order[ranked(*(column[order] for column in columns))]
    return ClusterPlan(
        question,
        goal,
        tuple(_candidate(question, result, int(row), price_per_hour, used) for row in best[:top]),
        len(layouts),
        _reasons(result, np.flatnonzero(refused)),
    )


def _candidate(
    question: ClusterQuestion,
    result: Predictions,
    row: int,
    price_per_hour: float | None,
    energies: tuple[Floats, Floats] | None,
) -> ClusterCandidate:
    layout, memory, seconds = result.layouts[row], result.memory, float(result.seconds[row])
    parts = {name: float(getattr(result.time, name)[row]) for name in PART_WORDS}
    wide = float(np.exp(result.half_width[row]))
    wide_memory = float(np.exp(result.memory_half_width[row]))
    reserved = float(memory.reserved[row])
    rate = question.tokens / seconds
    price = None
    if price_per_hour is not None:
        price = price_per_hour * question.devices / 3600 / rate * 1e9
    joules = joules_low = joules_high = None
    if energies is not None:
        joules, wide_energy = float(energies[0][row]), float(np.exp(energies[1][row]))
        joules_low, joules_high = joules / wide_energy, joules * wide_energy
    return ClusterCandidate(
        layout=layout,
        strategy=strategy_of(layout),
        seconds=seconds,
        seconds_low=seconds / wide,
        seconds_high=seconds * float(np.exp(result.upper[row])),
        tokens_per_second=rate,
        parts=parts,
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
        joules_per_token=joules,
        joules_low=joules_low,
        joules_high=joules_high,
    )


def _reasons(result: Predictions, rows: Ints) -> dict[str, int]:
    reasons = Counter(
        "an empty stage of the pipeline"
        if not result.filled[row]
        else "fewer micro-batches than the pipeline needs"
        if not result.fed[row]
        else "memory"
        if result.stored[row]
        else "more offload than a node can hold"
        for row in rows
    )
    return dict(reasons.most_common())


def _nothing_fits(
    question: ClusterQuestion, result: Predictions, calibration: ClusterCalibration
) -> str:
    cluster, name, count = question.cluster, question.shape.name, len(result.layouts)
    if not result.fed.any():
        layouts = result.layouts
        needed = layouts.data * layouts.micro_batch * (layouts.pipeline - 1)
        batch = int(needed[layouts.chunks == 1].min())
        return (
            f"a batch of {question.global_batch} gives all {count} layouts of {name} too few"
            f" micro-batches for their pipelines; use a batch of {batch}"
        )
    text = (
        f"none of {count} layouts of {name} with {question.sequence_length} tokens per sequence"
        f" fits on {question.devices} x {cluster.device}: {_what_is_missing(question, result)}"
    )
    if devices := _more_devices(question, calibration):
        return f"{text}; it fits on {devices} of them"
    remedies = []
    if cluster.is_one_node:
        remedies.append(f"add a rate between nodes of {cluster.per_node} to the link")
    if shorter := _shorter_sequence(question, calibration):
        remedies.append(f"give a sequence of {shorter} tokens, which fits")
    else:
        remedies.append("give a device with more memory")
    return f"{text}; {', or '.join(remedies)}"


def _what_is_missing(question: ClusterQuestion, result: Predictions) -> str:
    cluster, missing = question.cluster, []
    stored = result.filled & result.fed & result.stored
    if stored.any():
        least = float(np.min(result.memory.allocated[stored]))
        missing.append(
            f"the smallest needs {least / GIB:.1f} GiB per device, which has"
            f" {cluster.memory_bytes / GIB:.1f} GiB"
        )
    if not result.stored.all():
        missing.append("other layouts offload more than a node's memory and disks hold")
    return ", and ".join(missing)


def _fits(question: ClusterQuestion, calibration: ClusterCalibration) -> bool:
    try:
        layouts = enumerate_layouts(question)
    except UsageError:
        return False
    return not predict(question, layouts, calibration).refused.all()


def _more_devices(question: ClusterQuestion, calibration: ClusterCalibration) -> int:
    """Doubles the devices until a layout fits and returns their number; 0 if none fits."""
    cluster, devices = question.cluster, question.devices
    while devices < MOST_DEVICES:
        devices = (
            devices * 2
            if devices < cluster.per_node
            else devices + cluster.per_node * max(1, devices // cluster.per_node)
        )
        if devices > cluster.per_node and devices % cluster.per_node:
            devices = cluster.per_node
        if devices > cluster.per_node and cluster.is_one_node:
            return 0
        if _fits(dataclasses.replace(question, devices=devices), calibration):
            return devices
    return 0


def _shorter_sequence(question: ClusterQuestion, calibration: ClusterCalibration) -> int:
    """Returns the largest power of two below the requested sequence length that fits, or 0."""
    low, high = -1, (question.sequence_length - 1).bit_length()
    while high - low > 1:
        middle = (low + high) // 2
        fewer = dataclasses.replace(question, sequence_length=2**middle)
        low, high = (middle, high) if _fits(fewer, calibration) else (low, middle)
    return 2**low if low >= 0 else 0


def explanation(plan: ClusterPlan) -> list[str]:
    best = plan.candidates[0]
    sentences = [_hardware_sentence(plan), _why_not_whole(plan), _time(best), _memory(plan, best)]
    sentences.append(_host_memory(plan, best))
    if len(plan.candidates) > 1:
        sentences.append(_next(best, plan.candidates[1], plan.goal))
    if best.doublings_beyond > 0:
        sentences.append(
            f"The question lies {best.doublings_beyond:.1f} doublings outside the calibrated range,"
            " so the intervals are wider and rest on an assumption."
        )
    if plan.question.precision != "fp32":
        sentences.append(missing_bf16(gpu_named(plan.question.cluster.device)))
    sentences.append(plan.question.shape.undescribed)
    if plan.goal == "cost":
        sentences.append(
            "With a fixed number of devices, the fastest layout is also the cheapest; compare"
            " prices per billion tokens for different numbers of devices."
        )
    if plan.goal == "energy":
        sentences.append(
            f"Energy counts only the devices, assumed to draw {COMPUTING:.0%} of their maximum"
            f" power while computing and {WAITING:.0%} while waiting."
        )
    return [sentence for sentence in sentences if sentence]


def _hardware_sentence(plan: ClusterPlan) -> str:
    question, layout = plan.question, plan.candidates[0].layout
    inside = question.cluster.reduce_bytes_per_second
    if question.devices == 1:
        return "One device: nothing is communicated, so only memory decides."
    if question.nodes == 1:
        if inside < SLOW_LINK:
            return (
                f"One node with slow links ({inside / 1e9:.0f} GB/s): tensor parallelism, which"
                " communicates in every layer, waits for them."
            )
        return (
            "One node: all devices share fast links, so tensor parallelism is affordable if memory"
            " requires it."
        )
    nodes, per_node = np.array(question.nodes), np.array(question.cluster.per_node)
    outside = float(question.cluster.bandwidth(inside, nodes, per_node))
    speed = "slow" if outside < inside / 4 else "fast"
    ranks = layout.data * layout.context
    span = "stays inside a node" if layout.tensor <= per_node else "spans nodes"
    axes = [f"tensor parallelism {span}"] if layout.tensor > 1 else []
    if ranks > 1 and ranks * layout.tensor > per_node:
        often = "once per step" if layout.zero < 2 else "once per step or micro-batch"
        axes.append(f"the data axis, which communicates {often}, crosses nodes")
    elif layout.pipeline > 1:
        axes.append("the pipeline crosses nodes")
    return (
        f"{question.nodes} nodes over {speed} links ({outside / 1e9:.0f} GB/s against"
        f" {inside / 1e9:.0f} GB/s inside): {', '.join(axes)}."
    )


def _host_memory(plan: ClusterPlan, best: ClusterCandidate) -> str:
    if best.layout.offload not in (1, 2):
        return ""
    question, layouts = plan.question, PlannedLayouts.of([best.layout])
    shape, cluster = question.shape, question.cluster
    owned = max(
        owned_parameters(shape, layouts, stage) for stage in stages(shape, best.layout.pipeline)
    )
    needed = offloaded_bytes(cluster, layouts, owned, STATES[question.precision])
    return (
        f"Offload takes {needed[0] / GIB:.0f} of {cluster.host_memory_bytes / GIB:.0f} GiB of host"
        f" memory per node{', which is assumed' if cluster.host_memory_assumed else ''}."
    )


def _why_not_whole(plan: ClusterPlan) -> str:
    question = plan.question
    shape, limit = question.shape, question.cluster.memory_bytes
    whole, layer = (
        float(sum(model_states(float(count), float(count), 0, STATES[question.precision])))
        for count in (shape.parameters, shape.layer_parameters)
    )
    if layer > limit:
        return (
            f"A single layer's states ({layer / GIB:.0f} GiB) exceed a device"
            f" ({limit / GIB:.0f} GiB): only tensor or expert parallelism, or sharding, splits it."
        )
    if whole > limit:
        return (
            f"The model's states ({whole / GIB:.0f} GiB) exceed a device ({limit / GIB:.0f} GiB),"
            " so they are split by tensor or pipeline parallelism, sharded, or offloaded."
        )
    return (
        f"The model's states ({whole / GIB:.0f} GiB) fit a device ({limit / GIB:.0f} GiB) before"
        " activations."
    )


def _time(best: ClusterCandidate) -> str:
    shares = sorted(best.parts.items(), key=lambda item: -item[1])
    listed = [
        f"{value / best.seconds:.0%} {PART_WORDS[name]}"
        for name, value in shares
        if value / best.seconds >= 0.01
    ]
    return f"Its step of {best.seconds:.3g} s is {', '.join(listed)}."


def _memory(plan: ClusterPlan, best: ClusterCandidate) -> str:
    limit = plan.question.cluster.memory_bytes
    return (
        f"The fullest device reserves {best.reserved_bytes / GIB:.1f} of {limit / GIB:.1f} GiB"
        f" (allocates {best.allocated_bytes / GIB:.1f}: states {best.states_bytes / GIB:.1f},"
        f" activations {best.activations_bytes / GIB:.1f});"
        f" it fits with a probability of {best.fits:.0%}."
    )


def open_questions(candidates: Sequence[ClusterCandidate], goal: str) -> list[ClusterCandidate]:
    """Returns the candidates that are tied with the first in what the goal ranks by."""
    first = _goal_value(candidates[0], goal)
    return [
        candidate
        for candidate in candidates[1:]
        if _intervals_overlap(first, _goal_value(candidate, goal))
    ]


def _goal_value(candidate: ClusterCandidate, goal: str) -> _Bounded:
    """Returns the bytes, joules or seconds that a goal ranks by."""
    if goal == "memory":
        return candidate.reserved_bytes, candidate.reserved_low, candidate.reserved_high
    joules, low, high = candidate.joules_per_token, candidate.joules_low, candidate.joules_high
    if goal == "energy" and joules is not None and low is not None and high is not None:
        return joules, low, high
    return candidate.seconds, candidate.seconds_low, candidate.seconds_high


def _intervals_overlap(first: _Bounded, second: _Bounded) -> bool:
    return second[1] <= first[2] and first[1] <= second[2]


def _next(best: ClusterCandidate, other: ClusterCandidate, goal: str) -> str:
    ratio = other.seconds / best.seconds
    if _intervals_overlap(*(_goal_value(candidate, "throughput") for candidate in (best, other))):
        verdict = "is tied with it until measured"
    else:
        verdict = "is slower" if ratio > 1 else "is faster"
    needs = ""
    if goal in ("memory", "energy"):
        first, second = _goal_value(best, goal), _goal_value(other, goal)
        tied = ", which is a tie until measured" if _intervals_overlap(first, second) else ""
        needs = f"; it needs {second[0] / first[0]:.2f} times as much {goal}{tied}"
    risk = ""
    if other.fits < RISKIER * best.fits:
        risk = f"; it fits with a probability of only {other.fits:.0%}"
    return (
        f"The next, {other.layout.text}, takes {ratio:.2f} times as long and"
        f" {verdict}{needs}{risk}."
    )
