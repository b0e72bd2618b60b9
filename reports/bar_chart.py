"""Charts with a bar per cell."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from reports.charts import BEST, GRID, INK, PAPER, REST, SERIES, WARN, WIDTH, canvas
from reports.text import plain, shortened_apart

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Item = TypeVar("Item")
MOST_ROWS = 60
LABEL = 52
"""Number of characters that fit a chart's width."""
_LINE = 34
_MIDDLE = 0.2
_HALF = 0.15


@dataclass(frozen=True)
class Bar:
    """A bar and its label, in the chart's unit."""

    label: str
    value: float | None
    text: str
    low: float | None = None
    high: float | None = None
    strong: bool = False
    marks: str = ""
    target: float | None = None
    """Theoretical value or tolerance."""
    failed: bool = False
    parts: tuple[float, ...] = ()
    peak: float | None = None
    dots: tuple[float, ...] = ()
    """Values drawn instead of a bar."""


@dataclass(frozen=True)
class Bars:
    name: str
    title: str
    axis: str
    bars: tuple[Bar, ...]
    summary: str
    notes: tuple[str, ...] = ()
    logarithmic: bool = False
    """Whether values are dots on a logarithmic axis."""
    kinds: tuple[str, ...] = ()
    limit: float | None = None
    """End of the axis; longer bars are cut."""

    def draw(self) -> Figure:
        count = len(self.bars)
        right = min(WIDTH / 2, 16 + max(map(_pixels, (bar.text for bar in self.bars)), default=0))
        figure, axes = canvas(count * _LINE + 46, 8, right, 42, 4)
        low, high = self._range()
        axes.set_ylim(count - 0.5, -0.5)
        axes.yaxis.set_visible(False)
        axes.grid(axis="x")
        axes.set_xlabel(self.axis, loc="left")
        axes.spines["left"].set_visible(low == 0 and not self.logarithmic)
        if self.logarithmic:
            axes.set_xscale("log")
            axes.minorticks_off()
            axes.set_xticks(*_decades(low, high))
        else:
            axes.locator_params(axis="x", nbins=4)
            axes.xaxis.set_major_formatter(lambda value, _: plain(round(value, 12)))
        axes.set_xlim(low, high)
        lines = _Lines()
        labels = shortened_apart([bar.label for bar in self.bars], LABEL)
        for index, (bar, label) in enumerate(zip(self.bars, labels, strict=True)):
            _annotate(axes, index, bar, label)
            self._add(lines, index + _MIDDLE, bar, low, high)
        lines.draw(axes)
        return figure

    def _range(self) -> tuple[float, float]:
        if any(bar.dots for bar in self.bars):
            return around([90.0, 110.0, *(dot for bar in self.bars for dot in bar.dots)])
        if self.limit is not None:
            return 0.0, self.limit
        every = (v for b in self.bars for v in (b.value, b.high, b.target))
        ends = [value for value in every if value is not None and value > 0]
        top = max(ends, default=1.0)
        if not self.logarithmic:
            return 0.0, top * 1.02
        smallest = min(ends, default=1e-8)
        return 10 ** (math.floor(math.log10(smallest)) - 1), 10 ** math.ceil(math.log10(top) + 0.3)

    def _add(self, lines: _Lines, y: float, bar: Bar, low: float, high: float) -> None:
        colour = WARN if bar.failed else BEST if bar.strong or self.logarithmic else REST
        if bar.dots:
            lines.level(y, min(bar.dots), max(bar.dots), REST)
            lines.upright(y, 100.0, 0.17, 1.3)
            for dot in bar.dots:
                lines.mark(y, dot, "o", BEST, hollow=True)
        elif self.kinds:
            lines.stack(y, bar, high)
        elif self.logarithmic:
            end = high if bar.value is None else max(bar.value, low * 1.5)
            lines.level(y, low, end, GRID)
            lines.mark(y, end, ">" if bar.value is None else "o", colour, hollow=bar.value == 0)
        elif bar.value is not None:
            lines.box(y, 0.0, bar.value, colour, bool(bar.marks))
        if bar.low is not None and bar.high is not None:
            lines.interval(y, bar.low, bar.high)
        if bar.target is not None and bar.target <= high:
            lines.upright(y, bar.target, 0.2 if self.kinds else 0.17)


class _Lines:
    """Gathers shapes of all bars in few collections, which draw faster."""

    def __init__(self) -> None:
        self._boxes: dict[tuple[str, bool], list[list[tuple[float, float]]]] = {}
        self._segments: dict[tuple[str, float], list[list[tuple[float, float]]]] = {}
        self._marks: dict[tuple[str, str, bool], list[tuple[float, float]]] = {}

    def box(self, y: float, start: float, end: float, colour: str, hatched: bool) -> None:
        corners = [(start, y - _HALF), (end, y - _HALF), (end, y + _HALF), (start, y + _HALF)]
        self._boxes.setdefault((colour, hatched), []).append(corners)

    def level(self, y: float, start: float, end: float, colour: str) -> None:
        self._segments.setdefault((colour, 3.0), []).append([(start, y), (end, y)])

    def interval(self, y: float, low: float, high: float) -> None:
        ends = [[(x, y - 0.09), (x, y + 0.09)] for x in (low, high)]
        self._segments.setdefault((INK, 1.3), []).extend([[(low, y), (high, y)], *ends])

    def upright(self, y: float, x: float, half: float, width: float = 2.0) -> None:
        self._segments.setdefault((INK, width), []).append([(x, y - half), (x, y + half)])

    def mark(self, y: float, x: float, shape: str, colour: str, hollow: bool = False) -> None:
        self._marks.setdefault((shape, colour, hollow), []).append((x, y))

    def stack(self, y: float, bar: Bar, limit: float) -> None:
        start = 0.0
        for kind, part in enumerate(bar.parts):
            end = min(start + part, limit)
            if end > start:
                self.box(y, start, end, SERIES[kind], bool(bar.marks))
            start += part
        if start > limit:
            self.mark(y, limit, ">", INK)
        if bar.peak is not None:
            inside = bar.peak <= limit
            self.mark(y, min(bar.peak, limit), "D" if inside else ">", INK, hollow=True)

    def draw(self, axes: Axes) -> None:
        from matplotlib.collections import LineCollection, PolyCollection

        for (colour, hatched), corners in self._boxes.items():
            drawn = PolyCollection(
                corners,
                edgecolor=colour,
                facecolor=PAPER if hatched else colour,
                hatch="/////" if hatched else None,
                linewidth=1.0 if hatched else 0.5,
            )
            axes.add_collection(drawn, autolim=False)
        for (colour, width), lines in self._segments.items():
            axes.add_collection(
                LineCollection(lines, colors=colour, linewidths=width, zorder=3), autolim=False
            )
        for (shape, colour, hollow), places in self._marks.items():
            axes.plot(
                *zip(*places, strict=True),
                shape,
                color=colour,
                markersize=5.5 if shape == "D" else 6.5,
                markerfacecolor=PAPER if hollow else colour,
                clip_on=False,
                zorder=4,
            )


def _pixels(text: str) -> float:
    return sum(4.0 if character in " .,()" else 7.6 for character in text)


def _annotate(axes: Axes, index: int, bar: Bar, label: str) -> None:
    at = axes.get_yaxis_transform()
    colour = WARN if bar.failed else INK
    axes.text(0, index - 0.22, label, color=INK, transform=at, va="center")
    axes.annotate(
        bar.text,
        (1, index + _MIDDLE),
        (8, 0),
        xycoords=at,
        textcoords="offset pixels",
        color=colour,
        va="center",
    )


def _decades(low: float, high: float) -> tuple[Sequence[float], Sequence[str]]:
    first, last = round(math.log10(low)), round(math.log10(high))
    powers = range(first + 1, last + 1, max(1, math.ceil((last - first) / 5)))
    return [10.0**power for power in powers], [f"1e{power}" for power in powers]


def around(values: Sequence[float]) -> tuple[float, float]:
    """Returns limits with a margin. Equal values get 10% on either side."""
    low, high = min(values), max(values)
    margin = (high - low) * 0.1 or high * 0.1 or 1.0
    return low - margin, high + margin


def bars_of(
    name: str,
    title: str,
    axis: str,
    items: Sequence[Item],
    bar: Callable[[Item], Bar],
    summary: str,
    notes: Sequence[str] = (),
    most: int = MOST_ROWS,
    **more: Any,
) -> Bars:
    """Charts the first `most` items. The summary goes on with the first bars, the notes with how
    many are left out. `more`: other fields of `Bars`."""
    bars = tuple(map(bar, items[:most]))
    notes = (*notes, *omitted(len(items), most))
    return Bars(name, title, axis, bars, f"{summary}: {first_few(bars, 5)}", notes, **more)


def with_headings(bar: Callable[[Item], Bar]) -> Callable[[Item | str], Bar]:
    """Makes bars of items, and lines without a bar of texts."""
    return lambda item: Bar(item, None, "") if isinstance(item, str) else bar(item)


def first_few(bars: Sequence[Bar], most: int, unit: str = "") -> str:
    return "; ".join(f"{bar.label} {bar.text}{unit}" for bar in bars[:most] if bar.text)


def omitted(total: int, most: int = MOST_ROWS) -> tuple[str, ...]:
    return (f"the first {most} of {total}; all are in the table",) if total > most else ()
