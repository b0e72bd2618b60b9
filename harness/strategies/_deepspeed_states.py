"""What a DeepSpeed engine keeps between steps: by name, and by the formula of its config."""

from __future__ import annotations

import dataclasses
import math
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from harness.spec.cell import Cell
from harness.spec.errors import Unavailable
from harness.spec.training import Layout, Retained, States
from harness.strategies._deepspeed import ALIGNED_BYTES, SWAPPED_BYTES, Place
from harness.strategy.formulas import all_reduced, passed_once

if TYPE_CHECKING:
    from torch import Tensor

    from harness.workloads.counts import ModelFacts

_CAP_IPC_LOCK = 14
"""Its bit in a process's capabilities (linux/capability.h)."""


def held_by_engine(engine: Any) -> Iterator[Retained]:
    """Every tensor that engine and optimizer keep, the owner of a storage before its views."""
    for name, buffer in engine.module.named_buffers():
        yield "library", f"model buffer {name}", buffer
    zero = engine.optimizer
    if hasattr(zero, "parameter_offload"):
        yield from _stage_3(engine, zero)
    elif hasattr(zero, "bit16_groups_flat"):
        yield from _stages_1_and_2(zero)
    for name, parameter in engine.module.named_parameters():
        # What is a partition of its own was named above: a whole one beside it is a copy.
        yield (
            ("library", "persistent parameters", parameter)
            if hasattr(parameter, "ds_tensor")
            else ("parameters", name, parameter)
        )
        if parameter.grad is not None:
            yield "gradients", name, parameter.grad
    for state in engine.basic_optimizer.state.values():
        yield from (
            ("optimizer", str(key), value)
            for key, value in state.items()
            if hasattr(value, "untyped_storage")
        )
    for group in getattr(zero, "fp32_groups", ()):
        yield from (("library", "fp32 master weights", master) for master in group)


def engine_waits(engine: Any) -> list[tuple[Any, str, Literal["offload", "optimizer"]]]:
    """For TrainState: DeepSpeed's update around the optimizer's own, and where it waits for its
    reads and writes of a disk.
    """
    zero = engine.optimizer
    named: list[tuple[Any, str, Literal["offload", "optimizer"]]] = [(zero, "step", "optimizer")]
    swapper = next(
        (
            p.nvme_swapper
            for p in engine.module.parameters()
            if getattr(p, "nvme_swapper", None) is not None
        ),
        None,
    )
    if swapper:
        named += [
            (swapper, name, "offload")
            for name in (
                "synchronize_reads",
                "synchronize_writes",
                "swap_out_and_release",
                "swap_in",
            )
        ]
    if states := getattr(zero, "optimizer_swapper", None):
        named += [
            (states, name, "offload")
            for name in (
                "swap_in_optimizer_state",
                "swap_out_optimizer_state",
                "swap_out_gradients",
            )
        ]
    return named


def _masters(masters: Sequence[Any]) -> Iterator[Retained]:
    for master in masters:
        yield "library", "fp32 master partition", master
        if master.grad is not None:
            yield "gradients", "fp32 gradient partition", master.grad


def _stages_1_and_2(zero: Any) -> Iterator[Retained]:
    for flat in zero.bit16_groups_flat:
        yield "parameters", "flat parameters", flat
    yield from _masters(zero.single_partition_of_fp32_groups)
    for bucket in zero.ipg_buckets.values():
        yield from (("library", "reduction bucket", buffer) for buffer in bucket.buffer)
    for gradients in (*zero.averaged_gradients.values(), *zero.all_grad_tensors.values()):
        yield from (("gradients", "averaged gradients", gradient) for gradient in gradients or ())
    if zero.cpu_offload:
        for copy in zero.param_buffer_of_bit16_for_cpu_offload_groups:
            yield "library", "parameter partition on its way back", copy
        yield "library", "gradient on its way out (host)", zero.temp_grad_buffer_for_cpu_offload
        yield "library", "gradient on its way out (device)", zero.temp_grad_buffer_for_gpu_offload
        yield from (
            ("gradients", "accumulated gradients", gradient)
            for gradient in zero.accumulated_grads_in_cpu.values()
        )


def _stage_3(engine: Any, zero: Any) -> Iterator[Retained]:
    for flat in (*zero.fp16_partitioned_groups_flat, *zero.param_groups_fp16_flat_cpu_memory):
        if flat is not None:
            yield "parameters", "flat parameter partitions", flat
    swapper = next(
        (p.nvme_swapper for p in engine.module.parameters() if p.nvme_swapper is not None), None
    )
    if swapper:
        yield "library", "swap buffers of parameters", swapper.buffers
        yield "library", "stand-in for parameters on disk", swapper.invalid_buffer
        if swapper.partitioned_swap_buffer is not None:
            yield "library", "swap buffer of updated parameters", swapper.partitioned_swap_buffer
    for parameter in engine.module.parameters():
        yield "parameters", "parameter partition", parameter.ds_tensor
    yield from _masters(zero.fp32_partitioned_groups_flat)
    yield "gradients", "flat gradient partitions", zero.grad_partitions_flat_buffer
    for bucket in zero.ipg_buckets.values():
        yield "library", "reduction bucket", bucket.buffer
    if zero.optimizer_swapper:
        for buffer in zero.optimizer_swapper.swap_buffer_manager.all_buffers:
            yield "library", "swap buffers of the optimizer", buffer


def full_parameters(engine: Any) -> Iterator[tuple[str, Tensor]]:
    """The module's parameters by name, whole; their fp32 masters where there are any.

    Called on all ranks together.
    """
    from deepspeed.runtime.zero import GatheredParameters
    from deepspeed.utils import safe_get_full_fp32_param

    groups = zip(
        getattr(engine.optimizer, "fp16_groups", ()),
        getattr(engine.optimizer, "fp32_groups", ()),
        strict=False,
    )
    masters = {
        half: master
        for halves, wholes in groups
        for half, master in zip(halves, wholes, strict=True)
    }
    for name, parameter in engine.module.named_parameters():
        whole = masters.get(parameter, safe_get_full_fp32_param(parameter))
        with GatheredParameters(
            [parameter], enabled=whole is None and hasattr(parameter, "ds_id")
        ):  # frozen, in stage 3
            yield name, parameter if whole is None else whole


def engine_states(cell: Cell, layout: Layout, facts: ModelFacts, config: dict[str, Any]) -> States:
    """What the fullest rank keeps, for the copies that DeepSpeed 0.19.8 keeps beside ZeRO's model
    states (arXiv 1910.02054, section 3.1).

    Stages 1 to 3 keep a master of the rank's partition in fp32 also where the parameters are fp32,
    stage 3 the partition's gradients too; reduction buckets outlive the step in stage 3 only.
    States offloaded from a GPU are not on the device.
    """
    zero = config.get("zero_optimization", {"stage": 0})
    width = 4 if cell.precision == "fp32" else 2
    moments = 2 if cell.optimizer == "adamw" else 1
    whole, ranks, sizes = sum(facts.sizes), layout.data, facts.sizes
    buffers, frozen = (
        float(facts.buffer_bytes),
        (facts.parameter_bytes - facts.trained_bytes) * width / 4,
    )
    if zero["stage"] == 0:
        masters = 0 if width == 4 else 4 * whole
        return States(
            width * whole + frozen,
            0,
            4 * moments * whole,
            buffers + masters,
            transient=2 * width * whole,
        )
    if zero["stage"] == 3:
        states = _states_3(cell, ranks, sizes, zero, width, moments, buffers)
        return dataclasses.replace(states, parameters=states.parameters + frozen / ranks)
    part = -(-whole // (2 * ranks))
    part *= 2
    held_until_reduced = whole if zero["stage"] == 1 else zero["reduce_bucket_size"]
    transient = max(width * (held_until_reduced + part), 12 * part)
    states = States(
        width * part * ranks + frozen, 0, 4 * moments * part, buffers + 4 * part, transient
    )
    if "offload_optimizer" not in zero:
        return states
    accumulated = width * part if cell.micro_batches > 1 and zero["stage"] == 2 else 0
    if cell.device == "cuda":
        return States(states.parameters, 0, 0, buffers + width * max(sizes), states.transient)
    library = states.library + width * (part + 2 * max(sizes))
    return States(
        states.parameters, 4 * part + accumulated, states.optimizer, library, states.transient
    )


def engine_moves(facts: ModelFacts, offload_optimizer: Place, offload_parameters: Place) -> float:
    """Bytes of a step to and from a disk: masters and two moments in and out, gradients out;
    parameters in twice and out once.

    Host memory carries about ten times as many in the same time, so what goes there counts a tenth.
    """
    share = {"none": 0.0, "cpu": 0.1, "nvme": 1.0}
    return (
        7.0 * facts.trained_bytes * share[offload_optimizer]
        + 3.0 * facts.parameter_bytes * share[offload_parameters]
    )


def engine_traffic(cell: Cell, layout: Layout, facts: ModelFacts, config: dict[str, Any]) -> float:
    """Bytes that a rank must send per step. The paper (arXiv 1910.02054, section 7) has 2P, 2P and
    3P elements for stages 1, 2 and 3.

    Stages 1 and 2 send 3P: DeepSpeed all-reduces gradients, of which a rank then takes its part,
    and gathers the updated parameters. Stage 3 gathers for forward and backward, but once what
    backward needs soon after forward (`_reused`), and persistent parameters, after the update.
    Stages 2 and 3 keep no whole gradients, and so reduce them after each micro-batch.
    """
    zero = config.get("zero_optimization", {"stage": 0})
    width, ranks, parts = (4 if cell.precision == "fp32" else 2), layout.data, cell.micro_batches
    whole = float(width * sum(facts.sizes))
    if zero["stage"] < 3:
        reduced = all_reduced(ranks, whole) * (parts if zero["stage"] == 2 else 1)
        return reduced + (passed_once(ranks, whole) if zero["stage"] else 0.0)
    kept = float(
        width
        * sum(size for size in facts.sizes if size <= zero["stage3_param_persistence_threshold"])
    )
    return passed_once(
        ranks, parts * (whole + 2 * (whole - kept) - width * _reused(facts.sizes, zero)) + kept
    )


def _reused(sizes: Sequence[int], zero: dict[str, Any]) -> int:
    """Elements of the last parameters, which stage 3 keeps from forward to backward: less than the
    reuse distance lies between."""
    between, kept = 0, 0
    for size in reversed(sizes):
        if between >= zero["stage3_max_reuse_distance"]:
            break
        kept += size if size > zero["stage3_param_persistence_threshold"] else 0
        between += 2 * size
    return kept


def _states_3(
    cell: Cell,
    ranks: int,
    sizes: Sequence[int],
    zero: dict[str, Any],
    width: int,
    moments: int,
    library: float,
) -> States:
    parts = [-(-size // ranks) for size in sizes]
    optimizer_place, parameter_place = (
        zero.get(key, {}).get("device", "none") for key in ("offload_optimizer", "offload_param")
    )
    on_host = [
        place != "none" and cell.device == "cuda" for place in (optimizer_place, parameter_place)
    ]
    groups = _groups(parts, zero["sub_group_size"])
    swapped_groups = [
        g for g in groups if optimizer_place == "nvme" and 4 * sum(g) >= SWAPPED_BYTES
    ]
    swapped_parts = [p for p in parts if parameter_place == "nvme" and width * p >= SWAPPED_BYTES]
    updated = sum(parts) - sum(sum(g) for g in swapped_groups)
    library += width * zero["reduce_bucket_size"] + width * sum(
        s for s in sizes if s <= zero["stage3_param_persistence_threshold"]
    )
    gradients = float(width * sum(parts) + (4 * updated if optimizer_place != "none" else 0))
    of_optimizer, of_parameters = _swap_buffers(sizes, groups, zero, width)
    if not on_host[0]:
        library += 4 * updated + (of_optimizer if swapped_groups else 0)
    if not on_host[1]:
        library += of_parameters
    return States(
        parameters=0.0 if on_host[1] else width * (sum(parts) - sum(swapped_parts)),
        gradients=0.0 if on_host[0] else gradients,
        optimizer=0.0 if on_host[0] else 4 * moments * updated,
        library=library,
        transient=max(4.0 * width * zero["reduce_bucket_size"], 12.0 * max(sum(g) for g in groups)),
    )


def require_locked(cell: Cell, facts: ModelFacts, config: dict[str, Any]) -> None:
    """Raises Unavailable where a rank may not lock (mlock) the memory through which it swaps from
    and to a disk.

    DeepSpeed does not look whether it could, and then writes to an address that it was never given.
    """
    zero = config.get("zero_optimization", {})
    if "nvme" not in (
        zero.get(key, {}).get("device") for key in ("offload_optimizer", "offload_param")
    ):
        return
    groups = _groups([-(-size // cell.devices) for size in facts.sizes], zero["sub_group_size"])
    size = sum(_swap_buffers(facts.sizes, groups, zero, 4 if cell.precision == "fp32" else 2))
    allowed = lockable_bytes()
    if size > allowed:
        raise Unavailable(
            f"DeepSpeed locks {size / 2**20:.1f} MiB of each rank's memory for its disk buffers,"
            f" and a process may lock {allowed / 2**20:.1f} MiB: ulimit -l unlimited (memlock in"
            " /etc/security/limits.conf; docker run --ulimit memlock=-1)"
        )


def lockable_bytes() -> float:
    """Bytes that a process may lock in memory: without a limit for one that has the capability, as
    root has."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    capabilities = next(
        (int(line.split()[1], 16) for line in lines if line.startswith("CapEff:")), 0
    )
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return (
        math.inf if capabilities >> _CAP_IPC_LOCK & 1 or limit == resource.RLIM_INFINITY else limit
    )


def _swap_buffers(
    sizes: Sequence[int], groups: Sequence[Sequence[int]], zero: dict[str, Any], width: int
) -> tuple[int, int]:
    """Bytes of a rank's buffers for swapping optimizer state, and parameters; zero for what stays
    in memory."""
    of_optimizer = of_parameters = 0
    if zero.get("offload_optimizer", {}).get("device") == "nvme":
        of_optimizer = 4 * 4 * _aligned(max(sum(g) for g in groups), 4)
    offload = zero.get("offload_param", {})
    if offload.get("device") == "nvme":
        of_parameters = width * offload["buffer_count"] * _aligned(offload["buffer_size"], width)
        # Room for a sub-group's updated parameters, made for whole parameters although a rank
        # writes its partitions.
        of_parameters += width * sum(_aligned(size, width) for size in _largest(sizes, groups))
    return of_optimizer, of_parameters


def _groups(parts: Sequence[int], size: int) -> list[list[int]]:
    """Consecutive partitions, dealt into sub-groups that are full at `size` elements."""
    groups: list[list[int]] = [[]]
    for part in parts:
        if sum(groups[-1]) >= size:
            groups.append([])
        groups[-1].append(part)
    return groups


def _largest(sizes: Sequence[int], groups: Sequence[Sequence[int]]) -> Sequence[int]:
    """Elements of the whole parameters of the first largest sub-group."""
    largest = max(range(len(groups)), key=lambda i: sum(groups[i]))
    before = sum(len(group) for group in groups[:largest])
    return sizes[before : before + len(groups[largest])]


def _aligned(elements: int, width: int) -> int:
    step = ALIGNED_BYTES // width
    return -(-elements // step) * step
