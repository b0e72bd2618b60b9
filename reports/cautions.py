"""What a reader must know before trusting a cell's numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from harness.analysis.cell_result import CellResult
from harness.analysis.disturbance import CAUSES
from reports.names import DISTURBED
from reports.text import percent, plural

_FINDINGS = 3
"""Findings on a cell's GPUs that its row shows."""


@dataclass(frozen=True)
class Flag:
    """A caution about a cell: a word and what it means for this cell."""

    word: str
    meaning: str


def flags(cell: CellResult) -> tuple[Flag, ...]:
    """All cautions that a reader of this cell must know."""
    cautions = []
    if cell.stand_in is not None:
        cautions.append(Flag("stand-in", cell.stand_in))
    if cell.oversubscribed and cell.samples_per_second is not None:
        cautions.append(
            Flag("oversubscribed", "more ranks than cores: its times say nothing of real hardware")
        )
    if cell.disturbed:
        how_often = f"{disturbance(cell)} of {plural(cell.trials, 'trial')}"
        cautions.append(Flag(f"{DISTURBED} disturbed", how_often + gpu_findings(cell)))
    if cell.trend:
        change = f"steps still changed by {percent(cell.trend)} over the timed ones"
        cautions.append(Flag("trend", f"warm-up was too short: {change}"))
    if cell.trials == 1 and cell.status == "ok":
        cautions.append(Flag("1 trial: no interval", ""))
    if cell.expected and cell.status == "diverged":
        cautions.append(Flag("expected to diverge", "the matrix says so: no failure"))
    return tuple(cautions)


def disturbance(cell: CellResult) -> str:
    """What disturbed how many of its trials, in words; empty where nothing did."""
    return "; ".join(f"{CAUSES[cause]} {count}" for cause, count in cell.disturbed_by.items())


def gpu_findings(cell: CellResult) -> str:
    """What was found on its GPUs: the first few, in words; empty where nothing was."""
    words = cell.gpu_findings
    more = f", and {len(words) - _FINDINGS} more" if len(words) > _FINDINGS else ""
    return f" ({'; '.join(words[:_FINDINGS])}{more})" if words else ""


def disturbance_legend(cells: Iterable[CellResult]) -> str:
    """What the mark means on a page with these cells; empty where none has it."""
    seen = {cause for cell in cells for cause in cell.disturbed_by}
    return "; or ".join(
        f"{words} some of its trials" for cause, words in CAUSES.items() if cause in seen
    )
