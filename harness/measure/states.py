"""What does a rank keep between two steps, in bytes and by kind?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from harness.spec.training import Retained
    from harness.strategy.job import TrainState

KINDS = ("parameters", "gradients", "optimizer", "library")


def retained(train_state: TrainState) -> Iterator[Retained]:
    """Everything the strategy shows, else what model and optimizers hold; then the library's own
    buffers."""
    if train_state.states:
        yield from train_state.states()
    else:
        yield from retained_by(train_state.model, train_state.optimizers)
    if train_state.library:
        yield from train_state.library()


def retained_by(model: Any, optimizers: Iterable[Any]) -> Iterator[Retained]:
    """Parameters, gradients, buffers and optimizer state that a walk finds."""
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


def state_bytes(tensors: Iterable[Retained], device_type: str) -> dict[str, Any]:
    """Bytes of distinct storages by kind; the library's by name; `host`: those in host memory when
    the device is not the host.

    A storage counts once, for the first kind that shows it: list the true owner of a view first.
    """
    total = dict.fromkeys((*KINDS, "host"), 0)
    library: dict[str, int] = {}
    seen: set[tuple[str, int]] = set()
    for kind, name, what in tensors:
        size, where = _bytes(what, seen)
        if where not in (None, device_type):
            total["host"] += size
            continue
        total[kind] += size
        if kind == "library" and size:
            library[name] = library.get(name, 0) + size
    return {**total, "library_buffers": library}


def _bytes(what: Tensor | int, seen: set[tuple[str, int]]) -> tuple[int, str | None]:
    """Bytes of a storage that was not seen before, and the type of the device it lies on."""
    if isinstance(what, int):
        return what, None
    local: Any = what.to_local() if hasattr(what, "to_local") else what
    storage = local.untyped_storage()
    key = (str(storage.device), storage.data_ptr())
    if key in seen or not storage.nbytes():
        return 0, local.device.type
    seen.add(key)
    return storage.nbytes(), local.device.type
