"""Charts with a line per cell, written directly as SVG: a page has dozens, and matplotlib takes 45
ms for each.

Units are pixels.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable

from reports.data import LABEL, Bar, Bars
from reports.rank_peaks import Ranks
from reports.stacks import Stacks
from reports.svg import WIDTH
from reports.text import plain, shortened

LINE = 34
_LEFT, _RIGHT, _TOP, _BOTTOM = 8, WIDTH - 112, 4, 42
_STEPS = (1, 2, 2.5, 5, 10)


class Lines:
    """`count` lines, first on top, over an axis from `low` to `high`; styled by style.css."""

    def __init__(
        self, name: str, count: int, low: float, high: float, logarithmic: bool = False
    ) -> None:
        self._name, self._count, self._logarithmic = name, count, logarithmic
        self._low, self._high = (math.log10(low), math.log10(high)) if logarithmic else (low, high)
        self._parts: list[str] = []
        self._hatched: set[str] = set()

    def x(self, value: float) -> float:
        """Returns a value's position, clipped to the axis."""
        place = (math.log10(value) if self._logarithmic else value) - self._low
        return _LEFT + min(max(place / (self._high - self._low), 0), 1) * (_RIGHT - _LEFT)

    @staticmethod
    def middle(index: int) -> float:
        return _TOP + (index + 0.7) * LINE

    def words(self, index: int, label: str, text: str, kind: str = "ink") -> None:
        self._text(_LEFT, _TOP + (index + 0.28) * LINE, shortened(label, LABEL))
        self._text(_RIGHT + 7, self.middle(index), text, kind)

    def box(self, index: int, start: float, end: float, kind: str, hatched: bool = False) -> None:
        left, right, middle = self.x(start), self.x(end), self.middle(index)
        fill = f' fill="url(#{self._name}-{kind})"' if hatched else ""
        self._hatched |= {kind} if hatched else set()
        self._parts.append(
            f'<rect class="{kind}" x="{_n(left)}" y="{_n(middle - 5.1)}" width="{_n(right - left)}"'
            f' height="10.2"{fill}/>'
        )

    def level(self, index: int, start: float, end: float, kind: str) -> None:
        self._path(
            f"M{_n(self.x(start))} {_n(self.middle(index))}H{_n(self.x(end))}", f"{kind} broad"
        )

    def interval(self, index: int, low: float, high: float) -> None:
        """Adds a line with a vertical stroke at each end that is within the axis."""
        middle, left, right = self.middle(index), self.x(low), self.x(high)
        self._path(
            f"M{_n(left)} {_n(middle)}H{_n(right)}"
            + "".join(f"M{_n(x)} {_n(middle - 3)}v6" for x in (left, right)),
            "ink",
        )

    def upright(self, index: int, value: float, half: float, kind: str = "ink strong") -> None:
        self._path(f"M{_n(self.x(value))} {_n(self.middle(index) - half)}v{_n(2 * half)}", kind)

    def dot(self, index: int, value: float, radius: float, kind: str) -> None:
        self._parts.append(
            f'<circle class="{kind}" cx="{_n(self.x(value))}" cy="{_n(self.middle(index))}"'
            f' r="{_n(radius)}"/>'
        )

    def diamond(self, index: int, value: float) -> None:
        self._path(
            f"M{_n(self.x(value))} {_n(self.middle(index) - 4)}l4 4l-4 4l-4 -4z", "ink hollow"
        )

    def beyond(self, index: int, kind: str) -> None:
        """Adds a triangle at the end of the axis: the bar goes on."""
        self._path(f"M{_RIGHT - 3.5} {_n(self.middle(index) - 3.5)}l7 3.5l-7 3.5z", kind)

    def svg(
        self, axis: str, summary: str, ticks: Iterable[tuple[float, str]], left: bool = True
    ) -> str:
        """Returns the picture. `axis`: quantity with its unit; `left`: draw a vertical line at the
        left."""
        end = _TOP + self._count * LINE
        places = [(_n(self.x(value)), words) for value, words in ticks]
        grid = "".join(f"M{x} {_TOP}V{end}" for x, _ in places)
        frame = (
            f"M{_LEFT} {end}H{_RIGHT}"
            + (f"M{_LEFT} {_TOP}V{end}" if left else "")
            + "".join(f"M{x} {end}v3.5" for x, _ in places)
        )
        numbers = "".join(
            f'<text class="soft tick" x="{x}" y="{end + 16}">{words}</text>' for x, words in places
        )
        hatches = "".join(
            f'<pattern id="{self._name}-{kind}" class="{kind}" width="5" height="5"'
            ' patternUnits="userSpaceOnUse"><rect class="ground" width="5" height="5"/><path'
            ' d="M-1 1L1 -1M-1 6L6 -1M4 6L6 4"/></pattern>'
            for kind in sorted(self._hatched)
        )
        return (
            f'<svg viewBox="0 0 {WIDTH} {end + _BOTTOM}" class="chart lines" role="img"'
            f' aria-label="{html.escape(summary)}">{hatches}<path class="grid" d="{grid}"/><path'
            f' class="soft" d="{frame}"/>{"".join(self._parts)}{numbers}<text class="soft"'
            f' x="{_LEFT}" y="{end + 33}">{html.escape(axis)}</text></svg>'
        )

    def _text(self, x: float, middle: float, text: str, kind: str = "ink") -> None:
        self._parts.append(
            f'<text class="{kind}" x="{_n(x)}"'
            f' y="{_n(middle + 4)}">{html.escape(text, quote=False)}</text>'
        )

    def _path(self, d: str, kind: str) -> None:
        self._parts.append(f'<path class="{kind}" d="{d}"/>')


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def round_numbers(low: float, high: float, most: int = 4) -> list[tuple[float, str]]:
    """Returns at most `most` + 1 evenly spaced round ticks."""
    size = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(
        step * size for step in (*_STEPS, 20) if step * size * most >= (high - low) * (1 - 1e-9)
    )
    return [
        (n * step, plain(round(n * step, 12)))
        for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    ]


def _decades(low: float, high: float) -> list[tuple[float, str]]:
    first, last = round(math.log10(low)), round(math.log10(high))
    return [
        (10.0**power, f"1e{power}")
        for power in range(first + 1, last + 1, max(1, math.ceil((last - first) / 5)))
    ]


def bars(data: Bars) -> str:
    """Draws one line per cell: label, bar (dot on a log axis) with interval, number."""
    low, high = _range(data)
    chart = Lines(data.name, len(data.bars), low, high, data.logarithmic)
    for index, bar in enumerate(data.bars):
        _bar(chart, index, bar, low, high, data.logarithmic)
    ticks = _decades(low, high) if data.logarithmic else round_numbers(low, high)
    return chart.svg(data.axis, data.summary, ticks, left=not data.logarithmic)


def _range(data: Bars) -> tuple[float, float]:
    ends = [v for b in data.bars for v in (b.value, b.high, b.target) if v is not None and v > 0]
    top = max(ends, default=1.0)
    if not data.logarithmic:
        return 0.0, top * 1.02
    smallest = min(ends, default=1e-8)
    return 10 ** (math.floor(math.log10(smallest)) - 1), 10 ** math.ceil(math.log10(top) + 0.3)


def _bar(chart: Lines, index: int, bar: Bar, low: float, high: float, logarithmic: bool) -> None:
    kind = "warn" if bar.failed else "best" if bar.strong or logarithmic else "rest"
    chart.words(index, bar.label, bar.text, "warn" if bar.failed else "ink")
    if logarithmic:
        shown = high if bar.value is None else max(bar.value, low * 1.5)
        chart.level(index, low, shown, "grid")
        if bar.value is None:
            chart.beyond(index, kind)
        else:
            chart.dot(index, shown, 3.5, f"{kind} hollow" if bar.value == 0 else kind)
    elif bar.value is not None:
        chart.box(index, 0.0, bar.value, kind, bool(bar.marks))
    if bar.low is not None and bar.high is not None:
        chart.interval(index, bar.low, bar.high)
    if bar.target is not None:
        chart.upright(index, bar.target, 5.8)


def stacks(data: Stacks) -> str:
    """Draws one line per cell: label, stacked kinds, a mark for the formula's sum, a diamond for
    the peak."""
    chart = Lines(data.name, len(data.stacks), 0.0, data.limit)
    for index, stack in enumerate(data.stacks):
        start = 0.0
        chart.words(index, stack.label, stack.text, "warn" if stack.off else "ink")
        for kind, part in enumerate(stack.parts):
            shown = min(part, data.limit - start)
            if shown > 0:
                chart.box(index, start, start + shown, f"series-{kind}", stack.hatched)
            start += max(shown, 0.0)
        if stack.total > data.limit:
            chart.beyond(index, "ink")
        if stack.formula is not None and stack.formula <= data.limit:
            chart.upright(index, stack.formula, 6.8)
        if stack.peak is not None and stack.peak <= data.limit:
            chart.diamond(index, stack.peak)
        elif stack.peak is not None:
            chart.beyond(index, "ink hollow")
    return chart.svg(data.axis, data.summary, round_numbers(0.0, data.limit))


def ranks(data: Ranks) -> str:
    """Draws one line per cell: label and a dot per rank, joined; 100 % is the mean."""
    shares = [share for _, of_cell, _ in data.lines for share in of_cell]
    low, high = around([90.0, 110.0, *shares])
    chart = Lines(data.name, len(data.lines), low, high)
    for index, (label, of_cell, text) in enumerate(data.lines):
        chart.words(index, label, text)
        chart.level(index, min(of_cell), max(of_cell), "rest")
        chart.upright(index, 100.0, 5.8, "ink")
        for share in of_cell:
            chart.dot(index, share, 3.2, "best hollow")
    return chart.svg(data.axis, data.summary, round_numbers(low, high), left=False)


def around(values: list[float]) -> tuple[float, float]:
    """Returns limits with a margin; for equal values, 10 % around them."""
    low, high = min(values), max(values)
    margin = (high - low) * 0.1 or high * 0.1 or 1.0
    return low - margin, high + margin
