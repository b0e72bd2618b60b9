from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar, cast

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
    """Ranks on the same samples, each with its part of the tokens."""
    devices_per_process: int = 1
    """Devices that one process drives; more than 1 only for DataParallel."""
    servers: int = 0
    """Number of parameter servers: additional ranks, the highest, that hold the model but get no
    samples."""

    @property
    def devices(self) -> int:
        return self.data * self.pipeline * self.sequence * self.tensor

    @property
    def processes(self) -> int:
        return self.devices // self.devices_per_process + self.servers

    def serves(self, rank: int) -> bool:
        return rank >= self.processes - self.servers

    def driven(self, device: torch.device) -> list[torch.device]:
        """Returns the devices of the device's process: all for DataParallel."""
        import torch

        count = self.devices_per_process
        return (
            [device]
            if count == 1
            else [torch.device(device.type, number) for number in range(count)]
        )

    @property
    def replicas(self) -> int:
        """Number of ranks that train the same part of the model on different tokens."""
        return self.data * self.sequence

    @property
    def shares(self) -> int:
        """Parts of the global batch, one per data-parallel process."""
        return self.data // self.devices_per_process

    def share(self, rank: int) -> int:
        """Returns the number of a rank's part of the global batch; a server's is unused."""
        together = self.pipeline * self.sequence * self.tensor
        return min(rank // together, self.shares - 1)


@dataclass(frozen=True)
class Tolerance:
    """Allowed deviation from the reference, and why."""

    loss: float
    """Maximum allowed |loss - reference| / |reference| in the segment."""
    update: float
    """Maximum allowed |parameters - reference| / |reference's update| of a tensor."""
    reason: str
    minimum_by_noise: float = 0.0
    """Minimum update limit if the reference's noise is known. A multiple of the noise then sets the
    limit, and `update` is the maximum. Zero if noise only widens limits."""
    other_kinds: float | None = None
    """Update limit of which other kinds' limits are multiples; None for `update`."""

    @property
    def others(self) -> float:
        return self.update if self.other_kinds is None else self.other_kinds


REASONS = "; "
"""Separator of reasons in `Tolerance.reason`."""
HALF_PRECISIONS = ("bf16", "fp16")


def half_precision(precision: str, workload: str) -> str:
    """Returns the half precision in which a cell computes or stores its weights, else nothing."""
    used = {precision, *workload.split("+")[1:]}
    return next((half for half in HALF_PRECISIONS if half in used), "")


def rounding_alone(precision: str, reason: str) -> bool:
    """Returns whether half precision is the only reason for a tolerance."""
    return precision in HALF_PRECISIONS and REASONS not in reason


# Calibrated on every exact strategy of matrix `full` (2 and 8 gloo ranks); see
# docs/studies/parity-deviations.md.
EXACT = Tolerance(
    loss=1e-6, update=1e-4, reason="the same training; only the order of additions differs"
)
WIDEST_BY_NOISE = {"fp32": (1e-5, 5e-3), "bf16": (4e-3, 0.1), "fp16": (4e-3, 0.1)}
"""Bounds, by precision, up to which noise may widen the limits of (loss, update)."""
CAPPED_ABOVE = 0.03
"""Declared update limit above which other evidence is needed: the deviation of ranks that exchange
nothing, the reference's noise in each kind, or an exact run in fp32."""
EMULATED = Tolerance(
    EXACT.loss,
    EXACT.update,
    "a different training by design, which the reference emulates rank by rank",
)


def emulated(reason: str) -> bool:
    """Returns whether a tolerance's reason says that the reference emulates another training."""
    return EMULATED.reason in reason


REPLAYED_STEPS = 3
"""Number of steps trained again after a rewind; their losses and final parameters are compared."""


def first_replayed(parity_steps: int) -> int:
    """Returns the first replayed step, before which the state is copied."""
    return max(parity_steps - REPLAYED_STEPS, 1)


Nested = TypeVar("Nested")


def of_each_tensor(call: Callable[[Tensor], Tensor], nested: Nested) -> Nested:
    """Returns the result for each tensor in lists, tuples and dicts; other values stay."""
    import torch
    from torch.utils import _pytree as pytree

    return cast("Nested", pytree.tree_map_only(torch.Tensor, call, nested))


@dataclass(frozen=True)
class Batch:
    """A rank's share of a step's global batch.

    `inputs`: (samples, ...), `labels`: (samples, ...); a user's model may have them nested.
    """

    step: int
    inputs: Tensor
    labels: Tensor
    label_tokens: float | None = None
    """What the sum of token losses is divided by: the global batch's label tokens over its number
    of parts. If None, this batch's own label tokens."""
    keys: Tensor | None = None
    """Keys of the dropout masks, shape (samples, tokens), the same in every layout. None without
    dropout."""
    positions: Tensor | None = None
    """Position of each token in its document, shape (samples, tokens). None if samples are not
    packed."""

    def split(self, parts: int) -> Iterator[Batch]:
        return (self.part(number, parts) for number in range(parts))

    def part(self, number: int, parts: int, dimension: int = 0) -> Batch:
        """Returns one of `parts` equal parts of the samples, or of the tokens (dimension 1)."""
        inputs, labels, keys, positions = (
            of_each_tensor(lambda tensor: tensor.chunk(parts, dimension)[number], nested)
            for nested in (self.inputs, self.labels, self.keys, self.positions)
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
    """Peak of what a step allocates in addition: gradients until the update, gathered
    parameters."""

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.library


StateKind = Literal["parameters", "gradients", "optimizer", "library"]
Retained = tuple[StateKind, str, "Tensor | int"]
"""Kind, name, and the tensor, or its bytes if the library does not expose the tensor."""
TrainStep = Callable[[Batch], "Tensor | None"]
"""Runs one optimizer step on a rank's share of a batch. Returns its mean loss, or None if the rank
has no loss."""
