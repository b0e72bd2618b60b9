"""Contents of a rank's memory at a step's peak."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from harness.measure.states import retained

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch._ops import OpOverload
    from torch.distributed._tools.mem_tracker import MemTracker

    from harness.strategy.job import TrainState


STEPS = 2
"""Two steps, as the first one finds earlier memory that only C++ knows about."""


class PeakBreakdown(TypedDict):
    """Bytes by kind at the memory peak of a step."""

    parameters: int
    """Parameters, including gathered ones while a module holds them."""
    gradients: int
    optimizer: int
    activations: int
    """Tensors created by forward."""
    library: int
    """Buffers named by the strategy, and C++ buffers: those that operators write to, and
    `unseen`."""
    other: int
    """Tensors created and freed by backward."""
    peak: int
    unseen: dict[str, int]
    """Buffers that the strategy names only by size and no operator writes to."""


def peak_split(
    train_state: TrainState, device_type: str, step: Callable[[], object]
) -> PeakBreakdown:
    """Splits a step's peak memory on devices of this type, using torch's MemTracker.

    Runs `step` STEPS times.
    """
    import torch
    from torch.distributed._tools.mem_tracker import _MemRefType

    kinds = {
        "parameters": _MemRefType.PARAM,
        "gradients": _MemRefType.GRAD,
        "optimizer": _MemRefType.OPT,
        "library": _MemRefType.OTH,
    }
    written: list[Tensor] = []
    for _ in range(STEPS):
        states = list(retained(train_state))
        newly_written: list[Tensor] = []
        tracker = _tracker(newly_written)
        tracker.track_external(train_state.model, *train_state.optimizers, *written)
        for kind, _, tensor in reversed(states):  # first kind per storage counts
            if isinstance(tensor, torch.Tensor) and tensor.device.type == device_type:
                tracker._update_and_maybe_create_winfos(tensor, kinds[kind])
        with tracker:
            step()
        written += newly_written
    unseen = {name: size for _, name, size in states if isinstance(size, int) and size}
    written_bytes = sum(tensor.untyped_storage().nbytes() for tensor in written)
    unseen_bytes = max(0, sum(unseen.values()) - written_bytes)
    sizes = _peak(tracker, device_type)
    return {
        "parameters": sizes.get("Parameter", 0),
        "gradients": sizes.get("Gradient", 0),
        "optimizer": sizes.get("Optstate", 0),
        "activations": sizes.get("Activation", 0),
        "library": sizes.get("Other", 0) + sizes.get("Buffer", 0) + unseen_bytes,
        "other": sizes.get("Temp", 0),
        "peak": sizes.get("Total", 0) + unseen_bytes,
        "unseen": unseen,
    }


def _peak(tracker: MemTracker, device_type: str) -> dict[str, int]:
    for device, snapshot in tracker.get_tracker_snapshot("peak").items():
        if device.type == device_type:
            return {str(getattr(kind, "value", kind)): int(n) for kind, n in snapshot.items()}
    return {}


def _tracker(written: list[Tensor]) -> MemTracker:
    """Returns torch's tracker, extended to append tensors from before the step to `written`.

    These are tensors that operators write to and the tracker has not seen. It keeps no statistics
    by module: modules called twice in a step, as with micro-batches, would confuse them.
    """
    import torch
    from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType
    from torch.distributed.tensor import DTensor

    class Tracker(MemTracker):
        def _pre_fw_hook(self, module: nn.Module, inputs: object) -> None:
            try:
                self._track_module_params_and_buffers(module, install_grad_hooks=True)
            except RuntimeError:  # views of a flat parameter cannot have their own hooks
                self._track_module_params_and_buffers(module, install_grad_hooks=False)

        def _post_fw_hook(self, module: nn.Module, inputs: object, outputs: object) -> None: ...
        def _pre_bw_hook(self, module: nn.Module, args: object) -> None: ...
        def _post_bw_hook(self, module: nn.Module, args: object) -> None: ...

        def __torch_dispatch__(
            self,
            func: OpOverload,
            types: Iterable[type],
            args: Sequence[object] = (),
            kwargs: Mapping[str, object] | None = None,
        ) -> object:
            if not any(t is DTensor for t in types):
                self._note_written(func, args, kwargs or {})
            dispatch: Any = super().__torch_dispatch__
            return dispatch(func, types, args, kwargs)

        def _note_written(
            self, func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
        ) -> None:
            if isinstance(func, torch._ops.HigherOrderOperator) or not func._schema.is_mutable:
                return
            for place, argument in enumerate(func._schema.arguments):
                by_name = argument.kwarg_only or place >= len(args)
                tensor = kwargs.get(argument.name) if by_name else args[place]
                changed = argument.alias_info is not None and argument.alias_info.is_write
                if (
                    changed
                    and type(tensor) is torch.Tensor
                    and tensor.untyped_storage() not in self._WINFO
                ):
                    self._update_and_maybe_create_winfos(tensor, _MemRefType.OTH)
                    written.append(tensor)

    return Tracker()
