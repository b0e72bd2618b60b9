"""Counts memory, bytes and FLOPs of forward and backward, on fake tensors."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import set_checkpoint_early_stop

from harness.workloads.catalog import make_workload
from harness.workloads.counts import count_apart, fake_or_real, initialises_cuda
from harness.workloads.fused_loss import fused_head, loss_of
from harness.workloads.recompute import products, recompute_blocks

if TYPE_CHECKING:
    from torch._ops import OpOverload

    from harness.workloads import Workload


class OperatorObserver(TorchDispatchMode):
    """Dispatch mode that calls `observe` after each operator, including operators called from C++.

    Skips operators on a DTensor, because the operators on its local tensors follow.
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


Observer = TypeVar("Observer", bound=OperatorObserver)


class FlopCounter(OperatorObserver):
    flops = 0

    def observe(
        self, func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], result: object
    ) -> None:
        count = products().get(func._overloadpacket)
        if count:
            self.flops += count(*args, **kwargs, out_val=result)
        elif torch.Tag.pointwise in func.tags and isinstance(result, Tensor):
            self.flops += result.numel()


def _over_blocks(workload: Workload, count: Callable[[Workload], int]) -> int | None:
    """Extrapolates from one and two blocks; None unless the name is FAMILY-HIDDENxBLOCKS."""
    if not (pair := workload.of_one_and_two_blocks):
        return None
    single, double = (count(make_workload(name)) for name in pair)
    return single + (workload.blocks - 1) * (double - single)


@functools.cache
def activation_bytes(
    workload: Workload,
    samples: int,
    sequence_length: int,
    recompute: str = "none",
    precision: str = "fp32",
    tensor_ranks: int = 1,
    sequence_parallel: bool = False,
    loss: str = "plain",
) -> int:
    """Returns peak bytes of saved and temporary tensors in forward, loss and backward, without
    parameters, buffers and parameter gradients. `precision`: fp32, or the precision of autocast.
    `tensor_ranks` split each layer of a block and, with `sequence_parallel`, the sequence.
    `loss`: see `Cell.loss`."""
    size, split = (samples, sequence_length, recompute), (tensor_ranks, sequence_parallel, loss)
    counted = _over_blocks(
        workload, lambda model: activation_bytes(model, *size, precision, *split)
    )
    if counted is not None:
        return counted
    if initialises_cuda(workload):
        return count_apart(activation_bytes, workload, *size, precision, *split)
    return observe_training(workload, size[:2], recompute, Held, precision, *split).most()


def activations_by_depth(
    workload: Workload, samples: int, sequence_length: int, recompute: str, *split: Any
) -> tuple[float, float, float]:
    """Returns the parts of `activation_bytes`: of embedding and head, of a block, and of a block
    while it is recomputed.

    A model of unknown depth counts as equal blocks without ends.
    """
    size = (samples, sequence_length)
    shallow = [workload.with_blocks(blocks) for blocks in (1, 2)]

    def one_and_next(kind: str) -> tuple[float, float]:
        if None in shallow:
            whole = activation_bytes(workload, *size, kind, *split) / max(1, workload.blocks)
            return whole, whole
        single, double = (activation_bytes(made, *size, kind, *split) for made in shallow if made)
        return single, double - single

    first, whole_block = one_and_next("none")
    block = whole_block if recompute == "none" else one_and_next(recompute)[1]
    return first - whole_block, block, whole_block - block


@functools.cache
def recomputed_flops(
    workload: Workload, sequence_length: int, recompute: str, whole_blocks: bool = False
) -> int:
    """Returns FLOPs per sample that recomputation adds to a step: 2 per multiply-add, 1 per output
    element of elementwise operators.

    `whole_blocks`: do not stop at the last tensor that backward needs.
    """
    setting = (sequence_length, recompute, whole_blocks)
    counted = _over_blocks(workload, lambda model: recomputed_flops(model, *setting))
    if counted is not None:
        return counted
    computed_once = _operations(workload, sequence_length, "none", False)
    return _operations(workload, *setting) - computed_once


@functools.cache
def _operations(
    workload: Workload, sequence_length: int, recompute: str, whole_blocks: bool
) -> int:
    with set_checkpoint_early_stop(not whole_blocks):
        return observe_training(workload, (1, sequence_length), recompute, FlopCounter).flops


def observe_training(
    workload: Workload,
    size: tuple[int, int],
    recompute: str,
    make_observer: Callable[[], Observer],
    precision: str = "fp32",
    tensor_ranks: int = 1,
    sequence_parallel: bool = False,
    loss: str = "plain",
) -> Observer:
    """Runs forward, loss and backward of a `size` of samples and tokens under a new observer, and
    returns it.

    Uses autocast unless in fp32, and fake zeros unless a user's model needs real tensors.
    """
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)

    def train() -> Observer:
        observer = make_observer()
        logits: Callable[..., Tensor] = workload.logits
        model = workload.countable().build(seed=0, saved_weights=False)
        if tensor_ranks > 1:
            assert workload.split
            workload.split.leave_a_share(model, tensor_ranks, sequence_parallel)
            logits = workload.split.logits if sequence_parallel else logits
        if recompute != "none":
            recompute_blocks(model, workload.blocks_of(model), recompute)
        inputs, labels = workload.sample(*size)
        if head := fused_head(model, loss):
            head.labels = labels
        observer.watch(model)
        with observer:
            with torch.autocast("cpu", half, enabled=half is not None):
                total = loss_of(loss, workload, logits(model, inputs), labels, None)
            total.backward()
        return observer

    return fake_or_real(workload, size[1], train)


class Held(OperatorObserver):
    """Tracks storages that operators allocate, including parameter gradients if
    `with_gradients`."""

    def __init__(self, with_gradients: bool = False) -> None:
        super().__init__()
        self.with_gradients = with_gradients
        self.sizes: list[int] = []
        self.alive: dict[int, int] = {}
        """Numbers of live storages by the address of their C++ object."""
        self.gradients: set[int] = set()
        self.changes: list[tuple[int, int]] = []
        """Storage number, and 1 if allocated or -1 if freed, in order."""

    def leave_out(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            self.alive[tensor.untyped_storage()._cdata] = -1

    def watch(self, model: torch.nn.Module) -> None:
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
