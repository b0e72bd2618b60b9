"""Derives interval widths from errors on unseen runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize

from harness.planner.cluster.calibration import Widening
from harness.planner.fitting import LEVEL, Bools, Floats, Ints

ONE_MODEL, ONE_NODE_COUNT = Widening(0.01, 0.009), Widening(0.08, 0.019)
"""Widening, as in calibration.yaml, if no model, or no number of nodes, can be left out."""

Errors = Callable[[Bools, Bools], "tuple[Floats, Floats] | None"]
"""Fits to the first rows; returns absolute log errors of time and memory in the second, or None if
too few."""


@dataclass(frozen=True)
class TransferWidths:
    """Half-widths of log 80 % intervals; see ClusterSpread."""

    time: float
    time_per_doubling: float
    memory: float
    nodes: Widening
    shape: Widening


@dataclass(frozen=True)
class _Left:
    """Rows left out of a fit (each of shape [rows])."""

    time: Floats
    memory: Floats
    nodes: Floats
    """Doublings from one node."""
    distance: Floats
    """Doublings beyond what the fit has seen."""


def transfer_widths(sizes: Floats, nodes: Ints, inside: Errors) -> TransferWidths:
    """Returns half-widths that cover LEVEL of the rows left out.

    Each number of nodes is predicted from all others. Widenings are errors beyond those of a fit
    to all rows: of larger numbers predicted from each smaller range, and of models (`sizes` in
    parameters) predicted from others. `inside` must return errors if nothing is left out.
    """
    everything = np.ones(len(nodes), bool)
    counts, models = np.unique(nodes), np.unique(sizes)
    seen = _joined(sizes, nodes, inside, [(everything, everything)])
    assert seen is not None
    each = [(nodes != count, nodes == count) for count in counts] if len(counts) > 1 else []
    left = _joined(sizes, nodes, inside, each) or seen
    time, slope = _line(left.time, left.nodes)
    memory = float(np.nanquantile(left.memory, LEVEL))
    usual, rise = _line(seen.time, seen.nodes)
    usual_memory = float(np.nanquantile(seen.memory, LEVEL))
    larger = [(nodes <= count, nodes > count) for count in counts[:-1]]
    others = [(sizes != size, sizes == size) for size in models] if len(models) > 1 else []

    def wider(splits: list[tuple[Bools, Bools]], default: Widening) -> Widening:
        parts = [_joined(sizes, nodes, inside, [split]) for split in splits]
        used = [part for part in parts if part is not None and part.distance.any()]
        if not used:
            return default
        # Each range counts the same, however many rows are beyond it.
        times = [_growth(p.time - usual - rise * p.nodes, p.distance) for p in used]
        of_memory = [_growth(p.memory - usual_memory, p.distance) for p in used]
        return Widening(float(np.mean(times)), float(np.mean(of_memory)))

    return TransferWidths(
        time, slope, memory, wider(larger, ONE_NODE_COUNT), wider(others, ONE_MODEL)
    )


def _joined(
    sizes: Floats, nodes: Ints, inside: Errors, splits: list[tuple[Bools, Bools]]
) -> _Left | None:
    parts = list(_left_out(sizes, nodes, inside, splits))
    if not parts:
        return None
    return _Left(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _left_out(
    sizes: Floats, nodes: Ints, inside: Errors, splits: list[tuple[Bools, Bools]]
) -> Iterator[tuple[Floats, Floats, Floats, Floats]]:
    for seen, left in splits:
        errors = inside(seen, left)
        if errors is None:
            continue
        few, many = sizes[seen].min(), sizes[seen].max()
        size = np.maximum(np.log2(few / sizes[left]), np.log2(sizes[left] / many))
        more = np.log2(nodes[left] / nodes[seen].max())
        distance = np.maximum(0.0, size) + np.maximum(0.0, more)
        yield *errors, np.log2(nodes[left]), distance


def _line(errors: Floats, doublings: Floats) -> tuple[float, float]:
    """Returns the half-width at one node and its increase per doubling of the nodes.

    Minimises the pinball loss at LEVEL (Koenker and Bassett, 1978).
    """
    finite = np.isfinite(errors)

    def loss(x: Floats) -> float:
        over = errors[finite] - (abs(x[0]) + abs(x[1]) * doublings[finite])
        return float(np.mean(np.maximum(LEVEL * over, (LEVEL - 1) * over)))

    start = np.array([float(np.nanquantile(errors, LEVEL)), 0.01])
    base, slope = np.abs(minimize(loss, start, method="Nelder-Mead").x)
    return float(base), float(slope)


def _growth(excess: Floats, distance: Floats) -> float:
    """Returns the smallest slope whose line over `distance` covers LEVEL of the errors.

    `excess` is an error minus the width without distance.
    """
    used = np.isfinite(excess) & (distance > 0)
    rates, weights = excess[used] / distance[used], distance[used]
    order = np.argsort(rates)
    share = np.cumsum(weights[order]) / weights.sum()
    return max(0.0, float(rates[order][np.searchsorted(share, LEVEL)]))
