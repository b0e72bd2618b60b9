"""Out-of-memory report of a rank: the phase of the step, and the bytes it held."""

from __future__ import annotations

import contextlib
import gc
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from harness.measure.states import KINDS, local_part, retained, state_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from harness.measure.memory import MemoryMeter
    from harness.spec.training import Retained
    from harness.strategy.job import TrainState

HOME = Path(__file__).parents[1]
PHASES = ("set-up", "forward", "backward", "update", "verification")
_BACKWARD = ("backward", "_engine_run_backward")


class Shortage(TypedDict):
    failed_in: str
    holding: dict[str, object]


def phase(error: BaseException) -> str:
    """Returns which of PHASES the rank was in, from the traceback."""
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


def shortage(error: BaseException, meter: MemoryMeter, train_state: TrainState | None) -> Shortage:
    """Returns the phase as `failed_in` and the bytes held then, by kind, as `holding`.

    `other`: tensors outside the states that Python can see (gathered parameters, flat copies,
    activations kept by a module); `largest`: their three largest groups. `stacks`: stacks of
    threads started since the imports. The rest of `in_use` is invisible to Python: activations kept
    by autograd, C++ buffers.
    """
    in_use, stacks = meter.in_use(), meter.stacks()
    states: list[Retained] = []
    # An interrupted library may not be able to name everything it holds.
    with contextlib.suppress(Exception):
        states.extend(retained(train_state) if train_state else ())
    kinds, buffers = state_bytes(states, meter.device.type)
    holding: dict[str, object] = {**{kind: kinds[kind] for kind in KINDS}, "buffers": buffers}
    with contextlib.suppress(Exception):
        holding |= _others(states, meter.device.type)
    return {"failed_in": phase(error), "holding": {**holding, "stacks": stacks, "in_use": in_use}}


def _others(states: Sequence[Retained], device_type: str) -> dict[str, object]:
    """Returns the bytes of this process's tensors outside the states.

    If no states are known, nn.Parameters count as `parameters`.
    """
    import torch

    seen = {_storage(tensor)[0] for _, _, tensor in states if isinstance(tensor, torch.Tensor)}
    groups: Counter[str] = Counter()
    parameters = 0
    # isinstance would read __class__, which makes some libraries' objects warn.
    alive: list[Tensor] = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    alive.sort(key=lambda tensor: not isinstance(tensor, torch.nn.Parameter))  # before their views
    for tensor in alive:
        # Fake, meta and partly built tensors have no storage, and raise.
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
