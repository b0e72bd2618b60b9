"""Chart of a cell's figure over runs, and its data."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reports.figures import canvas
from reports.svg import BEST, INK, PAPER, REST, SOFT, WARN, WIDTH
from reports.text import MIB, number, plain, plural, signed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from harness.analysis.history import Series

MARGIN = 58


@dataclass(frozen=True)
class Trend:
    """Values in `unit`, oldest run first; `levels`: (first, last, median) between changes."""

    name: str
    title: str
    unit: str
    values: tuple[float, ...]
    lows: tuple[float | None, ...]
    highs: tuple[float | None, ...]
    dates: tuple[str, ...]
    changes: tuple[tuple[int, str], ...]
    """(run index where a new level begins, description)."""
    levels: tuple[tuple[int, int, float], ...]
    summary: str


def unit(series: Series) -> tuple[str, float]:
    """Returns the displayed unit, and the divisor of recorded values."""
    return ("samples/s", 1.0) if series.figure == "throughput" else ("MiB", float(MIB))


def change_words(series: Series, change: float) -> str:
    """Returns `▼ 10.0 % slower`."""
    words = ("more", "less") if series.figure == "memory" else ("faster", "slower")
    return f"{'▲' if change > 0 else '▼'} {signed(abs(change)).lstrip('+')} {words[change < 0]}"


def trend(series: Series, name: str) -> Trend:
    shown, factor = unit(series)
    values = tuple(point.value.value / factor for point in series.points)
    marked = [
        (i, change_words(series, point.change))
        for i, point in enumerate(series.points)
        if point.change is not None
    ]
    cuts = [0, *(i for i, _ in marked), len(values)]
    levels = tuple((a, b - 1, statistics.median(values[a:b])) for a, b in itertools.pairwise(cuts))
    changes = (
        "; ".join(f"{words} from {series.points[i].started_at:%Y-%m-%d} on" for i, words in marked)
        or "no change seen"
    )
    newest = f"newest {number(values[-1])} {shown}"
    return Trend(
        name,
        series.cell_name,
        shown,
        values,
        tuple(
            None if point.value.low is None else point.value.low / factor for point in series.points
        ),
        tuple(
            None if point.value.high is None else point.value.high / factor
            for point in series.points
        ),
        tuple(f"{point.started_at:%Y-%m-%d}" for point in series.points),
        tuple(marked),
        levels,
        f"{series.figure.capitalize()} of {series.cell_name} over {plural(len(values), 'run')}:"
        f" {newest}; {changes}",
    )


def draw(data: Trend) -> Figure:
    """Draws a dot with interval per run, the level of each stretch, and a dashed line at each
    change."""
    figure, axes = canvas(170, MARGIN, 14, 34, 34)
    places = range(len(data.values))
    for begin, end, level in data.levels:
        axes.plot(
            [begin - 0.4, end + 0.4],
            [level] * 2,
            color=REST,
            linewidth=4,
            solid_capstyle="butt",
            zorder=1,
        )
    for place, low, high in zip(places, data.lows, data.highs, strict=True):
        if low is not None and high is not None:
            axes.plot([place] * 2, [low, high], color=BEST, linewidth=1.2, zorder=2)
    axes.plot(
        places,
        data.values,
        "o",
        color=BEST,
        markersize=5 if len(places) < 40 else 2.5,
        markerfacecolor=PAPER,
        zorder=3,
    )
    for place, words in data.changes:
        axes.axvline(place - 0.5, color=WARN, linewidth=1.3, linestyle="--", zorder=2)
        right = place > len(places) * 0.6
        axes.annotate(
            words,
            (place - 0.5, 1.0),
            (-4 if right else 4, 3),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha="right" if right else "left",
            color=WARN,
        )
    # Two trials may give an interval wider than a useful chart; the dots set the scale.
    low, high = min(data.values), max(data.values)
    margin = max((high - low) * 0.35, abs(high) * 0.05) or 1.0
    axes.set_ylim(low - margin, high + margin)
    axes.set_xlim(-0.7, len(places) - 0.3)
    ticks = sorted({0, len(places) - 1})
    axes.set_xticks(ticks, [data.dates[i] for i in ticks])
    first, *last = axes.get_xticklabels()
    first.set_horizontalalignment("left")
    for label in last:
        label.set_horizontalalignment("right")
    axes.locator_params(axis="y", nbins=4)
    axes.yaxis.set_major_formatter(lambda value, _: plain(round(value, 6)))
    axes.grid(axis="y")
    axes.tick_params(axis="x", colors=INK)
    axes.set_title(
        data.unit, fontsize=11.5, color=SOFT, loc="left", x=-50 / (WIDTH - MARGIN - 14), pad=16
    )
    return figure
