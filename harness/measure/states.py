"""Memory that a rank keeps between steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, get_args

from harness.spec.training import StateKind

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from harness.spec.training import Retained
    from harness.strategy.job import TrainState

KINDS: tuple[StateKind, ...] = get_args(StateKind)


def retained(train_state: TrainState) -> Iterator[Retained]:
    """Yields what a rank keeps between steps: states, then the library's buffers.

    States are those named by the strategy, or else those found in model and optimizers.
    """
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
    """Returns bytes by kind, and bytes of kind `library` by name.

    An extra kind, `host`, counts tensors not on a device of this type. A storage counts once, for
    its first tensor: list the owner of a storage before views of it.
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
    """Returns the storage's bytes (0 if seen before) and device type (None if unknown)."""
    if isinstance(tensor, int):
        return tensor, None
    local = local_part(tensor)
    storage = local.untyped_storage()
    key = (str(storage.device), storage.data_ptr())
    if key in seen or not storage.nbytes():
        return 0, local.device.type
    seen.add(key)
    return storage.nbytes(), local.device.type
