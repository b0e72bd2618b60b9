"""Layouts of a training over devices, also many at once as columns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from harness.planner.fitting import Bools, Ints

RECOMPUTE = ("none", "selective", "full")
"""What backward recomputes: nothing, attention scores, or whole layers."""
OFFLOAD = ("none", "optimizer", "parameters", "disk")
"""What is offloaded: nothing, optimizer state to host memory, parameters too, or both to disk."""


@dataclass(frozen=True)
class PlannedLayout:
    """One layout over data x pipeline x tensor x context devices.

    The pipeline is outermost, and tensor innermost (its ranks share a node).
    """

    data: int = 1
    pipeline: int = 1
    tensor: int = 1
    context: int = 1
    """Devices that share each sequence, each with part of its tokens."""
    expert: int = 1
    """Devices of the data axis that share the experts of a mixture."""
    zero: int = 0
    """ZeRO stage; 3 also stands for FSDP with full sharding."""
    micro_batch: int = 1
    """Sequences in one forward pass."""
    accumulation: int = 1
    """Micro-batches in one step, those of a pipeline included."""
    recompute: int = 0
    """Index into RECOMPUTE."""
    offload: int = 0
    """Index into OFFLOAD."""
    chunks: int = 1
    """Model chunks per pipeline rank; above 1, the schedule is interleaved."""

    @property
    def devices(self) -> int:
        return self.data * self.pipeline * self.tensor * self.context

    @property
    def text(self) -> str:
        """Readable form: `data 8 x tensor 2, ZeRO-1, micro-batch 4 x 2`."""
        axes = [f"{name} {value}" for name in AXES if (value := getattr(self, name)) > 1]
        words = [" x ".join(axes) or "one device"]
        if self.zero:
            words.append(f"ZeRO-{self.zero}")
        words.append(f"micro-batch {self.micro_batch} x {self.accumulation}")
        if self.recompute:
            words.append(f"{RECOMPUTE[self.recompute]} recomputation")
        if self.offload:
            words.append(
                f"offload of {('', 'optimizer', 'parameters', 'all to disk')[self.offload]}"
            )
        if self.chunks > 1:
            words.append(f"{self.chunks} chunks a stage")
        return ", ".join(words)


AXES = tuple(field.name for field in dataclasses.fields(PlannedLayout)[:5])


@dataclass(frozen=True)
class PlannedLayouts:
    """Many layouts, as one array per field (shape [layouts])."""

    data: Ints
    pipeline: Ints
    tensor: Ints
    context: Ints
    expert: Ints
    zero: Ints
    micro_batch: Ints
    accumulation: Ints
    recompute: Ints
    offload: Ints
    chunks: Ints

    @classmethod
    def of(cls, layouts: Sequence[PlannedLayout]) -> PlannedLayouts:
        return cls(
            **{
                field.name: np.array([getattr(layout, field.name) for layout in layouts], np.int64)
                for field in dataclasses.fields(cls)
            }
        )

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> PlannedLayout:
        return PlannedLayout(
            **{f.name: int(getattr(self, f.name)[index]) for f in dataclasses.fields(self)}
        )

    def take(self, rows: Ints | Bools) -> PlannedLayouts:
        """Returns the layouts with these row numbers or mask."""
        return PlannedLayouts(
            **{f.name: getattr(self, f.name)[rows] for f in dataclasses.fields(self)}
        )

    @property
    def devices(self) -> Ints:
        return self.data * self.pipeline * self.tensor * self.context

    @property
    def global_batch(self) -> Ints:
        return self.data * self.micro_batch * self.accumulation


def joined(parts: Iterable[PlannedLayouts]) -> PlannedLayouts:
    listed = list(parts)
    return PlannedLayouts(
        **{
            f.name: np.concatenate([getattr(part, f.name) for part in listed])
            for f in dataclasses.fields(PlannedLayouts)
        }
    )
