"""Cautions about a cell's numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from harness.analysis.cell_result import CellResult
from harness.analysis.trials import CAUSES
from reports.names import DISTURBED
from reports.text import percent, plural

_FINDINGS = 3
"""Findings on a cell's GPUs shown in its row."""


@dataclass(frozen=True)
class Flag:
    word: str
    meaning: str


def flags(cell: CellResult) -> tuple[Flag, ...]:
    cautions = []
    if cell.placement.stand_in is not None:
        cautions.append(Flag("stand-in", cell.placement.stand_in))
    if cell.placement.oversubscribed and cell.speed.samples_per_second is not None:
        cautions.append(
            Flag("oversubscribed", "more ranks than cores: its times say nothing of real hardware")
        )
    if cell.disturbance.trials:
        how_often = f"{disturbance(cell)} of {plural(cell.trials, 'trial')}"
        cautions.append(Flag(f"{DISTURBED} disturbed", how_often + gpu_findings(cell)))
    if cell.speed.trend:
        change = f"steps still changed by {percent(cell.speed.trend)} over the timed ones"
        cautions.append(Flag("trend", f"warm-up was too short: {change}"))
    if cell.trials == 1 and cell.status == "ok":
        cautions.append(Flag("1 trial: no interval", ""))
    if cell.expected and cell.status == "diverged":
        cautions.append(Flag("expected to diverge", "the matrix says so: no failure"))
    return tuple(cautions)


def disturbance(cell: CellResult) -> str:
    """Describes what disturbed how many of the cell's trials; empty if nothing did."""
    return "; ".join(
        f"{CAUSES[cause]} {count}" for cause, count in cell.disturbance.by_cause.items()
    )


def gpu_findings(cell: CellResult) -> str:
    """Describes the first findings on the cell's GPUs; empty without any."""
    words = cell.disturbance.gpu_findings
    more = f", and {len(words) - _FINDINGS} more" if len(words) > _FINDINGS else ""
    return f" ({'; '.join(words[:_FINDINGS])}{more})" if words else ""


def disturbance_legend(cells: Iterable[CellResult]) -> str:
    """Returns the legend of the disturbance mark; empty if no cell has it."""
    seen = {cause for cell in cells for cause in cell.disturbance.by_cause}
    return "; or ".join(
        f"{words} some of its trials" for cause, words in CAUSES.items() if cause in seen
    )
