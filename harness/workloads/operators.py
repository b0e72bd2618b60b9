"""Counts the memory, bytes and floating-point operations of forward and backward.

Models run on fake tensors, under dispatch modes that see every operator.
"""

from __future__ import annotations

import functools
import json
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import set_checkpoint_early_stop

from harness.workloads.catalog import make_workload
from harness.workloads.counts import keep, kept_file, without_memory
from harness.workloads.recompute import products, recompute_blocks

if TYPE_CHECKING:
    from torch._ops import OpOverload

    from harness.workloads import Workload


class OperatorObserver(TorchDispatchMode):
    """A dispatch mode that calls `observe` after each operator, including those called from C++.

    Operators on a DTensor are skipped, because the operators on its local parts follow.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def observe(
        self, func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], result: object
    ) -> None:
        """Called after each operator."""

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Iterable[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if any(kind is DTensor for kind in types):
            return NotImplemented
        result: object = func(*args, **(kwargs or {}))
        self.observe(func, args, kwargs or {}, result)
        return result

    def watch(self, model: torch.nn.Module) -> None:
        """Called with the model before it runs."""


@functools.cache
def activation_bytes(
    workload: Workload,
    samples: int,
    sequence_length: int,
    recompute: str = "none",
    precision: str = "fp32",
    tensor_ranks: int = 1,
    sequence_parallel: bool = False,
) -> int:
    """Returns the peak bytes of forward, loss and backward: saved and temporary tensors, without
    parameters, buffers and parameter gradients.

    `samples` and `sequence_length` are those of one pass; `precision` is fp32 or autocast's.
    `tensor_ranks` split each layer of a block and, with `sequence_parallel`, the sequence. Tensors
    are fake (FakeTensorMode), so models of any size can be counted.
    """
    held, split = Held(), (tensor_ranks, sequence_parallel)
    if pair := workload.of_one_and_two_blocks:
        one, two = (
            activation_bytes(
                make_workload(name), samples, sequence_length, recompute, precision, *split
            )
            for name in pair
        )
        return one + (workload.blocks - 1) * (two - one)
    train_without_memory(workload, samples, sequence_length, recompute, held, precision, *split)
    return held.most()


@functools.cache
def recomputed_flops(
    workload: Workload, sequence_length: int, recompute: str, whole_blocks: bool = False
) -> int:
    """Returns the floating-point operations per sample that recomputation adds to a step.

    Counts like torch.utils.flop_counter (2 per multiply-add), plus 1 per output element of other
    elementwise operators.

    `whole_blocks`: blocks are recomputed to their end. torch's checkpoint stops at the last tensor
    that backward needs, before a block's last product.
    """
    if pair := workload.of_one_and_two_blocks:
        one, two = (
            recomputed_flops(make_workload(name), sequence_length, recompute, whole_blocks)
            for name in pair
        )
        return one + (workload.blocks - 1) * (two - one)
    computed_once = _operations(workload, sequence_length, "none", False)
    return _operations(workload, sequence_length, recompute, whole_blocks) - computed_once


@functools.cache
def _operations(
    workload: Workload, sequence_length: int, recompute: str, whole_blocks: bool
) -> int:
    counter = _Operations()
    with set_checkpoint_early_stop(not whole_blocks):
        train_without_memory(workload, 1, sequence_length, recompute, counter)
    return counter.total


def train_without_memory(
    workload: Workload,
    samples: int,
    sequence_length: int,
    recompute: str,
    counter: OperatorObserver,
    precision: str = "fp32",
    tensor_ranks: int = 1,
    sequence_parallel: bool = False,
) -> None:
    """Runs forward, loss and backward on fake zeros under a counter, and under autocast unless
    `precision` is fp32."""
    logits: Callable[..., Tensor] = workload.logits
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    with without_memory():
        model = workload.countable().build(seed=0, saved_weights=False)
        if tensor_ranks > 1:
            assert workload.split
            workload.split.leave_a_share(model, tensor_ranks, sequence_parallel)
            logits = workload.split.logits if sequence_parallel else logits
        if recompute != "none":
            recompute_blocks(model, workload.blocks_of(model), recompute)
        inputs = workload.sample_inputs(samples, sequence_length)
        labels = sample_labels(workload, inputs)
        counter.watch(model)
        with counter:
            with torch.autocast("cpu", half, enabled=half is not None):
                loss = workload.loss(logits(model, inputs), labels)
            loss.backward()


def sample_labels(workload: Workload, inputs: Tensor) -> Tensor:
    if workload.num_labels:
        return torch.zeros(len(inputs), dtype=torch.long)
    return torch.zeros_like(inputs)


class _Operations(OperatorObserver):
    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def observe(
        self, func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], result: object
    ) -> None:
        if count := products().get(func._overloadpacket):
            self.total += count(*args, **kwargs, out_val=result)
        elif torch.Tag.pointwise in func.tags and isinstance(result, Tensor):
            self.total += result.numel()


class Held(OperatorObserver):
    """Tracks storages that operators allocate; parameter gradients only `with_gradients`."""

    def __init__(self, with_gradients: bool = False) -> None:
        super().__init__()
        self.with_gradients = with_gradients
        self.sizes: list[int] = []
        """Bytes of each storage, by its number."""
        self.alive: dict[int, int] = {}
        """Number of each live storage, by the address of its C++ object."""
        self.gradients: set[int] = set()
        """Numbers of the storages of parameter gradients."""
        self.changes: list[tuple[int, int]] = []
        """(number of a storage, 1 if allocated or -1 if freed), in order."""

    def leave_out(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            self.alive[tensor.untyped_storage()._cdata] = -1

    def watch(self, model: torch.nn.Module) -> None:
        """Excludes what the model owns, and clears gradients at once."""
        self.leave_out(*model.parameters(), *model.buffers())
        for parameter in model.parameters():
            if parameter.requires_grad and not self.with_gradients:
                parameter.register_post_accumulate_grad_hook(self._clear)

    def _clear(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.gradients.add(self.alive.get(parameter.grad.untyped_storage()._cdata, -1))
        parameter.grad = None

    def observe(
        self, func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], result: object
    ) -> None:
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self.alive:
                self._begin(tensor.untyped_storage())

    def _begin(self, storage: torch.UntypedStorage) -> None:
        number, address = len(self.sizes), storage._cdata
        self.sizes.append(storage.nbytes())
        self.alive[address] = number
        self.changes.append((number, 1))
        weakref.finalize(storage, self._end, address)

    def _end(self, address: int) -> None:
        self.changes.append((self.alive.pop(address), -1))

    def most(self) -> int:
        now = most = 0
        for number, change in self.changes:
            if number not in self.gradients:
                now += change * self.sizes[number]
                most = max(most, now)
        return most


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
