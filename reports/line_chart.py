"""Charts of curves and points. Widths and heights are in pixels of the page at 100%."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reports.bar_chart import around
from reports.charts import BEST, GRID, INK, PAPER, REST, SERIES, SOFT, WARN, WIDTH, canvas
from reports.text import bits, number, plain, shortened, shortened_apart

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURED = 6
"""Number of coloured curves in a scaling chart."""
_MARKERS = "osD^vP"
_LABEL = 56
_LEGEND_LINE = 17
_LEFT, _RIGHT, _BOTTOM = 58, 14, 44


@dataclass(frozen=True)
class Line:
    """Values with intervals, over devices or bits per second."""

    label: str
    x: tuple[float, ...]
    values: tuple[float, ...]
    lows: tuple[float | None, ...]
    highs: tuple[float | None, ...]
    marked: bool = False
    """Whether the value comes from a stand-in or from more ranks than cores."""

    @property
    def summary(self) -> str:
        return f"{self.label} {number(self.values[0])} to {number(self.values[-1])}"


@dataclass(frozen=True)
class Scaling:
    """Throughput over devices; the ideal is linear from the fastest on the fewest devices."""

    name: str
    title: str
    unit: str
    lines: tuple[Line, ...]
    ideal: tuple[tuple[float, float], ...]
    summary: str
    notes: tuple[str, ...]

    def draw(self) -> Figure:
        coloured, more = self.lines[:COLOURED], len(self.lines) - COLOURED
        legend = _LEGEND_LINE * (len(coloured) + 1 + (more > 0))
        figure, axes = canvas(290 + legend, _LEFT, _RIGHT, _BOTTOM + legend, 22)
        handles: list[Artist] = []
        for index, line in reversed(list(enumerate(self.lines))):
            named = index < COLOURED
            colour = SERIES[index] if named else REST
            (drawn,) = axes.plot(line.x, line.values, color=colour, zorder=3 if named else 2)
            drawn.set(
                linewidth=2.0 if named else 1.0,
                marker=_MARKERS[index] if named else ".",
                markersize=6,
                markerfacecolor=PAPER if line.marked else colour,
            )
            handles.insert(0, drawn)
            _intervals(axes, line, colour)
        labels = [line.label for line in coloured]
        labels += [f"{more} more, in the table of efficiency"] if more > 0 else []
        counts, values = zip(*self.ideal, strict=True)
        handles = handles[: len(labels)]
        handles += axes.plot(counts, values, "--", color=INK, linewidth=1.3)
        labels.append("ideal: the fastest on the fewest devices, times devices")
        if counts[-1] / counts[0] > 4:
            axes.set_xscale("log", base=2)
            axes.set_yscale("log", base=2)
        else:
            axes.set_ylim(0)
        _axis_of_devices(axes, counts)
        _title(axes, f"throughput ({self.unit})")
        _legend(figure, handles, labels)
        return figure


@dataclass(frozen=True)
class Bandwidths:
    """Throughput over bandwidth; `links`: (measured bits per second, request)."""

    name: str
    title: str
    unit: str
    lines: tuple[Line, ...]
    links: tuple[tuple[float, str], ...]
    summary: str
    notes: tuple[str, ...]

    def draw(self) -> Figure:
        from matplotlib.ticker import LogLocator

        legend = _LEGEND_LINE * len(self.lines)
        figure, axes = canvas(310 + legend, _LEFT, _RIGHT, _BOTTOM + legend, 38)
        axes.set_xscale("log")
        axes.set_yscale("log")
        handles: list[Artist] = []
        for index, line in enumerate(self.lines):
            colour, dashes = SERIES[index % 7], ("-", "--", ":")[index // 7 % 3]
            handles += axes.plot(
                line.x,
                line.values,
                dashes,
                color=colour,
                linewidth=1.8,
                marker=_MARKERS[index % len(_MARKERS)],
                markersize=5.5,
                zorder=3,
            )
            _intervals(axes, line, colour)
        values = [value for line in self.lines for value in line.values]
        axes.set_xlim(self.links[0][0] / 1.4, self.links[-1][0] * 1.4)
        axes.set_ylim(min(values) / 1.5, max(values) * 1.5)
        axes.xaxis.set_major_locator(LogLocator(numticks=12))
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=12))
        axes.xaxis.set_major_formatter(lambda value, _: bits(value))
        axes.yaxis.set_major_formatter(lambda value, _: plain(value))
        axes.minorticks_off()
        self._requests(axes)
        axes.grid(axis="y")
        axes.set_xlabel("measured bandwidth of the emulated link", loc="left")
        _title(axes, f"throughput ({self.unit}); on top: the requested link", pad=20)
        _legend(figure, handles, [line.label for line in self.lines])
        return figure

    def _requests(self, axes: Axes) -> None:
        followed = [*(position for position, _ in self.links[1:]), math.inf]
        width = math.log(self.links[-1][0] / self.links[0][0] * 1.4**2)
        for (position, request), after in zip(self.links, followed, strict=True):
            close = math.log(after / position) < 0.18 * width  # The two labels would overlap.
            axes.axvline(position, color=GRID, linewidth=0.8, linestyle=":", zorder=1)
            axes.text(
                position,
                1.02,
                request,
                transform=axes.get_xaxis_transform(),
                ha="right" if close else "center",
                color=SOFT,
                fontsize=10,
            )


@dataclass(frozen=True)
class Losses:
    """Loss per step of the parity segment: the reference and cells compared with it."""

    name: str
    title: str
    reference: tuple[float, ...]
    curves: tuple[tuple[float, ...], ...]
    diverged: tuple[tuple[str, tuple[float, ...]], ...]
    summary: str
    notes: tuple[str, ...] = ()

    def draw(self) -> Figure:
        legend = _LEGEND_LINE * (2 + len(self.diverged[:3]))
        figure, axes = canvas(250 + legend, 50, _RIGHT, _BOTTOM + legend, 22)
        steps = range(len(self.reference))
        (band,) = axes.plot(steps, self.reference, color=REST, label="reference")
        band.set(alpha=0.6, linewidth=9, solid_capstyle="round")
        single = len(self.curves) == 1
        agree = (
            f"{len(self.curves)} cells that agree with it" if not single else "the cell that agrees"
        )
        for index, curve in enumerate(self.curves):
            name = None if index else agree
            axes.plot(range(len(curve)), curve, color=BEST, linewidth=1, label=name)
        for index, (label, curve) in enumerate(self.diverged):
            axes.plot(
                range(len(curve)),
                curve,
                "--",
                marker=_MARKERS[index % len(_MARKERS)],
                markersize=4,
                color=WARN,
                linewidth=1.3,
                label=f"diverged: {shortened(label, 44)}" if index < 3 else None,
            )
        spread = [*self.reference, *(v for curve in self.curves for v in curve)]
        low, high = min(spread), max(spread)
        margin = (high - low or 1.0) * 0.35
        axes.set_ylim(low - margin, high + margin)
        axes.set_xlim(-0.3, max(1, len(self.reference) - 1) + 0.3)
        axes.locator_params(axis="x", integer=True)
        axes.grid()
        axes.set_xlabel("step (number)", loc="left")
        _title(axes, "mean loss of the step (nats)", 50)
        handles, labels = axes.get_legend_handles_labels()
        _legend(figure, list(handles), labels)
        return figure


@dataclass(frozen=True)
class Trend:
    """Values in `unit`, oldest run first. `levels`: (first, last, median) between changes."""

    name: str
    title: str
    unit: str
    values: tuple[float, ...]
    lows: tuple[float | None, ...]
    highs: tuple[float | None, ...]
    dates: tuple[str, ...]
    changes: tuple[tuple[int, str], ...]
    levels: tuple[tuple[int, int, float], ...]
    summary: str
    notes: tuple[str, ...] = ()

    def draw(self) -> Figure:
        figure, axes = canvas(170, _LEFT, _RIGHT, 34, 34)
        count = len(self.values)
        for begin, end, level in self.levels:
            ends = [begin - 0.4, end + 0.4]
            axes.plot(ends, [level] * 2, color=REST, linewidth=4, solid_capstyle="butt", zorder=1)
        runs = tuple(range(count))
        _intervals(axes, Line("", runs, self.values, self.lows, self.highs), BEST)
        size = 5 if count < 40 else 2.5
        axes.plot(runs, self.values, "o", color=BEST, markersize=size, markerfacecolor=PAPER)
        for position, change in self.changes:
            axes.axvline(position - 0.5, color=WARN, linewidth=1.3, linestyle="--", zorder=2)
            right = position > count * 0.6
            axes.annotate(
                change,
                (position - 0.5, 1.0),
                (-4 if right else 4, 3),
                xycoords=("data", "axes fraction"),
                textcoords="offset points",
                ha="right" if right else "left",
                color=WARN,
            )
        # The interval of two trials may be wider than a useful chart, so the dots set the scale.
        low, high = min(self.values), max(self.values)
        margin = max((high - low) * 0.35, abs(high) * 0.05) or 1.0
        axes.set_ylim(low - margin, high + margin)
        axes.set_xlim(-0.7, count - 0.3)
        ticks = sorted({0, count - 1})
        axes.set_xticks(ticks, [self.dates[i] for i in ticks])
        first, *last = axes.get_xticklabels()
        first.set_horizontalalignment("left")
        for label in last:
            label.set_horizontalalignment("right")
        axes.locator_params(axis="y", nbins=4)
        axes.yaxis.set_major_formatter(lambda value, _: plain(round(value, 6)))
        axes.grid(axis="y")
        axes.tick_params(axis="x", colors=INK)
        _title(axes, self.unit, pad=16)
        return figure


@dataclass(frozen=True)
class Point:
    """A cell's memory and throughput; `place` on the Pareto front, fastest first."""

    label: str
    memory: float
    memory_low: float
    throughput: float
    low: float | None
    high: float | None
    marks: str
    place: int | None


@dataclass(frozen=True)
class Scatter:
    name: str
    title: str
    unit: str
    memory_unit: str
    points: tuple[Point, ...]
    summary: str
    notes: tuple[str, ...] = ()

    @property
    def front(self) -> list[Point]:
        return sorted((p for p in self.points if p.place is not None), key=lambda p: p.place or 0)

    def draw(self) -> Figure:
        figure, axes = canvas(310, _LEFT, _RIGHT, _BOTTOM, 16)
        front = self.front
        _points(axes, [point for point in self.points if not point.place], REST, 7)
        _points(axes, front, BEST, 15)
        for point in front:
            axes.text(
                point.memory,
                point.throughput,
                str(point.place),
                ha="center",
                va="center_baseline",
                color=BEST if point.marks else PAPER,
                fontsize=10,
                zorder=5,
            )
        if len(front) > 1:
            x, y = zip(*((p.memory, p.throughput) for p in reversed(front)), strict=True)
            axes.step(x, y, where="post", color=BEST, linewidth=1.2, zorder=1)
        speeds = [v for p in self.points for v in (p.low, p.throughput, p.high) if v is not None]
        axes.set_xlim(*around([v for p in self.points for v in (p.memory_low, p.memory)]))
        axes.set_ylim(*around(speeds))
        axes.grid()
        axes.locator_params(nbins=5)
        axes.yaxis.set_major_formatter(lambda value, _: plain(value))
        axes.set_xlabel(f"peak memory of the fullest device ({self.memory_unit})", loc="left")
        _title(axes, f"throughput ({self.unit}); better is up and left")
        return figure


def _points(axes: Axes, points: Sequence[Point], colour: str, size: float) -> None:
    upright = [
        (p.memory, v) for p in points if None not in (p.low, p.high) for v in (p.low, p.high, None)
    ]
    level = [(v, p.throughput) for p in points for v in (p.memory_low, p.memory, math.nan)]
    # A single broken line, because thousands of lines would make the page large.
    for ends in (upright, level):
        x, y = [x for x, _ in ends], [math.nan if y is None else y for _, y in ends]
        axes.plot(x, y, color=colour, linewidth=1.2, zorder=2)
    for marked in (True, False):
        some = [p for p in points if bool(p.marks) == marked]
        places = [p.memory for p in some], [p.throughput for p in some]
        face, order = PAPER if marked else colour, 4 if colour == BEST else 3
        axes.plot(*places, "o", markersize=size, color=colour, markerfacecolor=face, zorder=order)


def _intervals(axes: Axes, line: Line, colour: str) -> None:
    for x, low, high in zip(line.x, line.lows, line.highs, strict=True):
        if low is not None and high is not None:
            if axes.get_yscale() == "log":
                low = max(low, high * 1e-3)
            axes.plot([x, x], [low, high], color=colour, linewidth=1.3, zorder=2)


def _title(axes: Axes, text: str, left: float = _LEFT, pad: float = 5) -> None:
    x = (8 - left) / (WIDTH - left - _RIGHT)
    axes.set_title(text, fontsize=11.5, color=SOFT, loc="left", x=x, pad=pad)


def _axis_of_devices(axes: Axes, counts: Iterable[float]) -> None:
    ticks = list(counts)
    axes.minorticks_off()
    axes.set_xticks(ticks, [plain(n) for n in ticks])
    axes.yaxis.set_major_formatter(lambda value, _: plain(value))
    axes.grid()
    axes.set_xlabel("number of devices", loc="left")


def _legend(figure: Figure, handles: Sequence[Artist], labels: Sequence[str]) -> None:
    figure.legend(
        handles,
        shortened_apart(labels, _LABEL),
        loc="lower left",
        bbox_to_anchor=(0, 0),
        frameon=False,
        handlelength=1.8,
        borderaxespad=0.2,
        labelspacing=0.35,
    )
