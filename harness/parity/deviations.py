"""Deviation of trained parameters from the reference run's."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.strategy.job import TrainState

if TYPE_CHECKING:
    from torch import Tensor

    from harness.workloads import Workload
from harness.parity.reference import Reference, digest

_WRAPPERS = ("_fsdp_wrapped_module.", "_orig_mod.", "_checkpoint_wrapped_module.")


def plain_name(name: str) -> str:
    """Strips wrapper prefixes from a parameter's name."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removeprefix("module.")


def full_parameters(train_state: TrainState) -> Iterator[tuple[str, Tensor]]:
    """Yields this rank's parameters by plain name, unsharded and in the workload's layout.

    Gathers shards (DTensor) with a collective, so all ranks must iterate together. A pipeline stage
    yields only its parameters.
    """
    named: Iterator[tuple[str, Any]] = (
        train_state.gather() if train_state.gather else train_state.model.named_parameters()
    )
    for name, parameter in named:
        tensor: Any = parameter.detach()
        if hasattr(tensor, "full_tensor"):
            whole: Tensor = tensor.full_tensor()
            tensor = whole
        plain = plain_name(name)
        restore = train_state.restore.get(plain)
        yield plain, restore(tensor) if restore else tensor


def update_deviations(
    train_state: TrainState, workload: Workload, reference: Reference
) -> dict[str, float]:
    """Returns |parameter - reference| / |reference's update| by tensor of this rank.

    Directions with an analytically zero gradient are exempt: AdamW turns their rounding noise into
    full-size steps.
    """
    from safetensors import safe_open

    facts = reference.facts
    norms: dict[str, float] = facts["update_norms"]
    frozen: dict[str, str] = facts.get("frozen", {})
    tied = workload.split.tied if workload.split else {}
    deviations: dict[str, float] = {}
    with safe_open(Path(reference.folder) / "final.safetensors", framework="pt") as final:
        for name, tensor in full_parameters(train_state):
            known = name if name in norms else tied.get(name, name)
            if known in frozen:
                deviations[name] = 0.0 if digest(tensor) == frozen[known] else math.inf
                continue
            if known not in norms:
                deviations[name] = math.inf
                continue
            expected = final.get_tensor(known).to(tensor.device)
            if expected.shape != tensor.shape:
                deviations[name] = math.inf
                continue
            gap = workload.without_zero_gradient(
                known, tensor.float()
            ) - workload.without_zero_gradient(known, expected.float())
            distance = float(gap.norm())
            deviations[name] = (
                0.0 if distance == 0.0 else (distance / norms[known] if norms[known] else math.inf)
            )
    return deviations
