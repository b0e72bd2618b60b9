"""The training step that most strategies share: forward, backward, optimizer, over
micro-batches."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from harness.cell import Cell
from harness.errors import Refused
from harness.strategy import Batch, Held, Job, Layout, States, TrainStep

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.amp.grad_scaler import GradScaler
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim import Optimizer

    from harness.workloads.facts import ModelFacts

LOSS_SCALE = 4096.0


def standard_step(
    job: Job,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    no_sync: Callable[[], contextlib.AbstractContextManager[Any]] | None = None,
    before_update: Callable[[], None] | None = None,
    around_update: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    scaler: GradScaler | None = None,
    clear: Callable[[], object] | None = None,
) -> TrainStep:
    """One optimizer step: every micro-batch forward and backward, then the update.

    The loss of each micro-batch is divided by their number, so that equal parts give the whole
    batch's mean gradient. fp16 gets dynamic loss scaling (torch.amp.GradScaler), other precisions
    none. `no_sync` is entered for all micro-batches but the last; `before_update` runs between the
    last backward and the optimizer, `around_update` is entered around the optimizer's step.
    `scaler` takes the place of the one made here, `clear` that of the optimizer's `zero_grad`.
    """
    import torch

    scaler = scaler or loss_scaler(job)
    clear = clear or optimizer.zero_grad
    parts = job.cell.micro_batches

    def step(batch: Batch) -> Tensor:
        total = torch.zeros((), device=job.device)
        for index, part in enumerate(batch.split(parts)):
            with no_sync() if no_sync and index < parts - 1 else contextlib.nullcontext():
                loss = job.loss(model, part) / parts
                scaler.scale(loss).backward()
            total += loss.detach()
        if before_update:
            before_update()
        with around_update():
            scaler.step(optimizer)
        scaler.update()
        clear()
        return total

    return step


def loss_scaler(job: Job) -> GradScaler:
    """Dynamic loss scaling in an fp16 cell, none in any other.

    It starts at 4096: torch's 65536 overflows now and then in the first steps, and the step that is
    then skipped is another training than the reference's.
    """
    from torch.amp.grad_scaler import GradScaler

    return GradScaler(job.device.type, init_scale=LOSS_SCALE, enabled=job.cell.precision == "fp16")


def own_precision(job: Job) -> Job:
    """The job without autocast and loss scaling: for strategies that bring about the cell's
    precision themselves."""
    return dataclasses.replace(job, cell=job.cell.model_copy(update={"precision": "fp32"}))


def model_states(cell: Cell, facts: ModelFacts, shards: int = 1) -> States:
    """Parameters and optimizer state, cut into equal shards; gradients, sharded as they are, are
    freed by zero_grad.

    AdamW keeps two moments of a trained parameter's size, SGD with momentum one (ZeRO, arXiv
    1910.02054, section 3.1, for fp32). What the layers keep beside their parameters is whole on
    every rank.
    """
    moments = 2.0 if cell.optimizer == "adamw" else 1.0
    return States(
        parameters=facts.parameter_bytes / shards,
        optimizer=moments * facts.trained_bytes / shards,
        library=float(facts.buffer_bytes),
        transient=facts.trained_bytes / shards,
    )


def whole_model_states(cell: Cell, facts: ModelFacts) -> States:
    """DDP: everything on every rank, and the buckets that gradients are averaged in."""
    states = model_states(cell, facts)
    return dataclasses.replace(states, library=states.library + facts.trained_bytes)


def all_reduced(ranks: int, size: float) -> float:
    """Bytes that each rank must send for an all-reduce of `size` bytes (see
    harness/measure/collectives.py)."""
    return 2 * passed_once(ranks, size)


def passed_once(ranks: int, size: float) -> float:
    """The same for a reduce-scatter, an all-gather or, mean of the ranks, a broadcast."""
    return (ranks - 1) / ranks * size


def hidden_bytes(cell: Cell, layout: Layout) -> float | None:
    """Bytes of the hidden states between two blocks, of all samples that a rank sees in a step;
    None where the dtype may change."""
    from harness.workloads import make_workload

    if cell.precision != "fp32":
        return None
    hidden: int = make_workload(cell.workload).hf_config().hidden_size
    return 4.0 * cell.global_batch // layout.data * cell.sequence_length * hidden


def fullest_share(sizes: Iterable[int], ranks: int) -> int:
    """Elements of the fullest rank when whole tensors are dealt out, each to the rank that has
    fewest so far."""
    shares = [0] * ranks
    for size in sizes:
        shares[shares.index(min(shares))] += size
    return max(shares)


def ddp_buckets(model: DistributedDataParallel) -> Iterator[Held]:
    """DDP's gradient buckets, which live in C++ and are known by their sizes only."""
    data = model._get_ddp_logging_data()
    sizes = (
        data.get("rebuilt_bucket_sizes") or data["bucket_sizes"]
    )  # told a step after they were rebuilt
    views = (
        sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
        if model.gradient_as_bucket_view
        else 0
    )
    yield (
        "library",
        "gradient buckets of DDP's reducer",
        sum(int(size) for size in sizes.split(",")) - views,
    )


def blocks_of(job: Job, model: nn.Module) -> list[nn.Module]:
    """The model's blocks, none where its workload does not say which they are."""
    return (
        list(model.get_submodule(job.workload.block_path).children())
        if job.workload.block_path
        else []
    )


def check_hybrid(cell: Cell) -> None:
    """Raises Refused where there are too few devices to both shard and replicate."""
    if cell.devices < 4 or cell.devices % 2:
        raise Refused(
            "hybrid sharding makes 2 replicas of at least 2 shards each: it needs 4, 6, 8 ..."
            f" devices, not {cell.devices}"
        )


def shard_mesh(job: Job, hybrid: bool) -> DeviceMesh:
    """(shards), or for hybrid sharding (2 replicas, shards)."""
    from torch.distributed.device_mesh import init_device_mesh

    devices, kind = job.cell.devices, job.device.type
    if hybrid:
        return init_device_mesh(kind, (2, devices // 2), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh(kind, (devices,), mesh_dim_names=("shard",))


def halve(model: nn.Module, dtype: torch.dtype, keep_batch_norm: bool) -> None:
    """Casts parameters, and inputs on their way in; buffers only where BatchNorm wants one dtype
    for all it holds."""
    from torch.nn.modules.batchnorm import _BatchNorm

    for module in model.modules():
        if not isinstance(module, _BatchNorm):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(dtype)
        elif not keep_batch_norm:
            module.to(dtype)

    def cast(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs)

    model.register_forward_pre_hook(cast)
