"""Matplotlib figures of data without a line per cell (for those, see lines.py).

Widths and heights are in pixels of the page at 100 %.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from reports.front import Scatter
from reports.lines import around
from reports.link_facts import bits
from reports.links import Bandwidths
from reports.losses import Losses
from reports.scaling import COLOURED, Scaling
from reports.svg import BEST, GRID, INK, PAPER, REST, SERIES, SOFT, WARN, WIDTH
from reports.text import plain, shortened

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PIXEL = 1 / 72
_MARKERS = "osD^vP"


def canvas(
    height: float, left: float, right: float, bottom: float, top: float
) -> tuple[Figure, Axes]:
    """Returns a figure of WIDTH x height with one axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH * _PIXEL, height * _PIXEL), dpi=72)
    share = (
        left / WIDTH,
        bottom / height,
        (WIDTH - left - right) / WIDTH,
        (height - bottom - top) / height,
    )
    axes = figure.add_axes(share)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def scatter(data: Scatter) -> Figure:
    """Draws memory (x) against throughput (y) with intervals; the front is a numbered step line."""
    figure, axes = canvas(310, 58, 14, 44, 16)
    front = data.front
    for colour, points in ((REST, [p for p in data.points if not p.place]), (BEST, front)):
        upright = [
            (p.memory, v)
            for p in points
            if p.low is not None and p.high is not None
            for v in (p.low, p.high, math.nan)
        ]
        level = [(v, p.throughput) for p in points for v in (p.memory_low, p.memory, math.nan)]
        for ends in (
            upright,
            level,
        ):  # One broken line, because thousands of lines would make the page large.
            axes.plot(
                [x for x, _ in ends], [y for _, y in ends], color=colour, linewidth=1.2, zorder=2
            )
        for face, some in (
            (PAPER, [p for p in points if p.marks]),
            (colour, [p for p in points if not p.marks]),
        ):
            places = [p.memory for p in some], [p.throughput for p in some]
            size, order = (15, 4) if colour == BEST else (7, 3)
            axes.plot(
                *places,
                "o",
                markersize=size,
                color=colour,
                markerfacecolor=face,
                linestyle="none",
                zorder=order,
            )
    for point in front:
        ink = BEST if point.marks else PAPER
        axes.text(
            point.memory,
            point.throughput,
            str(point.place),
            ha="center",
            va="center_baseline",
            color=ink,
            fontsize=10,
            zorder=5,
        )
    if len(front) > 1:
        axes.step(
            [p.memory for p in front][::-1],
            [p.throughput for p in front][::-1],
            where="post",
            color=BEST,
            linewidth=1.2,
            zorder=1,
        )
    axes.set_xlim(*around([v for p in data.points for v in (p.memory_low, p.memory)]))
    axes.set_ylim(
        *around([v for p in data.points for v in (p.low, p.throughput, p.high) if v is not None])
    )
    axes.grid()
    axes.locator_params(nbins=5)
    axes.yaxis.set_major_formatter(lambda value, _: plain(value))
    axes.set_xlabel("peak memory of the fullest device (MiB)", loc="left")
    axes.set_title(
        f"throughput ({data.unit}); better is up and left",
        fontsize=11.5,
        color=SOFT,
        loc="left",
        x=-50 / (WIDTH - 72),
        pad=5,
    )
    return figure


def scaling(data: Scaling) -> Figure:
    """Draws throughput over devices: ideal dashed, fastest coloured, others grey."""
    coloured = data.lines[:COLOURED]
    legend = 17 * (len(coloured) + 1 + (len(data.lines) > COLOURED))
    figure, axes = canvas(290 + legend, 58, 14, 44 + legend, 22)
    counts = [n for n, _ in data.ideal]
    handles: list[Artist] = []
    for index, line in reversed(list(enumerate(data.lines))):
        known = index < COLOURED
        colour = SERIES[index] if known else REST
        (drawn,) = axes.plot(
            line.devices,
            line.values,
            color=colour,
            linewidth=2.0 if known else 1.0,
            zorder=3 if known else 2,
        )
        drawn.set(
            marker=_MARKERS[index] if known else ".",
            markersize=6,
            markerfacecolor=PAPER if line.marked else colour,
        )
        handles.insert(0, drawn)
        for n, low, high in zip(line.devices, line.lows, line.highs, strict=True):
            if low is not None and high is not None:
                axes.plot([n, n], [low, high], color=colour, linewidth=1.4, zorder=3)
    labels = [shortened(line.label, 52) for line in coloured]
    if len(data.lines) > COLOURED:
        labels.append(f"{len(data.lines) - COLOURED} more, in the table of efficiency")
    labels.append("ideal: the fastest on the fewest devices, times devices")
    handles = [
        *handles[: len(labels) - 1],
        *axes.plot(counts, [v for _, v in data.ideal], "--", color=INK, linewidth=1.3),
    ]
    if counts[-1] / counts[0] > 4:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
    else:
        axes.set_ylim(0)
    axis_of_devices(axes, counts)
    axes.set_title(
        f"throughput ({data.unit})",
        fontsize=11.5,
        color=SOFT,
        loc="left",
        x=-50 / (WIDTH - 72),
        pad=5,
    )
    legend_below(figure, handles, labels)
    return figure


def axis_of_devices(axes: Axes, counts: Sequence[int]) -> None:
    axes.minorticks_off()
    axes.set_xticks(counts, [str(n) for n in counts])
    axes.yaxis.set_major_formatter(lambda value, _: plain(value))
    axes.grid()
    axes.set_xlabel("number of devices", loc="left")


def legend_below(figure: Figure, handles: list[Artist], labels: list[str]) -> None:
    figure.legend(
        handles,
        labels,
        loc="lower left",
        bbox_to_anchor=(0, 0),
        frameon=False,
        handlelength=1.8,
        borderaxespad=0.2,
        labelspacing=0.35,
    )


def links(data: Bandwidths) -> Figure:
    """Draws throughput over measured bandwidth on log axes, requested links on top."""
    from matplotlib.ticker import LogLocator

    legend = 17 * len(data.lines)
    figure, axes = canvas(310 + legend, 58, 14, 44 + legend, 38)
    axes.set_xscale("log")
    axes.set_yscale("log")
    handles: list[Artist] = []
    for index, line in enumerate(data.lines):
        colour, dashes = SERIES[index % len(SERIES)], ("-", "--", ":")[index // len(SERIES) % 3]
        (drawn,) = axes.plot(
            line.bits_per_second, line.values, dashes, color=colour, linewidth=1.8, zorder=3
        )
        drawn.set(marker=_MARKERS[index % len(_MARKERS)], markersize=5.5)
        handles.append(drawn)
        for x, low, high in zip(line.bits_per_second, line.lows, line.highs, strict=True):
            if low is not None and high is not None:
                axes.plot(
                    [x, x], [max(low, high * 1e-3), high], color=colour, linewidth=1.3, zorder=2
                )
    values = [value for line in data.lines for value in line.values]
    axes.set_xlim(data.links[0][0] / 1.4, data.links[-1][0] * 1.4)
    axes.set_ylim(min(values) / 1.5, max(values) * 1.5)
    axes.xaxis.set_major_locator(LogLocator(numticks=12))
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=12))
    axes.xaxis.set_major_formatter(lambda value, _: bits(value))
    axes.yaxis.set_major_formatter(lambda value, _: plain(value))
    axes.minorticks_off()
    followed = [*(place for place, _ in data.links[1:]), math.inf]
    width = math.log(data.links[-1][0] / data.links[0][0] * 1.4**2)
    for (place, asked), after in zip(data.links, followed, strict=True):
        close = math.log(after / place) < 0.18 * width  # The two labels would overlap.
        axes.axvline(place, color=GRID, linewidth=0.8, linestyle=":", zorder=1)
        axes.text(
            place,
            1.02,
            asked,
            transform=axes.get_xaxis_transform(),
            ha="right" if close else "center",
            color=SOFT,
            fontsize=10,
        )
    axes.grid(axis="y")
    axes.set_xlabel("measured bandwidth of the emulated link", loc="left")
    axes.set_title(
        f"throughput ({data.unit}); on top: the link asked for",
        fontsize=11.5,
        color=SOFT,
        loc="left",
        x=-50 / (WIDTH - 72),
        pad=20,
    )
    legend_below(figure, handles, [shortened(line.label, 52) for line in data.lines])
    return figure


def losses(data: Losses) -> Figure:
    """Draws the reference as a broad band and cells as thin lines; diverged ones dashed and
    named."""
    legend = 17 * (2 + len(data.diverged[:3]))
    figure, axes = canvas(250 + legend, 50, 14, 44 + legend, 22)
    axes.plot(
        range(len(data.reference)),
        data.reference,
        color=REST,
        alpha=0.6,
        linewidth=9,
        solid_capstyle="round",
        label="reference",
    )
    agree = (
        f"{len(data.kept)} cells that agree with it"
        if len(data.kept) > 1
        else "the cell that agrees with it"
    )
    for index, curve in enumerate(data.kept):
        axes.plot(range(len(curve)), curve, color=BEST, linewidth=1, label=None if index else agree)
    for index, (label, curve) in enumerate(data.diverged):
        name = f"diverged: {shortened(label, 44)}" if index < 3 else None
        axes.plot(
            range(len(curve)),
            curve,
            "--",
            marker=_MARKERS[index % 6],
            markersize=4,
            color=WARN,
            linewidth=1.3,
            label=name,
        )
    spread = [*data.reference, *(v for curve in data.kept for v in curve)]
    low, high = min(spread), max(spread)
    margin = (high - low or 1.0) * 0.35
    axes.set_ylim(low - margin, high + margin)
    axes.set_xlim(-0.3, max(1, len(data.reference) - 1) + 0.3)
    axes.locator_params(axis="x", integer=True)
    axes.grid()
    axes.set_xlabel("step (number)", loc="left")
    axes.set_title(
        "mean loss of the step (nats)",
        fontsize=11.5,
        color=SOFT,
        loc="left",
        x=-42 / (WIDTH - 64),
        pad=5,
    )
    handles, labels = axes.get_legend_handles_labels()
    legend_below(figure, list(handles), labels)
    return figure
