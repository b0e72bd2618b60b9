from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from harness.strategy.job import Moment, TrainState

MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
"""Names of the optimizer states that are compared."""
MOMENTS_UP_TO = 2**29
"""Bytes of trained parameters up to which optimizer states are compared."""
_WRAPPERS = ("_fsdp_wrapped_module.", "_orig_mod.", "_checkpoint_wrapped_module.")


def plain_name(name: str) -> str:
    """Strips wrapper prefixes from a parameter's name."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removeprefix("module.")


def full_parameters(train_state: TrainState) -> Iterator[tuple[str, Tensor]]:
    """Yields this rank's parameters by plain name, unsharded and in the workload's layout.

    All ranks must iterate together.
    """
    gather = train_state.gather or train_state.model.named_parameters
    for name, parameter in gather():
        yield plain_name(name), _whole(train_state, name, parameter)


def full_moments(
    train_state: TrainState, shape_of: Callable[[str], tuple[int, ...] | None]
) -> Iterator[tuple[str, str, Tensor]]:
    """Yields (plain name, state's name, whole tensor) of optimizer states, like `full_parameters`.

    `shape_of`: shape by plain name; states of another shape are left out.
    """
    named = (
        train_state.moments()
        if train_state.moments
        else moments_of(train_state.model.named_parameters(), train_state.optimizers)
    )
    for name, kind, tensor in named:
        whole = _whole(train_state, name, tensor)
        if tuple(whole.shape) == shape_of(plain_name(name)):
            yield plain_name(name), kind, whole


def moments_of(
    named: Iterable[tuple[str, Tensor]], optimizers: Iterable[Optimizer]
) -> Iterator[Moment]:
    """Yields optimizer states by parameter name, sharded as the optimizers keep them."""
    everything = list(optimizers)
    for name, parameter in named:
        for optimizer in everything:
            state = optimizer.state.get(parameter, {})
            yield from ((name, kind, state[kind]) for kind in MOMENTS if kind in state)


def moments_by_torch(model: nn.Module, optimizer: Optimizer) -> Iterator[Moment]:
    """Yields whole optimizer states."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
    )

    options = StateDictOptions(full_state_dict=True)
    states: Any = get_optimizer_state_dict(model, optimizer, options=options)["state"]
    for name, state in states.items():
        yield from ((name, kind, state[kind]) for kind in MOMENTS if kind in state)


def trained_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields floating-point buffers by plain name."""
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point():
            yield plain_name(name), buffer


def _whole(train_state: TrainState, name: str, value: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    tensor = value.detach()
    if isinstance(tensor, DTensor):
        # Offloaded shards return to the device, whose process group gathers them.
        tensor = cast("DTensor", tensor.to(tensor.device_mesh.device_type)).full_tensor()
    restore = train_state.restore.get(plain_name(name))
    return restore(tensor) if restore else tensor
