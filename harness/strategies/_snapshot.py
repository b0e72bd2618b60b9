"""Snapshots of a training, from which restarted ranks go on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from harness.strategy import Job

if TYPE_CHECKING:
    from torch import Tensor


class Stateful(Protocol):
    """What torch can save and restore: a model, an optimizer, a loss scaler."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> object: ...


class Snapshots:
    """One file of all parts and of every rank's losses, written by rank 0 in the folder of the
    trial, which outlives a restart."""

    steps = 0
    """Steps that the loaded snapshot has seen."""
    losses: Tensor
    """Of this rank, by step."""

    def __init__(self, job: Job, parts: Mapping[str, Stateful]) -> None:
        import torch

        self.job, self.parts = job, parts
        self.losses = torch.zeros(job.cell.total_steps, device=job.device)
        self.file = job.scratch / "snapshot.pt"

    def load(self) -> None:
        """Restores all parts, if there is a snapshot yet.

        Raises RuntimeError for one of a timed step: replayed steps cannot be timed.
        """
        import torch

        if not self.file.exists():
            return
        snapshot = torch.load(self.file, map_location=self.job.device, weights_only=True)
        self.losses = snapshot.pop("losses")[self.job.rank]
        self.steps = snapshot.pop("steps")
        if self.steps > self.job.cell.warmup_steps:
            raise RuntimeError(
                f"a rank failed on its own after step {self.steps - 1}: steps replayed from its"
                " snapshot cannot be timed"
            )
        for name, state in snapshot.items():
            self.parts[name].load_state_dict(state)

    def save(self, steps: int) -> None:
        """Writes the state after this many steps; called on all ranks together."""
        import torch
        import torch.distributed as dist

        everyones = [torch.empty_like(self.losses) for _ in range(self.job.cell.devices)]
        dist.all_gather(everyones, self.losses)
        if self.job.rank == 0:
            states = {name: part.state_dict() for name, part in self.parts.items()}
            new = self.file.with_suffix(".new")
            torch.save({"losses": everyones, "steps": steps, **states}, new)
            new.replace(self.file)  # whole or not at all
