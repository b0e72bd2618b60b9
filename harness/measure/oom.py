"""A rank ran out of memory: during what, and what did it hold?"""

from __future__ import annotations

import contextlib
import gc
import traceback
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.measure.states import KINDS, retained, state_bytes

if TYPE_CHECKING:
    from harness.measure.memory import MemoryMeter
    from harness.spec.training import Retained
    from harness.strategy.job import TrainState

HOME = Path(__file__).parents[1]
PHASES = ("set-up", "forward", "backward", "update", "verification")
_BACKWARD = ("backward", "_engine_run_backward")


def phase(error: BaseException) -> str:
    """What the rank was doing, by the functions that the exception came through."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame.name for frame in frames if Path(frame.filename).is_relative_to(HOME)]
    if "timed_step" not in own:
        return "verification" if "verify" in own else "set-up"
    names = [frame.name for frame in frames]
    below = frames[names.index("timed_step") + 2 :]  # what the training step called
    if any(frame.name in _BACKWARD for frame in below):
        return "backward"
    libraries = [frame for frame in below if not Path(frame.filename).is_relative_to(HOME)]
    return "update" if any(frame.name == "step" for frame in libraries) else "forward"


def shortage(
    error: BaseException, meter: MemoryMeter, train_state: TrainState | None
) -> dict[str, Any]:
    """The phase, and the bytes that were held then by kind, for a rank's answer.

    `other`: tensors that Python can see beside the states (gathered parameters, flat copies,
    activations kept by a module), with the three largest groups by name; `stacks`: of threads begun
    since; the rest of `in_use` is what it cannot see: activations kept by autograd, buffers of C++.
    """
    in_use, stacks = meter.in_use(), meter.stacks()
    found: list[Retained] = []
    with contextlib.suppress(
        Exception
    ):  # a library that is half-way through something may not be able to show all it holds
        for one in retained(train_state) if train_state else ():
            found.append(one)
    kept = state_bytes(found, meter.device.type)
    holding: dict[str, Any] = {kind: kept[kind] for kind in KINDS} | {
        "buffers": kept["library_buffers"]
    }
    with contextlib.suppress(Exception):
        holding |= _others(found, meter.device.type)
    return {"failed_in": phase(error), "holding": {**holding, "stacks": stacks, "in_use": in_use}}


def _others(known: list[Retained], device_type: str) -> dict[str, Any]:
    """Bytes of all tensors of this process that are not among the known; parameters count as such
    where nothing is known yet."""
    import torch

    def place(tensor: Any) -> tuple[int, int]:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        storage = local.untyped_storage()
        return storage.data_ptr(), storage.nbytes()

    seen = {place(what)[0] for _, _, what in known if isinstance(what, torch.Tensor)}
    groups: Counter[str] = Counter()
    parameters = 0
    alive = [
        o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)
    ]  # isinstance asks objects that warn when asked
    for tensor in sorted(
        alive, key=lambda one: not isinstance(one, torch.nn.Parameter)
    ):  # before views of them
        with contextlib.suppress(
            Exception
        ):  # fake, meta and half-made ones have no storage to speak of
            if tensor.device.type != device_type:
                continue
            where, size = place(tensor)
            if not size or where in seen:
                continue
            seen.add(where)
            if not known and isinstance(tensor, torch.nn.Parameter):
                parameters += size
            else:
                groups[f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"] += size
    said: dict[str, Any] = {"other": sum(groups.values()), "largest": dict(groups.most_common(3))}
    return said if known else {**said, "parameters": parameters}
