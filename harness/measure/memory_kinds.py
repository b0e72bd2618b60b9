"""Memory of a rank by kind: between steps, at a step's peak, and when it ran out."""

from __future__ import annotations

import contextlib
import gc
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, get_args

from harness.cell.training import StateKind

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch._ops import OpOverload
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.optim import Optimizer

    from harness.cell.training import Retained
    from harness.measure.peak_memory import MemoryMeter
    from harness.seam.job import TrainState


KINDS: tuple[StateKind, ...] = get_args(StateKind)


def retained(train_state: TrainState) -> Iterator[Retained]:
    """Yields what a rank keeps between steps: states that the strategy names, or else of model and
    optimizers; then the library's buffers."""
    if train_state.states:
        yield from train_state.states()
    else:
        yield from retained_by(train_state.model, train_state.optimizers)
    if train_state.library:
        yield from train_state.library()


def retained_by(model: nn.Module, optimizers: Iterable[Optimizer]) -> Iterator[Retained]:
    """Yields a model's parameters, gradients and buffers, and the optimizers' state tensors."""
    for name, parameter in model.named_parameters():
        yield "parameters", name, parameter
        if parameter.grad is not None:
            yield "gradients", name, parameter.grad
    for name, buffer in model.named_buffers():
        yield "library", f"model buffer {name}", buffer
    for optimizer in optimizers:
        for state in optimizer.state.values():
            if isinstance(state, dict):
                yield from (
                    ("optimizer", str(key), value)
                    for key, value in state.items()
                    if hasattr(value, "untyped_storage")
                )


def state_bytes(
    tensors: Iterable[Retained], device_type: str
) -> tuple[dict[str, int], dict[str, int]]:
    """Returns bytes by kind, and those of kind `library` by name.

    `host`: tensors on another device type. A storage counts once, for its first tensor.
    """
    kinds: dict[str, int] = dict.fromkeys((*KINDS, "host"), 0)
    library: dict[str, int] = {}
    seen: set[tuple[str, int]] = set()
    for kind, name, tensor in tensors:
        size, on_device = _bytes(tensor, seen)
        if on_device not in (None, device_type):
            kinds["host"] += size
            continue
        kinds[kind] += size
        if kind == "library" and size:
            library[name] = library.get(name, 0) + size
    return kinds, library


def local_part(tensor: Tensor) -> Tensor:
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def _bytes(tensor: Tensor | int, seen: set[tuple[str, int]]) -> tuple[int, str | None]:
    if isinstance(tensor, int):
        return tensor, None
    local = local_part(tensor)
    storage = local.untyped_storage()
    key = (str(storage.device), storage.data_ptr())
    if key in seen or not storage.nbytes():
        return 0, local.device.type
    seen.add(key)
    return storage.nbytes(), local.device.type


STEPS = 2
"""Number of steps to track; the first one finds older buffers that only C++ knows."""


class PeakBreakdown(TypedDict):
    """Bytes by kind at a step's memory peak."""

    parameters: int
    """Bytes of parameters, including gathered parameters while a module holds them."""
    gradients: int
    optimizer: int
    activations: int
    library: int
    """Bytes of buffers that the strategy names or that operators write to, and of `unseen`
    buffers."""
    other: int
    """Bytes of tensors that backward creates and frees."""
    peak: int
    unseen: dict[str, int]
    """Bytes of library buffers that are not tensors, by name."""


def peak_split(
    train_state: TrainState, device_type: str, step: Callable[[], object]
) -> PeakBreakdown:
    """Splits the peak memory of `step` on devices of this type, by torch's MemTracker."""
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
        for kind, _, tensor in reversed(states):  # a storage's first kind counts
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
    """Returns torch's tracker, extended to append tensors from before the step to `written`: those
    that operators write to and the tracker has not seen. Statistics by module are off, because
    modules called twice in a step confuse them."""
    import torch
    from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType
    from torch.distributed.tensor import DTensor

    class Tracker(MemTracker):
        def _pre_fw_hook(self, module: nn.Module, inputs: object) -> None:
            try:
                self._track_module_params_and_buffers(module, install_grad_hooks=True)
            except RuntimeError:  # views of a flat parameter cannot have hooks
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
            for index, argument in enumerate(func._schema.arguments):
                by_name = argument.kwarg_only or index >= len(args)
                tensor = kwargs.get(argument.name) if by_name else args[index]
                changed = argument.alias_info is not None and argument.alias_info.is_write
                if (
                    changed
                    and type(tensor) is torch.Tensor
                    and tensor.untyped_storage() not in self._WINFO
                ):
                    self._update_and_maybe_create_winfos(tensor, _MemRefType.OTH)
                    written.append(tensor)

    return Tracker()


HOME = Path(__file__).parents[1]
_BACKWARD = ("backward", "_engine_run_backward")


def phase(error: BaseException) -> str:
    """Returns the traceback's phase: set-up, forward, backward, update or verification."""
    frames = traceback.extract_tb(error.__traceback__)
    functions = [frame.name for frame in frames if Path(frame.filename).is_relative_to(HOME)]
    if "timed_step" not in functions:
        return "verification" if "verify" in functions else "set-up"
    names = [frame.name for frame in frames]
    below = frames[names.index("timed_step") + 2 :]  # what the training step called
    if any(frame.name in _BACKWARD for frame in below):
        return "backward"
    libraries = [frame for frame in below if not Path(frame.filename).is_relative_to(HOME)]
    return "update" if any(frame.name == "step" for frame in libraries) else "forward"


def held_bytes(meter: MemoryMeter, train_state: TrainState | None) -> dict[str, object]:
    """Returns the bytes that a rank holds when it runs out of memory, by kind. `other`: tensors
    outside the states; `largest`: their three largest groups; `stacks`: of threads started later.
    Saved activations and C++ buffers are only in `in_use`."""
    in_use, stacks = meter.in_use(), meter.stacks()
    states: list[Retained] = []
    # An interrupted library may be unable to name all it holds.
    with contextlib.suppress(Exception):
        states.extend(retained(train_state) if train_state else ())
    kinds, buffers = state_bytes(states, meter.device.type)
    holding: dict[str, object] = {**{kind: kinds[kind] for kind in KINDS}, "buffers": buffers}
    with contextlib.suppress(Exception):
        holding |= _others(states, meter.device.type)
    return {**holding, "stacks": stacks, "in_use": in_use}


def _others(states: Sequence[Retained], device_type: str) -> dict[str, object]:
    """Returns bytes of tensors outside the states. If no states are known, parameters count too."""
    import torch

    seen = {_storage(tensor)[0] for _, _, tensor in states if isinstance(tensor, torch.Tensor)}
    groups: Counter[str] = Counter()
    parameters = 0
    # isinstance would read __class__, which makes some libraries' objects warn.
    alive: list[Tensor] = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    alive.sort(key=lambda tensor: not isinstance(tensor, torch.nn.Parameter))  # before their views
    for tensor in alive:
        # Fake, meta and partly built tensors lack a storage, and raise.
        with contextlib.suppress(Exception):
            if tensor.device.type != device_type:
                continue
            address, size = _storage(tensor)
            if not size or address in seen:
                continue
            seen.add(address)
            if not states and isinstance(tensor, torch.nn.Parameter):
                parameters += size
            else:
                groups[f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"] += size
    others = {"other": sum(groups.values()), "largest": dict(groups.most_common(3))}
    return others if states else {**others, "parameters": parameters}


def _storage(tensor: Tensor) -> tuple[int, int]:
    storage = local_part(tensor).untyped_storage()
    return storage.data_ptr(), storage.nbytes()
