"""What a user's model has for parameters, and how it uses them on a few samples."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from harness.cell.durable import read_cached, write_cached
from harness.cell.training import EXACT
from harness.cell.yaml_text import parsed
from harness.workloads.workload import cache_file, losses_differ

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from harness.workloads.workload import Workload

NOT_SHARDED = {
    "is complex": (
        "shards tensors of real numbers; store its real and imaginary parts in a last dimension,"
        " and use torch.view_as_complex in forward"
    ),
    "has no dimension": "shards the first dimension; give it the shape (1,)",
    "has no element": "shards tensors with elements; leave it out",
    "is not contiguous": (
        "flattens contiguous parameters; leave out memory_format for the model, and keep it for the"
        " inputs"
    ),
    "has another dtype than most": (
        "shards parameters of one dtype; build the model in fp32, and let the cell's precision"
        " choose the arithmetic"
    ),
}
"""What sharding libraries do instead with a parameter of this property, and what would be right."""
TRIED_SAMPLES = 64
"""Number of samples whose losses may show that a parameter takes part in some of them."""


@dataclass(frozen=True)
class Used:
    """Fields of `Workload` that training shows."""

    unused: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    repeated: tuple[str, ...] = ()
    stateful: bool = False


def find_used(
    workload: Workload, loss: Callable[[nn.Module, list[int]], Tensor], *, in_fake_mode: bool
) -> Used:
    """Tries pairs of samples until each parameter got a gradient. Returns the defaults if the model
    cannot be trained, which `require_trainable` explains, or not in torch's fake mode."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    file = cache_file("used", workload, "4")
    if text := read_cached(file):
        return parsed(Used, text)
    try:
        with FakeTensorMode() if in_fake_mode else contextlib.nullcontext():
            used = _find(workload.build(0), loss)
        if not in_fake_mode:
            used = replace(used, stateful=_is_stateful(workload.build(0), loss))
    except Exception:  # whatever a user's code raises
        return Used()
    write_cached(file, json.dumps(asdict(used)))
    return used


def _find(model: nn.Module, loss: Callable[[nn.Module, list[int]], Tensor]) -> Used:
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    added, losses, repeated = Counter[str](), Counter[str](), set[str]()
    for name, parameter in trained.items():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: added.update([name]))
    pairs = 0
    for sample in range(0, TRIED_SAMPLES, 2):
        added.clear()
        loss(model, [sample, sample + 1]).backward()
        repeated |= {name for name in added if added[name] > 1}
        losses.update(added.keys())
        pairs += 1
        if len(losses) == len(trained):
            break
    return Used(
        tuple(name for name in trained if not losses[name]),
        tuple(name for name in trained if 0 < losses[name] < pairs),
        tuple(name for name in trained if name in repeated),
    )


def _is_stateful(model: nn.Module, loss: Callable[[nn.Module, list[int]], Tensor]) -> bool:
    """Returns whether forward changes what the next one computes: in a second call, or if other
    values are in the buffers that it writes, as converged ones may barely change."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    first, again = (loss(model, [0, 1]).item() for _ in range(2))
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point() and not buffer.equal(before[name]):
            buffer.uniform_(1, 2)
    return losses_differ(first, again, EXACT.loss) or losses_differ(
        again, loss(model, [0, 1]).item(), EXACT.loss
    )


def first_with(model: nn.Module) -> dict[str, str]:
    """Returns the name of the first parameter with each property that strategies may not support;
    empty if no parameter has it."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    kinds = [p.dtype for _, p in named]
    names_of = {
        "is complex": [name for name, p in named if p.is_complex()],
        "is in fp64": [name for name, p in named if str(p.dtype) == "torch.float64"],
        "has no dimension": [name for name, p in named if p.ndim == 0],
        "has no element": [name for name, p in named if p.numel() == 0],
        "is not contiguous": [name for name, p in named if not p.is_contiguous()],
        "has another dtype than most": [
            name for name, p in named if p.dtype != max(kinds, key=kinds.count)
        ],
        "sparse gradient": [
            f"{name}.weight"
            for name, module in model.named_modules()
            if getattr(module, "sparse", False) and hasattr(module, "weight")
        ],
    }
    return {what: next(iter(names), "") for what, names in names_of.items()}
