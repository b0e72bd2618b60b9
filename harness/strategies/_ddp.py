"""torch's DistributedDataParallel: wrapping, gradient buckets and compression hooks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from harness.strategy import Cell, Job, Retained, Tolerance, Workload, model_facts

if TYPE_CHECKING:
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel


COMPRESSED = {
    "fp16": Tolerance(1e-3, 0.2, "gradients travel in fp16"),
    "bf16": Tolerance(5e-3, 0.5, "gradients travel in bf16"),
    "powersgd": Tolerance(
        2e-2, 2.0, "PowerSGD sends a rank-4 approximation of each gradient and feeds the error back"
    ),
}
"""Deviation from the reference allowed for each compression hook."""


def wrap_in_ddp(
    job: Job,
    model: nn.Module,
    *,
    bucket_cap_mb: float | None = None,
    static_graph: bool = False,
    gradient_as_bucket_view: bool = False,
) -> DistributedDataParallel:
    """Wraps the model in DDP on this rank's device, with torch's defaults for options not given."""
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(
        model,
        device_ids=[job.device] if job.device.type == "cuda" else None,
        bucket_cap_mb=bucket_cap_mb,
        static_graph=static_graph,
        gradient_as_bucket_view=gradient_as_bucket_view,
    )


def ddp_buckets(model: DistributedDataParallel) -> Iterator[Retained]:
    """Yields DDP's gradient buckets, which live in C++ and expose only their sizes."""
    data = model._get_ddp_logging_data()
    # Rebuilt sizes appear one step after the rebuild.
    sizes = data.get("rebuilt_bucket_sizes") or data["bucket_sizes"]
    views = (
        sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
        if model.gradient_as_bucket_view
        else 0
    )
    total = sum(int(size) for size in sizes.split(","))
    yield "library", "gradient buckets of DDP's reducer", total - views


def least_bucket_mib(hook: str, cell: Cell, workload: Workload) -> int:
    """Returns the minimum bucket size in MiB under this hook; 0: any size.

    PowerSGD reduces each bucket several times, from callbacks in another thread, in no common order
    across ranks. With several buckets gloo pairs the wrong ones and aborts ("Received data size
    doesn't match", 3 of 3 trials). So on CPUs one bucket must hold all gradients.
    """
    if hook != "powersgd" or cell.device != "cpu":
        return 0
    return -(-model_facts(workload, cell.sequence_length).trained_bytes // 2**20)


def compress(model: DistributedDataParallel, hook: str) -> None:
    """Compresses gradients by torch's hook of this name: fp16, bf16 or powersgd."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=4, start_powerSGD_iter=2
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return
    hooks = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
    model.register_comm_hook(None, hooks[hook])
