from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from harness.parity.verdict import ParityVerdict
from harness.spec.training import Tolerance
from harness.strategy.job import TrainState
from harness.strategy.whole_state import full_parameters

TIMES_UPDATE = 10.0
"""Multiple of the update limit by which ranks may differ."""

AT_ONCE = 2**18
"""Elements summed at a time, to limit memory."""


def sketches(train_state: TrainState) -> dict[str, float]:
    """Returns each parameter's sum with fixed random signs; call on all ranks.

    Two tensors' sums differ by about the norm of their difference.
    """
    import torch

    found = {}
    for name, tensor in full_parameters(train_state):
        generator = torch.Generator(tensor.device).manual_seed(0)
        found[name] = 0.0
        for part in tensor.detach().flatten().split(AT_ONCE):
            draws = torch.rand(part.shape, generator=generator, device=part.device)
            found[name] += float(part.double().dot(draws.sub_(0.5).sign().double()))
    return found


def with_replicas(
    verdict: ParityVerdict,
    ranks: Sequence[Mapping[str, float]],
    update_norms: Mapping[str, float],
    allowed: Tolerance,
    may_differ: bool = False,
) -> ParityVerdict:
    """Adds the largest difference between ranks, relative to the reference's update, to a verdict.

    `ranks`: each rank's sketches. `allowed`: limits of the updates; ranks that differ by more than
    `TIMES_UPDATE` times a tensor's have diverged, unless they `may_differ` by design.
    """
    by_name: dict[str, list[float]] = {}
    for of_rank in ranks:
        for name, value in of_rank.items():
            by_name.setdefault(name, []).append(value)
    spread = {
        name: _spread(values) / update_norms[name]
        for name, values in by_name.items()
        if len(values) > 1 and update_norms.get(name)
    }
    if not spread:
        return verdict
    limits = {
        name: TIMES_UPDATE * max(allowed.update, allowed.tensors.get(name, 0.0)) for name in spread
    }
    largest = max(spread.values())
    verdict = replace(verdict, max_replica_deviation=largest if math.isfinite(largest) else None)
    worst = max(spread, key=lambda name: spread[name] / limits[name])
    differ = spread[worst] > limits[worst] and not may_differ
    if verdict.verdict == "diverged" or not differ:
        return verdict
    reason = f"after the last step, ranks differ in {worst} by {spread[worst]:.1e} of its update"
    return replace(verdict, verdict="diverged", reason=f"{reason} (allowed {limits[worst]:.0e})")


def _spread(values: Sequence[float]) -> float:
    return max(values) - min(values) if all(map(math.isfinite, values)) else math.inf
