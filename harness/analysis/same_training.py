from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from harness.analysis.cell_result import WORST_VERDICT_FIRST, CellResult
from harness.analysis.setting import grouped, series, setting
from harness.spec.training import HALF_PRECISIONS, emulated, rounding_alone

_SIZES = ("workload", "data", "sequence_length", "global_batch", "micro_batches", "nodes", "links")
"""Fields in which an fp32 twin may differ, such as the model's size."""


def with_same_training(cells: Sequence[CellResult]) -> list[CellResult]:
    """Fills in `same_training` and `fp32_twin`. `cells` must include the fp32 twins."""
    judged = [cell for cell in cells if cell.parity.verdict is not None]
    twins = grouped((cell for cell in judged if cell.cell.precision == "fp32"), _key)
    return [_judged(cell, twins.get(_key(cell), ())) for cell in cells]


def _key(result: CellResult) -> tuple[object, ...]:
    cell = result.cell.model_copy(update={"micro_batches": 1})
    model, _, suffixes = cell.workload.partition("+")
    alike = (*series(cell), *setting(cell, (*_SIZES, "precision")))
    return (result.run_id, *alike, model.partition("-")[0], suffixes)


def _judged(cell: CellResult, twins: Iterable[CellResult]) -> CellResult:
    parity, precision, twin = cell.parity, cell.cell.precision, ""
    same = parity.verdict == "exact"
    if precision in HALF_PRECISIONS:
        twin = _verdict_of_nearest(cell, twins)
        same |= parity.verdict == "within tolerance" and rounding_alone(
            precision, parity.reason or ""
        )
        same &= twin in ("", "exact")
    same &= not emulated(parity.reason or "")
    parity = dataclasses.replace(parity, fp32_twin=twin, same_training=same)
    return dataclasses.replace(cell, parity=parity)


def _verdict_of_nearest(cell: CellResult, twins: Iterable[CellResult]) -> str:
    """Returns the worst parity of the twins closest in size; empty without twins."""
    by_nearness: dict[int, list[str]] = {}
    for twin in twins:
        shared = sum(getattr(cell.cell, name) == getattr(twin.cell, name) for name in _SIZES)
        by_nearness.setdefault(shared, []).append(twin.parity.verdict or "unknown")
    if not by_nearness:
        return ""
    return min(by_nearness[max(by_nearness)], key=WORST_VERDICT_FIRST.index)
