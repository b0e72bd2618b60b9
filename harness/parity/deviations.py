from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields


@dataclass(frozen=True)
class Deviations:
    """Deviations by tensor; infinite if a tensor cannot be compared."""

    updates: Mapping[str, float] = field(default_factory=dict)
    """|parameters - reference| / |reference's update|."""
    elements: Mapping[str, float] = field(default_factory=dict)
    """Largest |parameter - reference| of an element over the update's root mean square."""
    decays: Mapping[str, float] = field(default_factory=dict)
    """Error along the weights over the norm of the update: wrong weight decay has this direction,
    rounding has none. In half precision, without the part expected by chance."""
    directions: Mapping[str, float] = field(default_factory=dict)
    """Error along the weights in half precision, in standard deviations of an error without
    direction; 0 below `LEAST_DECAY` of the decay."""
    buffers: Mapping[str, float] = field(default_factory=dict)
    """|buffer - reference| / |reference's change|."""
    moments: Mapping[str, float] = field(default_factory=dict)
    """Norm of (optimizer state - reference) over the norm of the reference's."""
    coarse: Mapping[str, float] = field(default_factory=dict)
    """Share of an optimizer state's numbers that fit in 16 bits, beyond the reference's share."""

    def merged(self, other: Deviations) -> Deviations:
        return Deviations(
            **{f.name: _larger(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)}
        )

    @property
    def finite(self) -> bool:
        return all(
            math.isfinite(value) for f in fields(self) for value in getattr(self, f.name).values()
        )


def all_ranks(ranks: Iterable[Deviations]) -> Deviations:
    merged = Deviations()
    for of_rank in ranks:
        merged = merged.merged(of_rank)
    return merged


def largest(deviations: Iterable[float]) -> float | None:
    return max((v for v in deviations if math.isfinite(v)), default=None)


def _larger(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
    values = {name: (a.get(name, 0.0), b.get(name, 0.0)) for name in (*a, *b)}
    return {n: max(v) if all(map(math.isfinite, v)) else math.inf for n, v in values.items()}
