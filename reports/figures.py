"""Figure data -> matplotlib figures. Widths and heights are in pixels of the page at 100 %."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from reports.curves import COLOURED, Losses, Scaling
from reports.data import LABEL, Bar, Bars, Scatter
from reports.states import Ranks, Stacks
from reports.svg import BEST, GRID, INK, PAPER, REST, SERIES, SOFT, WARN
from reports.text import plain, shortened

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 360
_PIXEL = 1 / 72
_MARKERS = "osD^vP"


def canvas(height: float, left: float, right: float, bottom: float, top: float) -> tuple[Figure, Axes]:
    """A figure of WIDTH x height with one axes between these margins."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH * _PIXEL, height * _PIXEL), dpi=72)
    share = (left / WIDTH, bottom / height, (WIDTH - left - right) / WIDTH, (height - bottom - top) / height)
    axes = figure.add_axes(share)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def bars(data: Bars) -> Figure:
    """One line per cell: label above, bar (dot on a log axis) with its interval, the number at the right."""
    figure, axes = _lines(len(data.bars), data.axis, 42, 112)
    axes.spines["left"].set_visible(not data.logarithmic)
    low, high = _range(data)
    if data.logarithmic:
        axes.set_xscale("log")
        axes.minorticks_off()
    axes.set_xlim(low, high)
    axes.locator_params(axis="x", nbins=4) if not data.logarithmic else _decades(axes, low, high)
    if not data.logarithmic:
        axes.xaxis.set_major_formatter(lambda value, _: plain(value))
    for index, bar in enumerate(data.bars):
        _line(axes, index, bar, low, high, data.logarithmic)
    return figure


def _range(data: Bars) -> tuple[float, float]:
    ends = [v for b in data.bars for v in (b.value, b.high, b.target) if v is not None and v > 0]
    top = max(ends, default=1.0)
    if not data.logarithmic:
        return 0.0, top * 1.02
    smallest = min(ends, default=1e-8)
    return 10 ** (math.floor(math.log10(smallest)) - 1), 10 ** math.ceil(math.log10(top) + 0.3)


def _decades(axes: Axes, low: float, high: float) -> None:
    first, last = round(math.log10(low)), round(math.log10(high))
    step = max(1, math.ceil((last - first) / 5))
    powers = range(first + 1, last + 1, step)
    axes.set_xticks([10.0**p for p in powers], [f"1e{p}" for p in powers])


def _line(axes: Axes, index: int, bar: Bar, low: float, high: float, logarithmic: bool) -> None:
    colour = WARN if bar.failed else BEST if bar.strong or logarithmic else REST
    middle = index + 0.2
    _words(axes, index, bar.label, bar.text, WARN if bar.failed else INK)
    if logarithmic:
        shown = high if bar.value is None else max(bar.value, low * 1.5)
        axes.plot([low, shown], [middle, middle], color=GRID, linewidth=3, solid_capstyle="butt")
        marker = ">" if bar.value is None else "o"
        axes.plot([shown], [middle], marker, color=colour, markersize=7, clip_on=False, fillstyle="none" if bar.value == 0 else "full")
    elif bar.value is not None:
        hatch = "/////" if bar.marks else None
        _box(axes, 0.0, bar.value, middle, colour, hatch, 1)
    if bar.low is not None and bar.high is not None:
        axes.plot([bar.low, bar.high], [middle] * 2, "|-", color=INK, linewidth=1.3, markersize=6, markeredgewidth=1.3)
    if bar.target is not None:
        axes.plot([bar.target] * 2, [middle - 0.17, middle + 0.17], color=INK, linewidth=2, solid_capstyle="butt")


def _box(axes: Axes, start: float, length: float, middle: float, colour: str, hatch: str | None, edge: float) -> None:
    """A piece of a bar; an `Axes.barh` for each would take ten times as long."""
    from matplotlib.patches import Rectangle

    look = {"facecolor": PAPER if hatch else colour, "edgecolor": colour, "hatch": hatch, "linewidth": edge}
    axes.add_patch(Rectangle((start, middle - 0.15), length, 0.3, **look))  # type: ignore[arg-type]


def stacks(data: Stacks) -> Figure:
    """One line per cell: label above, the kinds one after the other, the formula's sum as a mark, the peak as a diamond."""
    figure, axes = _lines(len(data.stacks), data.axis, 42, 112)
    axes.set_xlim(0, data.limit)
    axes.locator_params(axis="x", nbins=4)
    axes.xaxis.set_major_formatter(lambda value, _: plain(value))
    for index, stack in enumerate(data.stacks):
        middle, start = index + 0.2, 0.0
        _words(axes, index, stack.label, stack.text, WARN if stack.off else INK)
        for kind, part in enumerate(stack.parts):
            shown = min(part, data.limit - start)
            if shown > 0:
                hatch = "/////" if stack.hatched else None
                _box(axes, start, shown, middle, SERIES[kind], hatch, 0.5)
            start += max(shown, 0.0)
        if stack.total > data.limit:
            axes.plot([data.limit], [middle], ">", color=INK, markersize=7, clip_on=False, zorder=4)
        if stack.formula is not None and stack.formula <= data.limit:
            axes.plot([stack.formula] * 2, [middle - 0.2, middle + 0.2], color=INK, linewidth=2, solid_capstyle="butt", zorder=3)
        if stack.peak is not None:
            inside = stack.peak <= data.limit
            axes.plot(
                [min(stack.peak, data.limit)],
                [middle],
                "D" if inside else ">",
                color=INK,
                markersize=5.5 if inside else 7,
                markerfacecolor=PAPER,
                zorder=4,
                clip_on=False,
            )
    return figure


def ranks(data: Ranks) -> Figure:
    """One line per cell: label above, a dot per rank, joined from the smallest to the largest; 100 % is the mean."""
    figure, axes = _lines(len(data.lines), data.axis, 42, 112)
    shares = [share for _, one, _ in data.lines for share in one]
    axes.set_xlim(*_around([90.0, 110.0, *shares]))
    axes.locator_params(axis="x", nbins=4)
    axes.xaxis.set_major_formatter(lambda value, _: plain(value))
    axes.spines["left"].set_visible(False)
    for index, (label, one, text) in enumerate(data.lines):
        middle = index + 0.2
        _words(axes, index, label, text, INK)
        axes.plot([min(one), max(one)], [middle, middle], color=REST, linewidth=3, solid_capstyle="butt")
        axes.plot([100, 100], [middle - 0.17, middle + 0.17], color=INK, linewidth=1.3, solid_capstyle="butt")
        axes.plot(one, [middle] * len(one), "o", color=BEST, markersize=6.5, markerfacecolor=PAPER, linestyle="none")
    return figure


def _lines(count: int, axis: str, bottom: float, right: float) -> tuple[Figure, Axes]:
    """A figure of `count` lines of 34 pixels, first on top."""
    figure, axes = canvas(count * 34 + bottom + 4, 8, right, bottom, 4)
    axes.set_ylim(count - 0.5, -0.5)
    axes.set_yticks([])
    axes.grid(axis="x")
    axes.set_xlabel(axis, loc="left")
    return figure, axes


def _words(axes: Axes, index: int, label: str, text: str, colour: str) -> None:
    """The label above a line and the number at its right."""
    axes.text(0, index - 0.22, shortened(label, LABEL), transform=axes.get_yaxis_transform(), va="center", color=INK)
    axes.text(1.03, index + 0.2, text, transform=axes.get_yaxis_transform(), va="center", color=colour)


def scatter(data: Scatter) -> Figure:
    """Memory (x) against throughput (y) with intervals; the front is a numbered step line."""
    figure, axes = canvas(310, 58, 14, 44, 16)
    front = data.front
    for colour, points in ((REST, [p for p in data.points if not p.place]), (BEST, front)):
        upright = [(p.memory, v) for p in points if p.low is not None and p.high is not None for v in (p.low, p.high, math.nan)]
        level = [(v, p.throughput) for p in points for v in (p.memory_low, p.memory, math.nan)]
        for ends in (upright, level):  # all of them as one broken line: thousands of lines would make the page large
            axes.plot([x for x, _ in ends], [y for _, y in ends], color=colour, linewidth=1.2, zorder=2)
        for face, some in ((PAPER, [p for p in points if p.marks]), (colour, [p for p in points if not p.marks])):
            places = [p.memory for p in some], [p.throughput for p in some]
            size, order = (15, 4) if colour == BEST else (7, 3)
            axes.plot(*places, "o", markersize=size, color=colour, markerfacecolor=face, linestyle="none", zorder=order)
    for point in front:
        ink = BEST if point.marks else PAPER
        axes.text(point.memory, point.throughput, str(point.place), ha="center", va="center_baseline", color=ink, fontsize=10, zorder=5)
    if len(front) > 1:
        axes.step([p.memory for p in front][::-1], [p.throughput for p in front][::-1], where="post", color=BEST, linewidth=1.2, zorder=1)
    axes.set_xlim(*_around([v for p in data.points for v in (p.memory_low, p.memory)]))
    axes.set_ylim(*_around([v for p in data.points for v in (p.low, p.throughput, p.high) if v is not None]))
    axes.grid()
    axes.locator_params(nbins=5)
    axes.yaxis.set_major_formatter(lambda value, _: plain(value))
    axes.set_xlabel("peak memory of the fullest device (MiB)", loc="left")
    axes.set_title(f"throughput ({data.unit}); better is up and left", fontsize=11.5, color=SOFT, loc="left", x=-50 / (WIDTH - 72), pad=5)
    return figure


def _around(values: list[float]) -> tuple[float, float]:
    """Limits with a margin; of equal values, a tenth around them."""
    low, high = min(values), max(values)
    margin = (high - low) * 0.1 or high * 0.1 or 1.0
    return low - margin, high + margin


def scaling(data: Scaling) -> Figure:
    """Throughput over devices, the ideal dashed; the fastest coloured, the others grey."""
    coloured = data.lines[:COLOURED]
    legend = 17 * (len(coloured) + 1 + (len(data.lines) > COLOURED))
    figure, axes = canvas(290 + legend, 58, 14, 44 + legend, 22)
    counts = [n for n, _ in data.ideal]
    handles: list[Artist] = []
    for index, line in reversed(list(enumerate(data.lines))):
        known = index < COLOURED
        colour = SERIES[index] if known else REST
        (drawn,) = axes.plot(line.devices, line.values, color=colour, linewidth=2.0 if known else 1.0, zorder=3 if known else 2)
        drawn.set(marker=_MARKERS[index] if known else ".", markersize=6, markerfacecolor=PAPER if line.marked else colour)
        handles.insert(0, drawn)
        for n, low, high in zip(line.devices, line.lows, line.highs, strict=True):
            if low is not None and high is not None:
                axes.plot([n, n], [low, high], color=colour, linewidth=1.4, zorder=3)
    labels = [shortened(line.label, 52) for line in coloured]
    if len(data.lines) > COLOURED:
        labels.append(f"{len(data.lines) - COLOURED} more, in the table of efficiency")
    labels.append("ideal: the fastest on the fewest devices, times devices")
    handles = [*handles[: len(labels) - 1], *axes.plot(counts, [v for _, v in data.ideal], "--", color=INK, linewidth=1.3)]
    if counts[-1] / counts[0] > 4:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
    else:
        axes.set_ylim(0)
    axes.minorticks_off()
    axes.set_xticks(counts, [str(n) for n in counts])
    axes.yaxis.set_major_formatter(lambda value, _: plain(value))
    axes.grid()
    axes.set_xlabel("number of devices", loc="left")
    axes.set_title(f"throughput ({data.unit})", fontsize=11.5, color=SOFT, loc="left", x=-50 / (WIDTH - 72), pad=5)
    _legend(figure, handles, labels)
    return figure


def _legend(figure: Figure, handles: list[Artist], labels: list[str]) -> None:
    figure.legend(
        handles, labels, loc="lower left", bbox_to_anchor=(0, 0), frameon=False, handlelength=1.8, borderaxespad=0.2, labelspacing=0.35
    )


def losses(data: Losses) -> Figure:
    """The reference as a broad band, every cell as a thin line on it, diverged ones dashed and named."""
    legend = 17 * (2 + len(data.diverged[:3]))
    figure, axes = canvas(250 + legend, 50, 14, 44 + legend, 22)
    axes.plot(range(len(data.reference)), data.reference, color=REST, alpha=0.6, linewidth=9, solid_capstyle="round", label="reference")
    for index, curve in enumerate(data.kept):
        label = f"{len(data.kept)} cells that agree with it" if index == 0 else None
        axes.plot(range(len(curve)), curve, color=BEST, linewidth=1, label=label)
    for index, (label, curve) in enumerate(data.diverged):
        name = f"diverged: {shortened(label, 44)}" if index < 3 else None
        axes.plot(range(len(curve)), curve, "--", marker=_MARKERS[index % 6], markersize=4, color=WARN, linewidth=1.3, label=name)
    spread = [*data.reference, *(v for curve in data.kept for v in curve)]
    low, high = min(spread), max(spread)
    margin = (high - low or 1.0) * 0.35
    axes.set_ylim(low - margin, high + margin)
    axes.set_xlim(-0.3, max(1, len(data.reference) - 1) + 0.3)
    axes.locator_params(axis="x", integer=True)
    axes.grid()
    axes.set_xlabel("step (number)", loc="left")
    axes.set_title("mean loss of the step (nats)", fontsize=11.5, color=SOFT, loc="left", x=-42 / (WIDTH - 64), pad=5)
    handles, labels = axes.get_legend_handles_labels()
    _legend(figure, list(handles), labels)
    return figure
