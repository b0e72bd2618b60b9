"""Snapshots of training, from which restarted ranks resume."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from harness.strategy import Job

if TYPE_CHECKING:
    from torch import Tensor


class Stateful(Protocol):
    """State that torch can save and restore: a model, an optimizer, a loss scaler."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> object: ...


class Snapshots:
    """A file of all parts and all ranks' losses, written by rank 0 to the trial's folder, which
    survives restarts."""

    steps = 0
    """Number of steps completed in the loaded snapshot."""
    losses: Tensor
    """Losses of this rank, by step."""

    def __init__(self, job: Job, parts: Mapping[str, Stateful]) -> None:
        import torch

        self.job, self.parts = job, parts
        self.losses = torch.zeros(job.cell.total_steps, device=job.device)
        self.file = job.scratch / "snapshot.pt"

    def load(self) -> None:
        """Restores all parts, if a snapshot exists.

        Raises RuntimeError if it is from a timed step: replayed steps cannot be timed.
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
        """Writes the state after this many steps; call on all ranks together."""
        import torch
        import torch.distributed as dist

        everyones = [torch.empty_like(self.losses) for _ in range(self.job.cell.devices)]
        dist.all_gather(everyones, self.losses)
        if self.job.rank == 0:
            states = {name: part.state_dict() for name, part in self.parts.items()}
            new = self.file.with_suffix(".new")
            torch.save({"losses": everyones, "steps": steps, **states}, new)
            new.replace(self.file)  # atomic
