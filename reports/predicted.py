"""Charts of predicted figures over devices, and their data.

Widths and heights are in pixels of the page at 100 %.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from reports.figures import axis_of_devices, canvas, legend_below
from reports.svg import PAPER, SERIES, SOFT, WIDTH
from reports.text import shortened

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure

_MARKERS = "osD^vP"


@dataclass(frozen=True)
class PredictedLine:
    """A figure over numbers of devices: predictions with intervals, and measurements."""

    label: str
    devices: tuple[int, ...]
    values: tuple[float, ...]
    lows: tuple[float, ...]
    highs: tuple[float, ...]
    measured: tuple[tuple[int, float], ...] = ()
    """(devices, value)."""


@dataclass(frozen=True)
class Predicted:
    """A chart with at least one line."""

    name: str
    title: str
    unit: str
    lines: tuple[PredictedLine, ...]
    summary: str
    notes: tuple[str, ...] = ()
    within: int = 0
    """Most devices measured; 0: none, or unknown."""
    logarithmic: bool = True
    """Whether the value axis is logarithmic; otherwise it begins at 0."""


def predicted(data: Predicted) -> Figure:
    """Draws predictions as dashed lines with bands, measurements as dots."""
    lines = data.lines[: len(SERIES)]
    rows = 17 * (len(lines) + 1)
    figure, axes = canvas(300 + rows, 62, 14, 44 + rows, 22)
    axes.set_xscale("log", base=2)
    if data.logarithmic:
        axes.set_yscale("log")
    handles: list[Artist] = []
    for index, line in enumerate(lines):
        colour = SERIES[index]
        axes.fill_between(line.devices, line.lows, line.highs, color=colour, alpha=0.15, zorder=1)
        handles += axes.plot(
            line.devices,
            line.values,
            "--",
            color=colour,
            linewidth=1.8,
            marker=_MARKERS[index % len(_MARKERS)],
            markersize=5,
            markerfacecolor=PAPER,
            zorder=2,
        )
        if line.measured:
            axes.plot(
                [n for n, _ in line.measured],
                [value for _, value in line.measured],
                linestyle="none",
                marker=_MARKERS[index % len(_MARKERS)],
                markersize=8,
                color=colour,
                zorder=4,
            )
    if not data.logarithmic:
        axes.set_ylim(0)
    if data.within:
        axes.axvline(data.within, color=SOFT, linewidth=1.0, linestyle=":")
    counts = sorted({n for line in lines for n in line.devices})
    shown = counts if len(counts) <= 8 else counts[::2]
    axis_of_devices(axes, shown)
    axes.set_title(
        f"{data.unit}; dashed: predicted, bands: 80 % intervals",
        fontsize=11.5,
        color=SOFT,
        loc="left",
        x=-54 / (WIDTH - 76),
        pad=5,
    )
    labels = [shortened(line.label, 52) for line in lines]
    if any(line.measured for line in lines):
        handles += axes.plot([], [], "o", color=SOFT, markersize=8)
        labels.append("filled: measured")
    legend_below(figure, handles, labels)
    return figure
