"""Adds up bytes of live tensors: the peak of each part of a step, and its contents."""

from __future__ import annotations

import bisect
import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import _sharding_prop as sharding_propagation
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from harness.measure.memory_kinds import local_part, retained
from harness.measure.rank_traffic import Call, collective_call
from harness.workloads.operators import OperatorObserver

if TYPE_CHECKING:
    from torch._ops import OpOverload
    from torch.optim import Optimizer

    from harness.seam.job import TrainState

COPIED_BY_GLOO = ("all_gather", "reduce_scatter", "gather", "scatter")
"""Operations during which gloo holds a flat copy of the whole tensor, allocated by torch.

Measured with torch 2.13. Rooted operations copy only on the root, but count on all ranks.
"""

Kind = Literal["parameters", "gradients", "optimizer", "activations", "buffers", "temporaries"]
"""Contents of memory. `parameters` include gathered parameters, `gradients` also gradients before
their reduction. `activations` are made by forward. `buffers` belong to the model, a library or
collectives. `temporaries` are other tensors of backward and update."""
KINDS: tuple[Kind, ...] = get_args(Kind)
Phase = Literal["set-up", "forward", "backward", "update"]
_KIND_OF: Mapping[Phase, Kind] = {
    "set-up": "buffers",
    "forward": "activations",
    "backward": "temporaries",
    "update": "temporaries",
}
"""Kind of a new allocation by phase, until more is known."""
_MESSAGES = ("send", "receive")


def backend_bytes(call: Call) -> int:
    """Returns bytes that gloo holds during a call beyond the call's tensors."""
    return call.tensor_bytes if call.operation in COPIED_BY_GLOO and call.group_size > 1 else 0


class StepRegion(NamedTuple):
    """Part of training with its own peak: a phase of a step, from one block to the next."""

    step: int
    phase: Phase
    model: int = 0
    """Index of the rank's model, if it has several stages."""
    block: int = -1
    """Index of the block; -1 before the first."""


@dataclass
class Allocation:
    nbytes: int
    kind: Kind


@dataclass
class RegionPeak:
    nbytes: int
    allocations: Sequence[Allocation] = ()

    def split(self) -> dict[Kind, int]:
        sizes = dict.fromkeys(KINDS, 0)
        for allocation in self.allocations:
            sizes[allocation.kind] += allocation.nbytes
        return sizes


class Ledger(OperatorObserver):
    """A dispatch mode that adds up fake tensors' storages until they are freed or resized.

    It sees operators' results, but not their temporaries.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, Allocation] = {}
        """Allocations by id of the storage's Python object, which lives as long."""
        self.total = 0
        self.peaks: dict[StepRegion, RegionPeak] = {}
        self.region = StepRegion(-1, "set-up")
        self.largest_buffer = 0
        self.updating = 0
        self.paused = False
        """Whether operators are currently left uncounted."""
        self.blocks: weakref.WeakKeyDictionary[nn.Module, tuple[int, int]]
        self.blocks = weakref.WeakKeyDictionary()
        """Index of each block: of its model, and within the model."""
        self.models = 0
        self._watched: dict[int, weakref.ref[Any]] = {}
        self._rising: RegionPeak | None = None
        """Peak of the current region; None if something was freed since."""
        self._sequence: list[int] = [-1]
        self._entered: list[tuple[int, int] | None] = [None]
        """Blocks whose autograd nodes begin at these `_sequence` numbers."""
        self._hooked = WeakTensorKeyDictionary()

    # Memory

    def _grow(self, nbytes: int) -> None:
        region = self._present_place()
        if region != self.region:
            self._settle()
            self.region = region
        self.total += nbytes
        peak = self.peaks.get(region)
        if peak is None:
            peak = self.peaks[region] = RegionPeak(0)
        if self.total > peak.nbytes:
            peak.nbytes = self.total
            self._rising = peak

    def _settle(self) -> None:
        if self._rising is not None:
            self._rising.allocations = tuple(self.live.values())
            self._rising = None

    def _free(self, key: int) -> None:
        self._settle()
        self.total -= self.live.pop(key).nbytes
        del self._watched[key]

    def _add(self, storage: torch.UntypedStorage, kind: Kind) -> None:
        key = id(storage)
        if key in self.live:
            return
        self._watched[key] = weakref.ref(storage, lambda _: self._free(key))
        self.live[key] = Allocation(storage.nbytes(), kind)
        self._grow(storage.nbytes())

    def _resized(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key not in self.live:
            self._add(storage, _KIND_OF[self._phase()])
            return
        before, size = self.live[key], storage.nbytes()
        if size < before.nbytes:
            self._settle()
        self.live[key] = Allocation(size, before.kind)
        self._grow(size - before.nbytes)

    def _briefly(self, nbytes: int) -> None:
        if nbytes:
            if self.region.step >= 0:
                self.largest_buffer = max(self.largest_buffer, nbytes)
            self.live[-1] = Allocation(nbytes, "buffers")
            self._grow(nbytes)
            self._settle()
            self.total -= self.live.pop(-1).nbytes

    def mark(self, tensor: Tensor, kind: Kind, only: Iterable[Kind] = KINDS) -> None:
        local = local_part(tensor)
        if isinstance(local, FakeTensor):
            allocation = self.live.get(id(local.untyped_storage()))
            if allocation is not None and allocation.kind in only:
                allocation.kind = kind

    def mark_states(self, train_state: TrainState) -> None:
        kinds: dict[str, Kind] = {"library": "buffers"}
        for kind, _, tensor in retained(train_state):
            if isinstance(tensor, Tensor):
                self.mark(tensor, kinds.get(kind, kind))  # type: ignore[arg-type]

    # Position in training

    def begin_step(self, step: int) -> None:
        self._settle()
        self.region = StepRegion(step, "forward")
        self.peaks[self.region] = RegionPeak(self.total)
        self._rising = self.peaks[self.region]

    def _phase(self) -> Phase:
        if self.region.step < 0:
            return "set-up"
        if self.updating:
            return "update"
        return "backward" if torch._C._current_graph_task_id() != -1 else "forward"

    def _present_place(self) -> StepRegion:
        phase, region = self._phase(), self.region
        if phase != region.phase:
            region = StepRegion(region.step, phase)
        if phase == "backward" and (node := torch._C._current_autograd_node()) is not None:
            at = bisect.bisect_right(self._sequence, node._sequence_nr()) - 1
            if node.name() != "torch::autograd::AccumulateGrad" and (block := self._entered[at]):
                return StepRegion(region.step, phase, *block)
        return region

    def _note_block(self, block: tuple[int, int] | None) -> None:
        self._sequence.append(torch._C._autograd._get_sequence_nr())
        self._entered.append(block)

    def _before_forward(self, module: nn.Module, inputs: object) -> None:
        for tensor in (*module._parameters.values(), *vars(module).values()):
            if isinstance(tensor, Tensor):
                self.mark(tensor, "parameters")
                self._mark_gradient_of(tensor)
        if block := self.blocks.get(module):
            self._note_block(block)
            if self._phase() == "forward":
                self._settle()
                self.region = StepRegion(self.region.step, "forward", *block)

    def _after_forward(self, module: nn.Module, inputs: object, outputs: object) -> None:
        if module in self.blocks:
            self._note_block(None)

    def _mark_gradient_of(self, tensor: Tensor) -> None:
        if tensor.is_leaf and tensor.requires_grad and tensor not in self._hooked:
            self._hooked[tensor] = True
            tensor.register_post_accumulate_grad_hook(
                lambda leaf: None if leaf.grad is None else self.mark(leaf.grad, "gradients")
            )

    def _before_update(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        self.updating += 1
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self.mark(parameter, "parameters")
                if parameter.grad is not None:
                    self.mark(parameter.grad, "gradients")

    def _after_update(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        self.updating -= 1

    def note_model(self, model: nn.Module, block_path: str) -> None:
        if block_path:
            for index, block in enumerate(model.get_submodule(block_path).children()):
                self.blocks[block] = (self.models, index)
        self.models += 1

    @contextlib.contextmanager
    def recording(self) -> Iterator[Ledger]:
        resize = torch.UntypedStorage.resize_
        propagator = sharding_propagation.ShardingPropagator
        propagate: Callable[..., object] = propagator._propagate_tensor_meta_non_cached

        def uncounted(*args: object) -> object:
            """Infers a DTensor's shape from fake whole tensors, which real ranks never allocate."""
            self.paused = True
            try:
                return propagate(*args)
            finally:
                self.paused = False

        def resize_(storage: torch.UntypedStorage, size: int) -> object:
            result: object = resize(storage, size)
            self._resized(storage)
            return result

        hooks = (
            register_module_forward_pre_hook(self._before_forward),
            register_module_forward_hook(self._after_forward),
            register_optimizer_step_pre_hook(self._before_update),
            register_optimizer_step_post_hook(self._after_update),
        )
        try:
            with (
                mock.patch.object(torch.UntypedStorage, "resize_", resize_),
                mock.patch.object(propagator, propagate.__name__, uncounted),
                self,
            ):
                yield self
        finally:
            self._settle()
            for hook in hooks:
                hook.remove()

    def observe(
        self, func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], result: object
    ) -> None:
        if self.paused:
            return
        for tensor in (result,) if isinstance(result, Tensor) else tree_leaves(result):
            if isinstance(tensor, FakeTensor) and tensor.device.type != "meta":
                self._add(tensor.untyped_storage(), _KIND_OF[self._phase()])
        if getattr(func, "namespace", "") in ("c10d", "_c10d_functional"):
            self._collective(func, args)

    def _collective(self, func: OpOverload, args: Sequence[object]) -> None:
        call = collective_call(func._opname, args)
        if call is None:
            return
        if func.namespace == "c10d" and call.operation not in _MESSAGES:
            for tensor in tree_leaves(args):
                if isinstance(tensor, Tensor):
                    self.mark(tensor, "buffers", only=("activations", "temporaries"))
        self._briefly(backend_bytes(call))
