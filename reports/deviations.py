"""Chart data: each cell's deviation from the reference against its tolerance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from harness.analysis.cell_result import CellResult
from reports.data import Bar, Bars, main_workload, rest, where
from reports.names import marks
from reports.text import deviation, finite, plural

MOST_DEVIATIONS = 20
AXIS = "relative deviation (no unit), log scale"
CHARTS = {
    "loss": "Loss: largest deviation of any step",
    "update": "Parameters: largest deviation of any tensor, relative to its update",
}


def deviation_bars(cells: Sequence[CellResult]) -> Iterator[Bars]:
    """Yields the largest deviations of verified cells with tolerances on a log axis, those nearest
    to their tolerance first."""
    for kind, title in CHARTS.items():
        judged = [
            (cell, finite(cell.column(f"parity_max_{kind}_deviation")), float(tolerance))
            for cell in cells
            if (tolerance := cell.column(f"parity_{kind}_tolerance")) is not None
        ]
        if judged:
            yield _bars(kind, title, judged, main_workload(cells))


Judged = tuple[CellResult, "float | None", float]
"""Cell, deviation (None: not finite) and tolerance."""


def _bars(kind: str, title: str, judged: list[Judged], main: str) -> Bars:
    judged.sort(key=_used, reverse=True)
    bars = []
    for cell, value, tolerance in judged[:MOST_DEVIATIONS]:
        failed = cell.parity.verdict == "diverged"
        text = "not finite" if value is None else deviation(value)
        label = where(cell, main)
        bars.append(Bar(label, value, text, marks=marks(cell), target=tolerance, failed=failed))
    outside = sum(bar.failed for bar in bars)
    summary = f"{title} of {plural(len(judged), 'cell')} against its tolerance; {outside} diverged"
    notes = rest(len(judged), MOST_DEVIATIONS)
    name = f"parity_max_{kind}_deviation"
    return Bars(name, title, AXIS, tuple(bars), summary, notes, True, "tolerance")


def _used(judged: Judged) -> tuple[bool, float]:
    """Sorts diverged cells first, then by used fraction of the tolerance."""
    cell, value, tolerance = judged
    share = float("inf") if value is None else value / tolerance
    return cell.parity.verdict == "diverged", share
