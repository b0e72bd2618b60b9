from __future__ import annotations

from typing import Any

from pydantic import Field

from harness.cell.errors import Refused
from harness.cell.training import EMULATED, EXACT, Tolerance, TrainStep, first_replayed
from harness.seam import Capabilities, Cell, Job, Strategy
from harness.seam.checkpoints import StateFiles
from harness.seam.job import standard_step
from harness.strategies._replicas import replicas_of
from harness.strategies.ddp import ddp_buckets, wrap_in_ddp
from harness.workloads import Workload


class PostLocalSgd(Strategy):
    """Post-local SGD: DDP until a start step, then local steps and periodic parameter averages.

    AdamW's moments are never averaged. torch's gradient averaging within a node is off, since a
    single node would otherwise take no local steps.
    """

    capabilities = Capabilities(
        # With fp16 loss scaling, one rank alone could skip a step and its average.
        precisions=("fp32", "bf16"),
        # Between averages every rank has its own parameters.
        checkpoints=("sharded",),
        reshards=False,
    )

    start_step: int = Field(default=4, ge=0)
    """First step whose gradients are not averaged."""
    period: int = Field(default=4, ge=1)
    """Steps between parameter averages."""

    @property
    def cycle(self) -> int:
        return self.period

    def rewind_skipped_reason(self, cell: Cell) -> str:
        late = first_replayed(cell.parity_steps) < self.start_step
        return "the first replayed steps would average gradients" if late else ""

    def tolerance(self, cell: Cell, workload: Workload) -> Tolerance:
        return EXACT if cell.devices == 1 else EMULATED

    def reference(self, cell: Cell) -> Cell:
        if cell.devices == 1:
            return cell.reference()
        return replicas_of(cell, self.period, self.start_step, self.start_step)

    def check(self, cell: Cell, workload: Workload) -> None:
        super().check(cell, workload)
        if self.start_step >= cell.parity_steps:
            raise Refused(
                f"start_step {self.start_step}: none of the {cell.parity_steps} verified steps"
                " would be local; choose an earlier one, or ddp"
            )

    def setup(self, job: Job) -> TrainStep:
        from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
            PostLocalSGDState,
            post_localSGD_hook,
        )
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
        from torch.distributed.optim import PostLocalSGDOptimizer

        model = wrap_in_ddp(job, job.model())
        make_state: Any = PostLocalSGDState
        state = make_state(None, None, self.start_step, post_local_gradient_allreduce=False)
        model.register_comm_hook(state, post_localSGD_hook)
        averager = PeriodicModelAverager(self.period, warmup_steps=self.start_step)
        optimizer = PostLocalSGDOptimizer(job.optimizer(model.parameters()), averager)
        counters = ((state, "iter"), (averager, "step"))
        files = StateFiles(job, {"model": model, "optimizer": optimizer}, counters)
        registered = job.register(model, optimizer.optim)
        registered.library = lambda: ddp_buckets(model)
        registered.counters = counters
        job.save_by(files.save, files.load)
        return standard_step(job, model, optimizer, no_sync=model.no_sync)
