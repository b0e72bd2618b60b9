from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

from harness.cell.cell import Cell
from harness.cell.errors import Refused, UsageError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.checkpoint.state_dict import StateDictOptions
    from torch.optim import Optimizer

    from harness.seam.job import Job, Moment, TrainState

StateDict: TypeAlias = dict[str, Any]
"""Tensors and values by name, perhaps nested, as torch names them."""


class Stateful(Protocol):
    def state_dict(self) -> StateDict: ...
    def load_state_dict(self, state_dict: StateDict, /) -> object: ...


Counter = tuple[object, str]
"""Object and attribute name of a step counter."""
OF_STAGES = ("sharded", "async")
"""Checkpoints of pipelines; not full, because no rank has the whole model."""
LEAST_STEPS = 6
"""Minimum steps of a parity segment with a checkpoint."""
FILE = "checkpoint.pt"


def checkpoint_step(cell: Cell) -> int:
    """Returns the number of steps before the checkpoint: half of the parity segment."""
    return cell.parity_steps // 2


def saving_cell(cell: Cell) -> Cell:
    """Returns the cell that saves the checkpoint. With `checkpoint_from`, it is a cell of another
    strategy. Raises UsageError unless `checkpoint_from` names a strategy and a number of
    devices."""
    if not cell.checkpoint_from:
        return cell
    strategy, _, devices = cell.checkpoint_from.rpartition(" x")
    if not strategy or not devices.isdecimal() or int(devices) < 1:
        raise UsageError(
            f"checkpoint_from {cell.checkpoint_from!r} is not a strategy and a number of devices,"
            " such as `fsdp2 x2`"
        )
    changes = {"strategy": strategy, "devices": int(devices), "options": {}, "defaults": {}}
    return cell.model_copy(update={**changes, "checkpoint_from": ""})


def admit_checkpoint(cell: Cell, able: Sequence[str]) -> None:
    """Raises Refused if the cell cannot restart from a checkpoint. `able`: the
    strategy's values of that axis."""
    if cell.checkpoint not in able:
        remedy = f"use {', '.join(able)}" if able else "leave the checkpoint out"
        raise Refused(f"{cell.strategy} does not save {cell.checkpoint} checkpoints; {remedy}")
    if cell.nodes > 1:
        raise Refused("a checkpoint of several nodes needs a shared folder: set nodes to 1")
    if cell.precision == "fp16":
        raise Refused("the loss scale of fp16 is not saved with a checkpoint: use fp32 or bf16")
    if cell.schedule != "constant":
        raise Refused("the schedule's step is not saved with a checkpoint: use schedule constant")
    if cell.compile != "none":
        raise Refused("a restart would compile twice: use compile none with a checkpoint")
    if cell.parity_steps < LEAST_STEPS:
        raise Refused(
            f"half of {cell.parity_steps} parity_steps is too early for a checkpoint; use at least"
            f" {LEAST_STEPS}"
        )


def save_by_torch(
    job: Job, train_state: TrainState, folder: Path, step: int
) -> Callable[[], object] | None:
    """Saves model, optimizers, counters and random state in the way that the cell asks for; see
    `Save`."""
    import torch
    from torch.distributed.checkpoint.state_dict_saver import save

    state: StateDict = {**_states(job, train_state), "step": step}
    state["counters"] = counters_of(train_state.counters)
    if job.cell.checkpoint == "full":
        state["random"] = random_states()
        if job.rank == 0:
            torch.save(state, folder / FILE)
        return None
    state["random"] = {str(job.rank): torch.get_rng_state()}
    if job.cell.checkpoint == "async":
        return _save_in_background(state, folder)
    save(state, checkpoint_id=folder)
    return None


def load_by_torch(job: Job, train_state: TrainState, folder: Path) -> int:
    """Loads a `save_by_torch` checkpoint on any number of ranks; returns its step."""
    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict import set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load

    if job.cell.checkpoint == "full":
        state = torch.load(folder / FILE, map_location="cpu", mmap=True, weights_only=True)
        random = dict(enumerate(state["random"])).get(job.rank)
    else:
        state = {**_states(job, train_state), "step": 0}
        state["counters"] = counters_of(train_state.counters)
        saved = FileSystemReader(folder).read_metadata().state_dict_metadata
        if f"random.{job.rank}" in saved:
            state["random"] = {str(job.rank): torch.get_rng_state()}
        load(state, checkpoint_id=folder)
        random = state.get("random", {}).get(str(job.rank))
    set_state_dict(
        train_state.model,
        list(train_state.optimizers),
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=_options(job),
    )
    set_counters(train_state.counters, state["counters"])
    if random is not None:
        torch.set_rng_state(random)
    step: int = state["step"]
    return step


def counters_of(counters: Sequence[Counter]) -> list[int]:
    return [getattr(owner, name) for owner, name in counters]


def set_counters(counters: Sequence[Counter], values: Sequence[int]) -> None:
    for (owner, name), value in zip(counters, values, strict=True):
        setattr(owner, name, value)


@dataclass(frozen=True)
class Tensors:
    """Tensors by name, loaded in place."""

    by_name: Mapping[str, Tensor]

    def state_dict(self) -> StateDict:
        return dict(self.by_name)

    def load_state_dict(self, state_dict: StateDict) -> None:
        for name, tensor in self.by_name.items():
            tensor.detach().copy_(state_dict[name])


@dataclass(frozen=True)
class StateFiles:
    """The `state_dict` of several parts: rank 0's in one file, or every rank's in its own."""

    job: Job
    parts: Mapping[str, Stateful]
    counters: Sequence[Counter] = ()
    gather: Callable[[], object] = list
    """Gathers sharded states to rank 0; called on all ranks."""

    def save(self, folder: Path, step: int) -> None:
        import torch

        full = self.job.cell.checkpoint == "full"
        if full:
            self.gather()
        random = random_states() if full else torch.get_rng_state()
        if full and self.job.rank:
            return
        state: StateDict = {name: part.state_dict() for name, part in self.parts.items()}
        state |= {"counters": counters_of(self.counters), "random": random, "step": step}
        torch.save(state, self._file(folder))

    def load(self, folder: Path) -> int:
        import torch

        state = torch.load(self._file(folder), map_location="cpu", weights_only=False)
        for name, part in self.parts.items():
            part.load_state_dict(state[name])
        set_counters(self.counters, state["counters"])
        random = state["random"]
        torch.set_rng_state(random[self.job.rank] if isinstance(random, list) else random)
        step: int = state["step"]
        return step

    def _file(self, folder: Path) -> Path:
        full = self.job.cell.checkpoint == "full"
        return folder / (FILE if full else f"rank{self.job.rank}.pt")


def random_states() -> list[Tensor]:
    """Returns every rank's random state; call on all ranks."""
    import torch
    import torch.distributed as dist

    state = torch.get_rng_state()
    if not dist.is_initialized():
        return [state]
    states = [state] * dist.get_world_size()
    dist.all_gather_object(states, state)
    return states


def _states(job: Job, train_state: TrainState) -> StateDict:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = get_state_dict(
        train_state.model, list(train_state.optimizers), options=_options(job)
    )
    return {"model": model, "optimizer": optimizer}


def _options(job: Job) -> StateDictOptions:
    """Returns torch's options for state dicts, with flat optimizer names except for full
    checkpoints. Ranks with different parameters need flat names, which torch 2.13 cannot load from
    a full checkpoint. On a CPU, `cpu_offload` gives views of memory that FSDP1 frees."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    full = job.cell.checkpoint == "full"
    return StateDictOptions(
        full_state_dict=full,
        cpu_offload=full and job.device.type == "cuda",
        flatten_optimizer_state_dict=not full,
    )


def _save_in_background(state: StateDict, folder: Path) -> Callable[[], object]:
    """Starts an asynchronous save; returns a function that waits for it.

    The save has its own process group, which keeps its collectives apart from the training's.
    """
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict_saver import async_save

    group = dist.new_group(backend="gloo") if dist.is_initialized() else None
    saving: Any = async_save(state, checkpoint_id=folder, process_group=group)
    upload: Future[object] = getattr(saving, "upload_completion", saving)
    return upload.result


MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
"""Names of the optimizer states that are compared."""
MOMENTS_UP_TO = 2**29
"""Bytes of trained parameters up to which optimizer states are compared. With them, references take
three times the disk, and are kept for many cells."""
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
