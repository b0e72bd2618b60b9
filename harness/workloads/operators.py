"""Counts operators of forward and backward and their bytes, cached on disk."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from torch import Tensor
from torch.utils._pytree import tree_leaves

from harness.workloads.activations import OperatorObserver, activation_bytes, train_without_memory
from harness.workloads.counts import keep, kept_file
from harness.workloads.recompute import products
from harness.workloads.registry import make_workload

if TYPE_CHECKING:
    from torch._ops import OpOverload

    from harness.workloads import Workload


@dataclass(frozen=True)
class Operators:
    """Counts for forward, loss and backward of one micro-batch of the unsplit model."""

    number: int
    """Number of operators without views."""
    moved_bytes: int
    """Bytes read and written, except by matrix products, convolutions and attention."""
    convolutions: int
    """Number of convolutions; a backward for input and weight counts twice."""
    held_bytes: int
    """Peak bytes held, see `activation_bytes`."""


CONVOLUTIONS = {"convolution": 1, "convolution_backward": 2}
"""Convolutions that each operator computes."""
FEW, MORE = 2, 4
"""Samples in the two counted passes; counts are linear in samples."""


@functools.cache
def operators(
    workload: Workload,
    samples: int,
    sequence_length: int,
    recompute: str = "none",
    precision: str = "fp32",
) -> Operators:
    """Returns the counts of one pass over `samples` samples.

    `precision`: fp32 or autocast's, which casts operands of matrix products. Tensors are fake.
    """
    few, more = _counted(workload, sequence_length, recompute, precision)
    share = (samples - FEW) / (MORE - FEW)

    def grown(of_few: int, of_more: int) -> int:
        return max(0, round(of_few + share * (of_more - of_few)))

    return Operators(
        few.number,
        grown(few.moved_bytes, more.moved_bytes),
        few.convolutions,
        grown(few.held_bytes, more.held_bytes),
    )


@functools.cache
def _counted(
    workload: Workload, sequence_length: int, recompute: str, precision: str
) -> tuple[Operators, Operators]:
    file = kept_file("operators", workload, f"3 {sequence_length} {recompute} {precision}")
    if file.exists() and not workload.pretrained:
        few, more = (Operators(**fields) for fields in json.loads(file.read_text()))
        return few, more
    few, more = (_count(workload, n, sequence_length, recompute, precision) for n in (FEW, MORE))
    keep(file, json.dumps([asdict(few), asdict(more)]))
    return few, more


def _count(
    workload: Workload, samples: int, sequence_length: int, recompute: str, precision: str
) -> Operators:
    held = activation_bytes(workload, samples, sequence_length, recompute, precision)
    if pair := workload.of_one_and_two_blocks:
        one, two = (
            _count(make_workload(name), samples, sequence_length, recompute, precision)
            for name in pair
        )
        more = workload.blocks - 1
        return Operators(
            one.number + more * (two.number - one.number),
            one.moved_bytes + more * (two.moved_bytes - one.moved_bytes),
            one.convolutions + more * (two.convolutions - one.convolutions),
            held,
        )
    counter = _Counter()
    train_without_memory(workload, samples, sequence_length, recompute, counter, precision)
    return Operators(counter.number, counter.moved_bytes, counter.convolutions, held)


class _Counter(OperatorObserver):
    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        self.convolutions = 0
        self.moved_bytes = 0

    def observe(
        self, func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], result: object
    ) -> None:
        if not func.is_view:
            self.number += 1
            self.convolutions += CONVOLUTIONS.get(func._opname, 0)
            if func._overloadpacket not in products():
                tensors = [
                    leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)
                ]
                self.moved_bytes += sum(t.numel() * t.element_size() for t in tensors)
