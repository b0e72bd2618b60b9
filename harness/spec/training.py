"""Layout, batches, model states and tolerances of a training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Data x pipeline x sequence x tensor parallelism; neighbouring ranks are tensor parallel."""

    data: int = 1
    pipeline: int = 1
    tensor: int = 1
    sequence: int = 1
    """Ranks that train on the same samples, each on its part of the tokens."""
    devices_per_process: int = 1
    """More than 1 for DataParallel."""
    servers: int = 0
    """Parameter servers: extra processes, last in rank, with the model and no samples."""

    @property
    def devices(self) -> int:
        return self.data * self.pipeline * self.sequence * self.tensor

    @property
    def processes(self) -> int:
        return self.devices // self.devices_per_process + self.servers

    def serves(self, rank: int) -> bool:
        """Whether this rank is a parameter server."""
        return rank >= self.processes - self.servers

    def driven(self, device: torch.device) -> list[torch.device]:
        """Returns the devices of this device's process: only this one, or all for DataParallel."""
        import torch

        count = self.devices_per_process
        return (
            [device]
            if count == 1
            else [torch.device(device.type, number) for number in range(count)]
        )

    @property
    def replicas(self) -> int:
        """Ranks that train the same part of the model on different tokens. They average gradients
        and may shard states."""
        return self.data * self.sequence

    @property
    def shares(self) -> int:
        """Parts of the global batch, one per data-parallel process."""
        return self.data // self.devices_per_process

    def share(self, rank: int) -> int:
        """Returns the index of a rank's part of the global batch. A server ignores its part, the
        last."""
        together = self.pipeline * self.sequence * self.tensor
        return min(rank // together, self.shares - 1)


@dataclass(frozen=True)
class Tolerance:
    """Allowed deviation from the reference, and why."""

    loss: float
    """Largest |loss - reference| / |reference| in the segment."""
    update: float
    """Largest norm of a tensor's (parameters - reference parameters) over the reference's
    update."""
    reason: str
    tensors: Mapping[str, float] = field(default_factory=dict)
    """Update limits by tensor, where wider."""


REASONS = "; "
"""Separator in `Tolerance.reason`, also in records. Half precision and the model share one reason;
whatever the strategy adds has its own."""
HALF_PRECISIONS = ("bf16", "fp16")


def rounding_alone(precision: str, reason: str) -> bool:
    """Whether half precision is the only reason."""
    return precision in HALF_PRECISIONS and REASONS not in reason


# Calibrated on every exact strategy of matrix `full` (2 and 8 gloo ranks); see
# docs/studies/parity-deviations.md.
EXACT = Tolerance(
    loss=1e-6, update=1e-4, reason="the same training; only the order of additions differs"
)


@dataclass(frozen=True)
class Batch:
    """A rank's share of a step's global batch.

    `inputs`: (samples, ...), `labels`: (samples, ...).
    """

    step: int
    inputs: Tensor
    labels: Tensor
    label_tokens: float | None = None
    """Number that the sum of its token losses is divided by: the mean number of label tokens over
    all equal parts of the global batch. None: its own number of labels, all parts having equally
    many.

    The mean over all parts is thus the mean over all label tokens of the step."""
    keys: Tensor | None = None
    """(samples, tokens): key of each token's dropout masks, whatever rank it is on; None without
    dropout."""
    positions: Tensor | None = None
    """(samples, tokens): each token's position in its document; None if samples are documents."""

    def split(self, parts: int) -> Iterator[Batch]:
        return (self.part(number, parts) for number in range(parts))

    def part(self, number: int, parts: int, dimension: int = 0) -> Batch:
        """Returns one of `parts` equal parts of the samples, or of the tokens (dimension 1)."""
        inputs, labels, keys, positions = (
            None if tensor is None else tensor.chunk(parts, dimension)[number]
            for tensor in (self.inputs, self.labels, self.keys, self.positions)
        )
        assert inputs is not None
        assert labels is not None
        tokens = None if self.label_tokens is None else self.label_tokens / parts
        return Batch(self.step, inputs, labels, tokens, keys, positions)


@dataclass(frozen=True)
class States:
    """Bytes that a rank keeps between steps: model states (ZeRO, arXiv 1910.02054, section 3.1) and
    library buffers."""

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    library: float = 0.0
    """Library copies and buffers: communication buckets, fp32 master weights, memory pools."""
    transient: float = 0.0
    """Peak of further allocations in a step: gradients until the update, gathered parameters."""

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.library


StateKind = Literal["parameters", "gradients", "optimizer", "library"]


Retained = tuple[StateKind, str, "Tensor | int"]
"""Kind, name, and the tensor or, if the library hides it, its bytes."""


TrainStep = Callable[[Batch], "Tensor | None"]
"""Does one optimizer step on a rank's share of a batch. Returns its mean loss, or None if the rank
computes none."""
