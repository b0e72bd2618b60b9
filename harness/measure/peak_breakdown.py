"""What fills a rank's memory at a step's peak?"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from harness.measure.states import retained

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed._tools.mem_tracker import MemTracker

    from harness.strategy.job import TrainState


STEPS = 2
"""The first finds what was there before and lives in C++."""


def peak_split(
    train_state: TrainState, device_type: str, step: Callable[[], object]
) -> dict[str, Any]:
    """Bytes by kind when the rank's tensors are most, by torch's MemTracker over a step; `peak`:
    their sum. Takes STEPS steps.

    `parameters` has gathered ones too, while a module holds them; `activations` is what forward
    makes, `other` what backward makes and frees. `library` counts what the strategy shows as such,
    and buffers of C++: those that operators write to, and `unseen`, by name, where none does.
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
        shown = list(retained(train_state))
        found: list[Tensor] = []
        tracker = _tracker(found)
        tracker.track_external(train_state.model, *train_state.optimizers, *written)
        for kind, _, tensor in reversed(shown):  # a storage counts for the first that shows it
            if isinstance(tensor, torch.Tensor) and tensor.device.type == device_type:
                tracker._update_and_maybe_create_winfos(tensor, kinds[kind])
        with tracker:
            step()
        written += found
    unseen = {name: what for _, name, what in shown if isinstance(what, int) and what}
    unseen_bytes = max(
        0, sum(unseen.values()) - sum(tensor.untyped_storage().nbytes() for tensor in written)
    )
    peak = next(
        (
            snap
            for device, snap in tracker.get_tracker_snapshot("peak").items()
            if device.type == device_type
        ),
        {},
    )
    sizes: dict[str, int] = {
        str(getattr(kind, "value", kind)): int(size) for kind, size in peak.items()
    }
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


def _tracker(found: list[Tensor]) -> MemTracker:
    """torch's tracker, which adds to `found` what operators write to that it has never seen: memory
    from before.

    Without its statistics of modules, which a module that is called twice in a step (micro-batches)
    confuses.
    """
    import torch
    from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType
    from torch.distributed.tensor import DTensor

    class Tracker(MemTracker):
        def _pre_fw_hook(self, module: Any, inputs: Any) -> None:
            try:
                self._track_module_params_and_buffers(module, install_grad_hooks=True)
            except RuntimeError:  # views of a flat parameter have no hooks of their own
                self._track_module_params_and_buffers(module, install_grad_hooks=False)

        def _post_fw_hook(self, module: Any, inputs: Any, outputs: Any) -> None: ...
        def _pre_bw_hook(self, module: Any, args: Any) -> None: ...
        def _post_bw_hook(self, module: Any, args: Any) -> None: ...

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if not any(t is DTensor for t in types):
                self._written(func, args, kwargs or {})
            return super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]

        def _written(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
            if isinstance(func, torch._ops.HigherOrderOperator) or not func._schema.is_mutable:
                return
            for place, argument in enumerate(func._schema.arguments):
                tensor = (
                    kwargs.get(argument.name)
                    if argument.kwarg_only or place >= len(args)
                    else args[place]
                )
                changed = argument.alias_info is not None and argument.alias_info.is_write
                if (
                    changed
                    and type(tensor) is torch.Tensor
                    and tensor.untyped_storage() not in self._WINFO
                ):
                    self._update_and_maybe_create_winfos(tensor, _MemRefType.OTH)
                    found.append(tensor)

    return Tracker()
