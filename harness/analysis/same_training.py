"""Which cells train the same as one process, exactly or within rounding."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from harness.analysis.cell_result import CellResult
from harness.analysis.setting import SERIES, SETTING
from harness.spec.training import HALF_PRECISIONS, rounding_alone

_SIZES = ("workload", "data", "sequence_length", "global_batch", "micro_batches", "nodes", "links")
"""Fields in which an fp32 twin may differ: on GPUs it is a smaller model of the family."""
_TWIN = ("run_id", *(name for name in (*SERIES, *SETTING) if name not in (*_SIZES, "precision")))


def with_same_training(cells: Sequence[CellResult]) -> list[CellResult]:
    """Returns the same cells, in order, with `same_training` and `fp32_twin` filled in.

    `cells`: all of one or several runs, twins included.
    """
    twins: dict[tuple[object, ...], list[CellResult]] = {}
    for cell in cells:
        if cell.precision == "fp32" and cell.parity_verdict is not None:
            twins.setdefault(_key(cell), []).append(cell)
    return [_judged(cell, twins.get(_key(cell), ())) for cell in cells]


def _key(cell: CellResult) -> tuple[object, ...]:
    """Returns what a cell shares with its fp32 twins."""
    model, _, suffixes = cell.workload.partition("+")
    return (*(getattr(cell, name) for name in _TWIN), model.partition("-")[0], suffixes)


def _judged(cell: CellResult, twins: Iterable[CellResult]) -> CellResult:
    if cell.precision not in HALF_PRECISIONS:
        return dataclasses.replace(cell, same_training=cell.parity_verdict == "exact")
    verdict = _verdict_of_nearest(cell, twins)
    within = cell.parity_verdict == "exact" or (
        cell.parity_verdict == "within tolerance"
        and rounding_alone(cell.precision, cell.parity_reason or "")
    )
    return dataclasses.replace(
        cell, fp32_twin=verdict, same_training=within and verdict in ("", "exact")
    )


def _verdict_of_nearest(cell: CellResult, twins: Iterable[CellResult]) -> str:
    """Returns the parity of the twins that share most sizes, preferring an inexact one; empty
    without twins."""
    by_nearness: dict[int, list[str]] = {}
    for twin in twins:
        shared = sum(getattr(cell, name) == getattr(twin, name) for name in _SIZES)
        by_nearness.setdefault(shared, []).append(twin.parity_verdict or "")
    nearest = by_nearness[max(by_nearness)] if by_nearness else [""]
    return next((verdict for verdict in nearest if verdict != "exact"), nearest[0])
