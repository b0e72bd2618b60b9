"""Explains in sentences why a layout was chosen."""

from __future__ import annotations

import numpy as np

from harness.planner.cluster.cluster_plan import ClusterCandidate, ClusterPlan
from harness.planner.cluster.layout_memory import model_states
from harness.planner.cluster.prediction import COMPUTING, WAITING

PART_WORDS = {
    "compute": "computing",
    "activation_exchange": "exposed communication of tensor, context and expert parallelism",
    "data": "exposed communication of gradients and parameters",
    "bubble": "waiting in the pipeline",
    "launch": "waiting for the processor to launch work",
    "offload": "moving offloaded tensors",
    "update": "the optimizer's update",
}

RISKIER = 0.95
"""Share of the best layout's probability to fit below which the next one's is mentioned."""


def explanation(plan: ClusterPlan) -> list[str]:
    best = plan.candidates[0]
    sentences = [_place(plan), _why_not_whole(plan), _time(best), _memory(plan, best)]
    if len(plan.candidates) > 1:
        sentences.append(_next(best, plan.candidates[1]))
    if best.doublings_beyond > 0:
        sentences.append(
            f"The question lies {best.doublings_beyond:.1f} doublings outside the calibrated range,"
            " so the intervals are wider and rest on an assumption."
        )
    if plan.goal == "cost":
        sentences.append(
            "For a given number of devices, the fastest layout is the cheapest; compare prices of a"
            " billion tokens for several numbers of devices."
        )
    if plan.goal == "energy":
        sentences.append(
            f"Energy is that of the devices alone, assumed to draw {COMPUTING:.0%} of their maximum"
            f" power while they compute and {WAITING:.0%} while they wait."
        )
    return [sentence for sentence in sentences if sentence]


def _place(plan: ClusterPlan) -> str:
    question, layout = plan.question, plan.candidates[0].layout
    if question.devices == 1:
        return "One device: nothing is communicated, so only memory decides."
    if question.nodes == 1:
        return (
            "One node: all devices share fast links, so tensor parallelism is affordable if memory"
            " requires it."
        )
    inside, outside = question.cluster.reduce.at(np.array([1, question.nodes])).tolist()
    speed = "slow" if outside < inside / 4 else "fast"
    inner = layout.tensor <= question.cluster.per_node
    span = "stays inside a node" if inner else "spans nodes"
    tensor = f"tensor parallelism {span}, " if layout.tensor > 1 else ""
    return (
        f"{question.nodes} nodes over {speed} links ({outside / 1e9:.0f} GB/s against"
        f" {inside / 1e9:.0f} GB/s inside): {tensor}the data axis, which communicates once per step"
        f"{'' if layout.zero < 2 else ' or micro-batch'}, crosses nodes."
    )


def _why_not_whole(plan: ClusterPlan) -> str:
    """Says whether the whole model, or a layer, fits a device."""
    question = plan.question
    shape, limit = question.shape, question.cluster.memory_bytes
    whole, layer = (
        float(model_states(float(count), 1, 0))
        for count in (shape.parameters, shape.layer_parameters)
    )
    if layer > limit:
        return (
            f"A single layer's states ({layer / 1e9:.0f} GB) exceed a device"
            f" ({limit / 1e9:.0f} GB): only tensor or expert parallelism, or sharding, splits it."
        )
    if whole > limit:
        return (
            f"The model's states ({whole / 1e9:.0f} GB) exceed a device ({limit / 1e9:.0f} GB), so"
            " they are split by tensor or pipeline parallelism, sharded, or offloaded."
        )
    return (
        f"The model's states ({whole / 1e9:.0f} GB) fit a device ({limit / 1e9:.0f} GB) before"
        " activations."
    )


def _time(best: ClusterCandidate) -> str:
    parts = {name: getattr(best.parts, name) for name in PART_WORDS}
    shares = sorted(parts.items(), key=lambda item: -item[1])
    listed = [
        f"{value / best.seconds:.0%} {PART_WORDS[name]}"
        for name, value in shares
        if value / best.seconds >= 0.01
    ]
    return f"Its step of {best.seconds:.3g} s is {', '.join(listed)}."


def _memory(plan: ClusterPlan, best: ClusterCandidate) -> str:
    limit = plan.question.cluster.memory_bytes
    return (
        f"The fullest device reserves {best.reserved_bytes / 1e9:.1f} of {limit / 1e9:.1f} GB"
        f" (states {best.states_bytes / 1e9:.1f}, activations {best.activations_bytes / 1e9:.1f});"
        f" it fits with a probability of {best.fits:.0%}."
    )


def _next(best: ClusterCandidate, other: ClusterCandidate) -> str:
    ratio = other.seconds / best.seconds
    apart = other.seconds_low > best.seconds_high
    verdict = "is slower" if apart else "is tied with it until measured"
    risk = (
        f"; it fits with a probability of only {other.fits:.0%}"
        if other.fits < RISKIER * best.fits
        else ""
    )
    return f"The next, {other.layout.text}, takes {ratio:.2f} times as long and {verdict}{risk}."
