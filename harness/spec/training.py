"""How a training is laid out over devices and what passes through it: layouts, batches,
model states, tolerances."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """How devices are used: data x pipeline x tensor, tensor innermost; as data, so that the
    harness can read it."""

    data: int = 1
    pipeline: int = 1
    tensor: int = 1
    devices_per_process: int = 1
    """More than 1 where one process drives several devices (DataParallel)."""
    servers: int = 0
    """Processes beside the devices', after them in rank, that hold the model and see no samples (a
    parameter server)."""

    @property
    def devices(self) -> int:
        return self.data * self.pipeline * self.tensor

    @property
    def processes(self) -> int:
        return self.devices // self.devices_per_process + self.servers

    def driven(self, device: torch.device) -> list[torch.device]:
        """The devices that the process of this one drives: itself, or all where one process drives
        several."""
        import torch

        count = self.devices_per_process
        return (
            [device]
            if count == 1
            else [torch.device(device.type, number) for number in range(count)]
        )

    @property
    def shares(self) -> int:
        """Into how many parts the global batch is cut before ranks receive it."""
        return self.data // self.devices_per_process

    def share(self, rank: int) -> int:
        """Which part of the global batch a rank receives; a server is handed the last one's and
        leaves it alone."""
        return min(rank // (self.pipeline * self.tensor), self.shares - 1)


@dataclass(frozen=True)
class Tolerance:
    """How far a strategy's training may be from the reference, and why."""

    loss: float
    """Largest |loss - reference| / |reference| at any step of the segment."""
    update: float
    """Largest norm of (parameters - reference parameters), relative to the reference's update, of
    any tensor."""
    reason: str


# Calibrated on every exact strategy of matrix `full` (2 and 8 gloo ranks): see docs/parity.md for
# the figures.
EXACT = Tolerance(
    loss=1e-5, update=1e-3, reason="the same training; only the order of additions differs"
)


@dataclass(frozen=True)
class Batch:
    """A rank's share of the global batch of one step.

    `inputs`: (samples, ...), `labels`: (samples, ...).
    """

    step: int
    inputs: Tensor
    labels: Tensor

    def split(self, parts: int) -> Iterator[Batch]:
        for inputs, labels in zip(self.inputs.chunk(parts), self.labels.chunk(parts), strict=True):
            yield Batch(self.step, inputs, labels)


@dataclass(frozen=True)
class States:
    """Bytes that a rank keeps between two steps: model states (ZeRO, arXiv 1910.02054, section 3.1)
    and the library's own buffers."""

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    library: float = 0.0
    """Copies and buffers that the library keeps beside them: communication buckets, masters, pools.
    """
    transient: float = 0.0
    """The most that a step needs beside these for a while and then frees: gradients until the
    update, gathered parameters."""

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.library


StateKind = Literal["parameters", "gradients", "optimizer", "library"]


Retained = tuple[StateKind, str, "Tensor | int"]
"""Kind, name, and the tensor that is kept (or its bytes, where the library shows only those)."""


TrainStep = Callable[[Batch], "Tensor | None"]
"""One optimizer step on one global batch; the mean loss of this rank's samples, None where this
rank has no loss."""
