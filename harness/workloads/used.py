"""How a user's model uses its parameters, found by training it on a few samples."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING
from unittest import mock

from harness.cell.durable import read_cached, write_cached
from harness.cell.yaml_text import parsed
from harness.workloads.workload import cache_file

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from harness.workloads.workload import Workload

TRIED_SAMPLES = 64
"""Number of samples whose losses may show that a parameter takes part in some of them."""


@dataclass(frozen=True)
class Used:
    """Fields of `Workload` that training shows."""

    unused: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    reentrant: bool = False


def find_used(
    workload: Workload, loss: Callable[[nn.Module, list[int]], Tensor], *, in_fake_mode: bool
) -> Used:
    """Tries pairs of samples until each parameter got a gradient. Returns the defaults if the model
    cannot be trained, which `require_trainable` explains, or not in torch's fake mode."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    file = cache_file("used", workload, "1")
    if text := read_cached(file):
        return parsed(Used, text)
    try:
        with FakeTensorMode() if in_fake_mode else contextlib.nullcontext():
            used = _find(workload.build(0), loss)
    except Exception:  # whatever a user's code raises
        return Used()
    write_cached(file, json.dumps(asdict(used)))
    return used


def _find(model: nn.Module, loss: Callable[[nn.Module, list[int]], Tensor]) -> Used:
    from torch.utils import checkpoint

    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    losses: Counter[str] = Counter()
    pairs = 0
    apply = checkpoint.CheckpointFunction.apply
    with mock.patch.object(checkpoint.CheckpointFunction, "apply", side_effect=apply) as calls:
        for sample in range(0, TRIED_SAMPLES, 2):
            model.zero_grad(set_to_none=True)
            loss(model, [sample, sample + 1]).backward()
            losses.update(n for n, p in model.named_parameters() if p.grad is not None)
            pairs += 1
            if len(losses) == len(trained):
                break
    return Used(
        tuple(name for name in trained if not losses[name]),
        tuple(name for name in trained if 0 < losses[name] < pairs),
        calls.called,
    )
