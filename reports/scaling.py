"""Chart data of throughput over devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.analysis.cell_result import CellResult
from harness.analysis.setting import SCALED, batch, series, setting
from reports.data import notes_for
from reports.names import marks, named, unit
from reports.text import number, plural

COLOURED = 6


@dataclass(frozen=True)
class ScalingLine:
    label: str
    devices: tuple[int, ...]
    values: tuple[float, ...]
    lows: tuple[float | None, ...]
    highs: tuple[float | None, ...]
    marked: bool


@dataclass(frozen=True)
class Scaling:
    """Throughput over devices; the ideal is linear from the fastest on the fewest devices."""

    name: str
    title: str
    unit: str
    lines: tuple[ScalingLine, ...]
    ideal: tuple[tuple[int, float], ...]
    summary: str
    notes: tuple[str, ...]


Curve = list[CellResult]
"""A strategy's cells in one setting, by number of devices."""


def scaling(cells: Sequence[CellResult], regime: str) -> list[Scaling]:
    """Returns a figure per workload, precision and batch that ran on two or more numbers of
    devices."""
    curves: dict[tuple[object, ...], dict[int, CellResult]] = {}
    # If cells have the same number of devices, the one on the fewest nodes is drawn.
    for cell in sorted(cells, key=lambda cell: cell.cell.nodes):
        fits = (
            cell.cell.regime == regime or cell.cell.devices == 1
        )  # Regimes coincide on one device.
        if cell.ranked and fits and not cell.cell.links:
            key = (*setting(cell.cell, SCALED), *series(cell.cell), batch(cell.cell, regime))
            curves.setdefault(key, {}).setdefault(cell.cell.devices, cell)
    figures: dict[tuple[object, ...], list[Curve]] = {}
    for by_devices in curves.values():
        curve = [by_devices[devices] for devices in sorted(by_devices)]
        if len(curve) > 1:
            shared = (*setting(curve[0].cell, SCALED), batch(curve[0].cell, regime))
            figures.setdefault(shared, []).append(curve)
    largest_first = sorted(figures.values(), key=lambda curves: -len(curves))
    return [_scaling(f"{regime}-{i}", regime, curves) for i, curves in enumerate(largest_first)]


def _scaling(name: str, regime: str, curves: Sequence[Curve]) -> Scaling:
    flat = [cell for curve in curves for cell in curve]
    tokens = all(cell.speed.tokens_per_second is not None for cell in flat)
    column = "tokens_per_second" if tokens else "samples_per_second"
    lines = [_line(curve, column) for curve in curves]
    lines.sort(key=lambda line: (-line.devices[-1], -line.values[-1]))
    start = min(line.devices[0] for line in lines)
    base = max(line.values[0] for line in lines if line.devices[0] == start)
    counts = sorted({n for line in lines for n in line.devices})
    title = _title(flat[0], regime)
    words = "; ".join(
        f"{line.label} {number(line.values[0])} to {number(line.values[-1])} {unit(column)}"
        for line in lines[:6]
    )
    return Scaling(
        name,
        title,
        unit(column),
        tuple(lines),
        tuple((n, base * n / start) for n in counts),
        f"{title}, {plural(len(lines), 'line')} over {counts[0]} to {counts[-1]} devices: {words}",
        notes_for(flat),
    )


def _line(curve: Curve, column: str) -> ScalingLine:
    rates = [rate for cell in curve if (rate := cell.throughput(column))]
    # A curve may go from one node to several; all its cells are of the figure's regime.
    last = curve[-1].varied(nodes=1, regime="strong")
    return ScalingLine(
        named(last),
        tuple(cell.cell.devices for cell in curve),
        tuple(rate.value for rate in rates),
        tuple(rate.low for rate in rates),
        tuple(rate.high for rate in rates),
        any(marks(cell) for cell in curve),
    )


def _title(cell: CellResult, regime: str) -> str:
    size = batch(cell.cell, regime)
    held = f"batch {size} in all" if regime == "strong" else f"batch {size} per device"
    words = [f"{regime.capitalize()} scaling", cell.cell.workload, cell.cell.precision, held]
    if cell.cell.optimizer != "adamw":
        words.append(cell.cell.optimizer)
    return " · ".join(words)
