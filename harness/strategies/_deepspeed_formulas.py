"""Formulas of DeepSpeed's memory and traffic: ZeRO (arXiv 1910.02054) and the library's
deviations."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from harness.strategies._deepspeed_swap import SWAPPED_BYTES
from harness.strategies._deepspeed_zero import ZeroOptions
from harness.strategy import Cell, Layout, ModelFacts, States, all_reduced, passed_once


def zero_states(options: ZeroOptions, cell: Cell, layout: Layout, facts: ModelFacts) -> States:
    """Returns the fullest rank's states, with copies that DeepSpeed 0.19.8 adds to ZeRO's (arXiv
    1910.02054, section 3.1).

    Stages 1 to 3 keep an fp32 master partition even for fp32 parameters. Stage 3 also keeps the
    partition's gradients and reduction buckets between steps. States offloaded from a GPU are not
    on the device.
    """
    width = 4 if cell.precision == "fp32" else 2
    moments = cell.moments
    whole, ranks, sizes = sum(facts.sizes), layout.replicas, facts.sizes
    buffers = float(facts.buffer_bytes)
    frozen = (facts.parameter_bytes - facts.trained_bytes) * width / 4
    if options.stage == 0:
        masters = 0 if width == 4 else 4 * whole
        return States(
            width * whole + frozen,
            0,
            4 * moments * whole,
            buffers + masters,
            transient=2 * width * whole,
        )
    if options.stage == 3:
        states = _states_3(options, cell, layout, facts)
        return dataclasses.replace(states, parameters=states.parameters + frozen / ranks)
    part = -(-whole // (2 * ranks))
    part *= 2
    held_until_reduced = whole if options.stage == 1 else options.bucket(sizes)
    transient = max(width * (held_until_reduced + part), 12 * part)
    states = States(
        width * part * ranks + frozen, 0, 4 * moments * part, buffers + 4 * part, transient
    )
    if options.offload_optimizer == "none":
        return states
    if cell.device == "cuda":
        return States(states.parameters, 0, 0, buffers + width * max(sizes), states.transient)
    accumulated = width * part if cell.micro_batches > 1 and options.stage == 2 else 0
    return dataclasses.replace(
        states,
        gradients=4 * part + accumulated,
        library=states.library + width * (part + 2 * max(sizes)),
    )


def _states_3(options: ZeroOptions, cell: Cell, layout: Layout, facts: ModelFacts) -> States:
    """Returns stage 3's states of trained parameters, less those on disk, or in host memory if the
    device is a GPU."""
    swapping = options.swapping(cell, layout.replicas, facts.sizes)
    width, parts, groups = swapping.width, swapping.parts, swapping.groups
    moments = cell.moments
    bucket = options.bucket(facts.sizes)
    optimizer_leaves = options.offload_optimizer != "none" and cell.device == "cuda"
    parameters_leave = options.offload_parameters != "none" and cell.device == "cuda"
    swapped_groups = [
        group
        for group in groups
        if options.offload_optimizer == "nvme" and 4 * sum(group) >= SWAPPED_BYTES
    ]
    swapped_parts = [
        part
        for part in parts
        if options.offload_parameters == "nvme" and width * part >= SWAPPED_BYTES
    ]
    updated = sum(parts) - sum(sum(group) for group in swapped_groups)
    persistent = sum(size for size in facts.sizes if size <= options.persistent_elements)
    library = float(facts.buffer_bytes) + width * (bucket + persistent)
    gradients = width * sum(parts) + (4 * updated if options.offload_optimizer != "none" else 0)
    if not optimizer_leaves:
        library += 4 * updated + (swapping.optimizer_buffer_bytes if swapped_groups else 0)
    if not parameters_leave:
        library += swapping.parameter_buffer_bytes
    return States(
        parameters=0.0 if parameters_leave else width * (sum(parts) - sum(swapped_parts)),
        gradients=0.0 if optimizer_leaves else float(gradients),
        optimizer=0.0 if optimizer_leaves else 4 * moments * updated,
        library=library,
        transient=max(4.0 * width * bucket, 12.0 * max(sum(group) for group in groups)),
    )


def zero_moves(options: ZeroOptions, facts: ModelFacts) -> float:
    """Returns bytes per step to and from disk: masters and two moments in and out, gradients out,
    parameters in twice and out once.

    Host memory is about ten times as fast, so its bytes count a tenth.
    """
    share = {"none": 0.0, "cpu": 0.1, "nvme": 1.0}
    return (
        7.0 * facts.trained_bytes * share[options.offload_optimizer]
        + 3.0 * facts.parameter_bytes * share[options.offload_parameters]
    )


def zero_traffic(
    options: ZeroOptions, cell: Cell, layout: Layout, facts: ModelFacts
) -> float | None:
    """Returns bytes a rank must send per step. The paper (arXiv 1910.02054, section 7) has 2P, 2P
    and 3P elements for stages 1, 2 and 3.

    Stages 1 and 2 send 3P: DeepSpeed all-reduces gradients and gathers the updated parameters.
    Stage 3 gathers for forward and backward, except parameters reused soon (`_reused`); persistent
    ones after the update. Stages 2 and 3 keep no whole gradients, so they reduce after each
    micro-batch. None for stage 3 with recomputation, whose gathers depend on prefetching.
    """
    width, ranks, parts = (
        (4 if cell.precision == "fp32" else 2),
        layout.replicas,
        cell.micro_batches,
    )
    model_bytes = float(width * sum(facts.sizes))
    if options.stage < 3:
        reduced = all_reduced(ranks, model_bytes) * (parts if options.stage == 2 else 1)
        return reduced + (passed_once(ranks, model_bytes) if options.stage else 0.0)
    if cell.recompute != "none":
        return None
    threshold = options.persistent_elements
    kept = float(width * sum(size for size in facts.sizes if size <= threshold))
    reused = width * _reused(facts.sizes, options.bucket(facts.sizes), threshold)
    return passed_once(ranks, parts * (model_bytes + 2 * (model_bytes - kept) - reused) + kept)


def zero_messages(options: ZeroOptions, cell: Cell, facts: ModelFacts) -> float:
    """Returns collectives per step, each of one bucket.

    DeepSpeed sets bucket sizes by `reduce_bucket_size`, `allgather_bucket_size` (stages 1 and 2)
    and `stage3_prefetch_bucket_size` (forward and backward).
    """
    if options.stage == 0:
        return 1.0
    buckets = float(math.ceil(sum(facts.sizes) / options.bucket(facts.sizes)))
    parts = cell.micro_batches
    if options.stage == 3:
        return 3 * parts * buckets
    return buckets * (1 + (parts if options.stage == 2 else 1))


def _reused(sizes: Sequence[int], distance: int, threshold: int) -> int:
    """Returns elements of the last parameters, which stage 3 keeps for backward within the reuse
    distance.

    Parameters up to the threshold are persistent and never gathered.
    """
    between, kept = 0, 0
    for size in reversed(sizes):
        if between >= distance:
            break
        kept += size if size > threshold else 0
        between += 2 * size
    return kept
