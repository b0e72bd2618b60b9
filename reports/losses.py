"""Chart data of losses in the parity check."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from harness.analysis.cell_result import CellResult
from reports.text import number, plural


@dataclass(frozen=True)
class Losses:
    """Loss per step of the parity segment, of the reference and the cells compared with it."""

    name: str
    title: str
    reference: tuple[float, ...]
    kept: tuple[tuple[float, ...], ...]
    diverged: tuple[tuple[str, tuple[float, ...]], ...]
    summary: str


def losses(cells: Sequence[CellResult]) -> list[Losses]:
    """Returns a figure per reference, the one with most cells first. Curves end at the first loss
    that is not finite."""
    by_reference: dict[tuple[float, ...], list[CellResult]] = {}
    for cell in cells:
        if cell.parity.reference_losses:
            reference = tuple(math.nan if x is None else x for x in cell.parity.reference_losses)
            by_reference.setdefault(reference, []).append(cell)
    most_first = sorted(by_reference.items(), key=lambda item: -len(item[1]))
    return [_losses(f"loss-{place}", *item) for place, item in enumerate(most_first)]


def _losses(name: str, reference: tuple[float, ...], cells: Sequence[CellResult]) -> Losses:
    away = [
        (f"{cell.cell.label} {cell.cell.precision}", _curve(cell, len(reference)))
        for cell in cells
        if cell.parity.verdict == "diverged"
    ]
    kept = [_curve(cell, len(reference)) for cell in cells if cell.parity.verdict != "diverged"]
    first = cells[0]
    title = f"{first.cell.workload} · batch {first.cell.global_batch} · {first.cell.optimizer}"
    summary = (
        f"Loss over {plural(len(reference), 'step')}, {title}: the reference goes from"
        f" {number(reference[0])} to {number(reference[-1])}; {plural(len(kept), 'cell')} agree"
        f" with it, {len(away)} diverged"
    )
    return Losses(name, title, reference, tuple(kept), tuple(away), summary)


def _curve(cell: CellResult, steps: int) -> tuple[float, ...]:
    values: list[float] = []
    for value in cell.parity.losses[:steps]:
        if value is None or not math.isfinite(value):
            break
        values.append(value)
    return tuple(values)
