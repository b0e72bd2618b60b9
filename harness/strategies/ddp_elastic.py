"""DDP under torchrun's elastic agent: a rank dies, all are started again and go on from the last
snapshot."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, ClassVar, cast

from pydantic import Field

from harness.spec.cell import Cell
from harness.spec.errors import Refused
from harness.spec.training import Batch, Layout, TrainStep
from harness.strategy.base import Strategy
from harness.strategy.job import Job
from harness.strategy.step import loss_scaler, standard_step

if TYPE_CHECKING:
    from torch import Tensor

    from harness.workloads import Workload
    from harness.workloads.counts import ModelFacts


class DdpElastic(Strategy):
    """DDP that loses its last rank once, is restarted by torchrun's elastic agent and goes on from
    its snapshot.

    Nothing of the training is lost: it must end where a run without the crash ends.
    """

    least_devices: ClassVar[int] = 2
    max_restarts: ClassVar[int] = (
        3  # one is needed; the others are for a rank that fails on its own in warm-up
    )

    crash_at_step: int = Field(default=2, ge=0)
    """The last rank leaves at the start of this step, in the first incarnation only.

    It must be a warm-up step.
    """
    snapshot_every: int = Field(default=1, ge=1)
    """Steps between two snapshots of model, optimizer, loss scale and losses."""

    def check(self, cell: Cell, workload: Workload) -> None:
        if cell.devices < 2:
            raise Refused(
                "an elastic restart needs a rank that dies and one that does not: at least 2"
                " devices"
            )
        if self.crash_at_step >= cell.warmup_steps:
            raise Refused(
                f"crash_at_step={self.crash_at_step} is no warm-up step of {cell.warmup_steps}:"
                " replayed steps must not be timed"
            )
        if cell.launcher != "elastic":
            raise Refused(f"launcher {cell.launcher} does not restart ranks; use elastic")

    def moved_bytes(self, cell: Cell, layout: Layout, facts: ModelFacts) -> float:
        return 3.0 * facts.trained_bytes / self.snapshot_every

    def setup(self, job: Job) -> TrainStep:
        import torch
        from torch.nn.parallel import DistributedDataParallel

        model = DistributedDataParallel(
            job.model(), device_ids=[job.device] if job.device.type == "cuda" else None
        )
        optimizer, scaler = job.optimizer(model.parameters()), loss_scaler(job)
        job.register(model, optimizer)
        held: dict[str, Any] = {"model": model, "optimizer": optimizer, "scaler": scaler}
        losses = torch.zeros(job.cell.total_steps, device=job.device)  # of this rank, by step
        done, file = 0, job.scratch / "snapshot.pt"
        if job.restart_count and file.exists():
            snapshot = torch.load(file, map_location=job.device, weights_only=True)
            losses, done = snapshot.pop("losses")[job.rank], snapshot.pop("steps")
            if done > job.cell.warmup_steps:
                raise RuntimeError(
                    f"a rank failed on its own after step {done - 1}: steps replayed from its"
                    " snapshot cannot be timed"
                )
            for name, state in snapshot.items():
                held[name].load_state_dict(state)
        train = standard_step(job, model, optimizer, no_sync=model.no_sync, scaler=scaler)

        def step(batch: Batch) -> Tensor | None:
            if batch.step < done:
                return losses[batch.step].clone()
            if (
                job.restart_count == 0
                and batch.step == self.crash_at_step
                and job.rank == job.cell.devices - 1
            ):
                os._exit(17)
            losses[batch.step] = loss = cast("Tensor", train(batch))
            if (batch.step + 1) % self.snapshot_every == 0:
                everyones = [torch.empty_like(losses) for _ in range(job.cell.devices)]
                torch.distributed.all_gather(everyones, losses)
                if job.rank == 0:
                    parts = {name: part.state_dict() for name, part in held.items()}
                    torch.save(
                        {"losses": everyones, "steps": batch.step + 1, **parts},
                        new := file.with_suffix(".new"),
                    )
                    new.replace(file)  # whole or not at all
            return loss

        return step
