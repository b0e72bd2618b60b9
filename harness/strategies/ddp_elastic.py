from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from pydantic import Field

from harness.cell.errors import Refused
from harness.cell.training import Batch, TrainStep
from harness.seam import Capabilities, Cell, Export, Job, Strategy
from harness.seam.checkpoints import Stateful
from harness.seam.job import loss_scaler, standard_step
from harness.strategies.ddp import ddp_buckets, wrap_in_ddp
from harness.workloads import Workload

if TYPE_CHECKING:
    from torch import Tensor


class DdpElastic(Strategy):
    """DDP that loses a rank once; torchrun's elastic agent restarts all ranks from a snapshot."""

    capabilities = Capabilities(
        min_devices=2,
        # One restart is needed; further restarts allow for unplanned failures in warm-up.
        max_restarts=3,
        # Snapshots hold the losses of all steps.
        fixed_steps=True,
    )

    crash_at_step: int = Field(default=2, ge=0)
    """Warm-up step at whose start the last rank crashes, in the first attempt only."""
    snapshot_every: int = Field(default=1, ge=1)
    """Steps between snapshots of model, optimizer, loss scale and losses."""

    def check(self, cell: Cell, workload: Workload) -> None:
        if cell.devices < 2:
            raise Refused(
                "an elastic restart needs a rank that crashes and one that survives: use at least"
                " 2 devices"
            )
        if self.crash_at_step >= cell.warmup_steps:
            raise Refused(
                f"crash_at_step={self.crash_at_step} is not one of the {cell.warmup_steps} warm-up"
                " steps, and replayed steps must not be timed"
            )
        if cell.checkpoint != "none":
            raise Refused("ddp_elastic restarts from its own snapshots; leave the checkpoint out")
        if cell.launcher != "elastic":
            raise Refused(f"launcher {cell.launcher} does not restart ranks; use elastic")

    def export(self, cell: Cell, to: str) -> Export | None:
        """Returns a script that is restarted from its snapshots, but does not crash by itself."""
        restarts = ("--max-restarts", str(self.capabilities.max_restarts))
        by_torchrun = to in ("torchrun", "slurm")
        return Export("ddp_elastic.py.j2", arguments=restarts) if by_torchrun else None

    def setup(self, job: Job) -> TrainStep:
        model = wrap_in_ddp(job, job.model())
        optimizer, scaler = job.optimizer(model.parameters()), loss_scaler(job)
        job.register(model, optimizer).library = lambda: ddp_buckets(model)
        train = standard_step(job, model, optimizer, no_sync=model.no_sync, scaler=scaler)
        parts: dict[str, Stateful] = {"model": model, "optimizer": optimizer, "scaler": scaler}
        parts |= {f"scheduler{i}": part for i, part in enumerate(job.recipe.schedulers)}
        snapshots = Snapshots(job, parts)
        if job.restart_count:
            snapshots.load()
        crashes = job.restart_count == 0 and job.rank == job.cell.devices - 1

        def step(batch: Batch) -> Tensor | None:
            if batch.step < snapshots.steps:
                return snapshots.replayed(batch.step)
            if crashes and batch.step == self.crash_at_step:
                os._exit(17)
            snapshots.note(batch.step, loss := cast("Tensor", train(batch)))
            if (batch.step + 1) % self.snapshot_every == 0:
                snapshots.save(batch.step + 1)
            return loss

        return step


class Snapshots:
    """Snapshots of all parts, losses and norms, in the trial's folder."""

    steps = 0
    noted: Tensor
    """Loss and gradient norm of each step, shape (steps, 2). The norm is NaN if gradients are not
    clipped."""

    def __init__(self, job: Job, parts: Mapping[str, Stateful]) -> None:
        import torch

        self.job, self.parts = job, parts
        self.noted = torch.full((job.cell.total_steps, 2), math.nan, device=job.device)
        self.file = job.scratch / "snapshot.pt"

    def note(self, step: int, loss: Tensor) -> None:
        self.noted[step, 0] = loss
        if (norm := self.job.recipe.gradient_norm) is not None:
            self.noted[step, 1] = norm

    def replayed(self, step: int) -> Tensor:
        """Returns the loss of a step before the restart, and restores its gradient norm."""
        noted: tuple[Tensor, ...] = self.noted[step].clone().unbind()
        loss, norm = noted
        if not norm.isnan():
            self.job.recipe.gradient_norm = norm
        return loss

    def load(self) -> None:
        """Restores all parts, if a snapshot exists.

        Raises RuntimeError if it is from a timed step, since replayed steps cannot be timed.
        """
        import torch

        if not self.file.exists():
            return
        snapshot = torch.load(self.file, map_location=self.job.device, weights_only=True)
        self.noted = snapshot.pop("noted")[self.job.rank]
        self.steps = snapshot.pop("steps")
        if self.steps > self.job.cell.warmup_steps:
            raise RuntimeError(
                f"a rank failed on its own after step {self.steps - 1}: steps replayed from its"
                " snapshot cannot be timed"
            )
        for name, state in snapshot.items():
            self.parts[name].load_state_dict(state)

    def save(self, steps: int) -> None:
        """Writes the state after this many steps; call on all ranks."""
        import torch
        import torch.distributed as dist

        everyones = [torch.empty_like(self.noted) for _ in range(self.job.cell.devices)]
        dist.all_gather(everyones, self.noted)
        if self.job.rank == 0:
            states = {name: part.state_dict() for name, part in self.parts.items()}
            new = self.file.with_suffix(".new")
            torch.save({"noted": everyones, "steps": steps, **states}, new)
            new.replace(self.file)  # atomic
