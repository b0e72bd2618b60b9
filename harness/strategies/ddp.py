"""DistributedDataParallel: every rank holds the whole model, gradients are averaged in buckets
during backward."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

from harness.spec.cell import Cell
from harness.spec.errors import Refused, Unavailable
from harness.spec.training import EXACT, Layout, States, Tolerance, TrainStep
from harness.strategies._accelerate_config import accelerate_export
from harness.strategies._ddp import ddp_buckets
from harness.strategy.base import Export, Strategy
from harness.strategy.formulas import all_reduced, passed_once, whole_model_states
from harness.strategy.job import Job
from harness.strategy.step import standard_step
from harness.workloads import make_workload
from harness.workloads.counts import model_facts

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

    from harness.workloads import Workload
    from harness.workloads.counts import ModelFacts

HOOKS = {
    "fp16": Tolerance(1e-3, 0.2, "gradients travel in fp16"),
    "bf16": Tolerance(5e-3, 0.5, "gradients travel in bf16"),
    "powersgd": Tolerance(
        2e-2, 2.0, "PowerSGD sends a rank-4 approximation of each gradient and feeds the error back"
    ),
}


class Ddp(Strategy):
    """DistributedDataParallel: whole model on each rank, gradients all-reduced in buckets during
    backward.

    PowerSGD reduces each bucket several times, each time but the first from a callback of the one
    before, in another thread. With several buckets nothing keeps these in one order on all ranks;
    gloo pairs what comes, and the ranks abort ("Received data size doesn't match", 3 of 3
    launches). On CPUs it therefore gets one bucket for all gradients.
    """

    bucket_cap_mb: float | None = None
    """Size of every gradient bucket in MiB; None: torch's own, 1 for the first and 25 for the
    others.

    Giving 25 is not the same.
    """
    static_graph: bool = False
    """Promise that every step uses the same parameters."""
    gradient_as_bucket_view: bool = False
    """Let gradients live in the buckets instead of being copied to them."""
    comm_hook: Literal["none", "fp16", "bf16", "powersgd"] = "none"
    """Compression of gradients on their way."""

    def check(self, cell: Cell, workload: Workload) -> None:
        if self.comm_hook == "bf16" and cell.device == "cpu":
            raise Unavailable(
                "the bf16 compression hook runs on the NCCL backend only: it needs GPUs"
            )
        least = self._least_bucket(cell, workload)
        if self.bucket_cap_mb is not None and self.bucket_cap_mb < least:
            raise Refused(
                f"PowerSGD aborts on gloo with several buckets: give bucket_cap_mb {least} or more,"
                " or leave it out"
            )

    def _least_bucket(self, cell: Cell, workload: Workload) -> int:
        """MiB that a bucket must hold."""
        one = self.comm_hook == "powersgd" and cell.device == "cpu"
        return -(-model_facts(workload, cell.sequence_length).trained_bytes // 2**20) if one else 0

    def _bucket(self, cell: Cell, workload: Workload) -> float | None:
        """The size that DDP is told, in MiB."""
        return self.bucket_cap_mb or self._least_bucket(cell, workload) or None

    def tolerance(self, cell: Cell, workload: Workload) -> Tolerance:
        return HOOKS.get(self.comm_hook, EXACT)

    def states(self, cell: Cell, layout: Layout, facts: ModelFacts) -> States:
        whole = whole_model_states(cell, facts)
        return dataclasses.replace(whole, transient=0.0) if self.gradient_as_bucket_view else whole

    def traffic(self, cell: Cell, layout: Layout, facts: ModelFacts) -> float | None:
        """An all-reduce of every gradient, and rank 0's buffers to all.

        PowerSGD's has no formula here.
        """
        width = {"none": 1.0, "fp16": 0.5, "bf16": 0.5}.get(self.comm_hook)
        if width is None:
            return None
        return all_reduced(layout.data, facts.trained_bytes * width) + passed_once(
            layout.data, facts.buffer_bytes
        )

    def same_as_ddp(self, cell: Cell) -> str | None:
        names = {"elastic": "torchrun", "spawn": "torch.multiprocessing.spawn"}
        return None if self.model_fields_set else names[cell.launcher]

    def export(self, cell: Cell, to: str) -> Export | None:
        bucket = {"bucket_cap_mb": self._bucket(cell, make_workload(cell.workload))}
        if to == "accelerate":
            return accelerate_export(cell, ddp=self.model_dump() | bucket)
        return Export("ddp.py.j2", bucket) if to in ("torchrun", "slurm") else None

    def setup(self, job: Job) -> TrainStep:
        from torch.nn.parallel import DistributedDataParallel

        model = DistributedDataParallel(
            job.model(),
            device_ids=[job.device] if job.device.type == "cuda" else None,
            bucket_cap_mb=self._bucket(job.cell, job.workload),
            static_graph=self.static_graph,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
        )
        self._compress(model)
        optimizer = job.optimizer(model.parameters())
        job.register(model, optimizer, library=lambda: ddp_buckets(model))
        return standard_step(job, model, optimizer, no_sync=model.no_sync)

    def _compress(self, model: DistributedDataParallel) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        if self.comm_hook == "powersgd":
            state = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=4, start_powerSGD_iter=2
            )
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif self.comm_hook != "none":
            hooks = {
                "fp16": default_hooks.fp16_compress_hook,
                "bf16": default_hooks.bf16_compress_hook,
            }
            model.register_comm_hook(None, hooks[self.comm_hook])
