"""Formats values for readers. Unknown is an em dash, never `nan`."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence

DASH = "—"
MIB, GIB = 2**20, 2**30


def finite(value: float | None) -> float | None:
    """Replaces NaN and infinity by None."""
    return value if value is not None and math.isfinite(value) else None


def number(value: float | None, digits: int = 3) -> str:
    """Formats at least `digits` significant digits: 12,345, 0.0123, and 1.2e-07 for many zeros."""
    if value is None or not math.isfinite(value):
        return DASH
    size = abs(value)
    if size == 0:
        return "0"
    if size < 10**-digits:
        return f"{value:.1e}"
    decimals = max(0, digits - 1 - math.floor(math.log10(size)))
    return f"{value:,.{decimals}f}"


def plain(value: float | None) -> str:
    """Formats a count or axis tick without extra digits: 8, 2,500, 0.5."""
    return DASH if (number := finite(value)) is None else f"{float(number):,.10g}"


def scaled(value: float | None, factor: float, digits: int = 3) -> str:
    """Formats value x factor, in a unit other than the record's."""
    return DASH if value is None else number(value * factor, digits)


def percent(value: float | None) -> str:
    """Formats a fraction as `85%`."""
    return DASH if (number := finite(value)) is None else f"{number * 100:.0f}%"


def signed(value: float | None) -> str:
    """Formats a relative difference as `+1.2%`."""
    number = finite(value)
    return DASH if number is None else f"{round(number * 100, 1) + 0.0:+.1f}%".replace("-", "−")


def size(value: float | None) -> str:
    """Formats bytes in the largest unit that they fill: `64 bytes`, `3.32 MiB`."""
    value = finite(value)
    if value is None:
        return DASH
    for unit, factor in (("GiB", GIB), ("MiB", MIB), ("KiB", 2**10)):
        if abs(value) >= factor:
            return f"{number(value / factor)} {unit}"
    return f"{plain(value)} bytes"


def short_count(value: float) -> str:
    """Formats a large count as `3.28M`."""
    for unit, factor in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= factor:
            return f"{number(value / factor)}{unit}"
    return plain(value)


def duration(seconds: float) -> str:
    """Formats as `45 s`, `29 min` or `1 h 05 min`."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min"


def memory_unit(sizes: Iterable[float]) -> tuple[int, str]:
    """Returns the unit for a chart of sizes in bytes: GiB if the largest reaches one, else MiB."""
    return (GIB, "GiB") if max(sizes, default=0) >= GIB else (MIB, "MiB")


def deviation(value: float | None) -> str:
    """Formats a relative deviation as `1.2e-07`, or 0 if bitwise identical."""
    value = finite(value)
    if value is None:
        return DASH
    return "0" if value == 0 else f"{value:.1e}"


def exact(value: float | None) -> str:
    """Returns the full-precision value for machines; empty if unknown."""
    value = finite(value)
    if value is None:
        return ""
    number_ = float(value)
    return str(int(number_)) if number_.is_integer() and abs(number_) < 2**53 else repr(number_)


def listed(names: list[str], most: int = 4) -> str:
    """Returns `a, b and c`; past `most`, `a, b, c and 7 more`."""
    names_shown = (
        names if len(names) <= most else [*names[: most - 1], f"{len(names) - most + 1} more"]
    )
    return (
        names_shown[0]
        if len(names_shown) == 1
        else f"{', '.join(names_shown[:-1])} and {names_shown[-1]}"
    )


def shortened(text: str, most: int) -> str:
    """Shortens text for a chart: no control characters, an ellipsis in the middle past `most`.

    What follows options in parentheses, such as the precision, is kept.
    """
    text = printable(text)
    if len(text) <= most:
        return text
    cell, closing, setting = text.rpartition(")")
    if setting and closing and len(setting) < most - 12:
        return shortened(f"{cell})", most - len(setting)) + setting
    head = (most - 1) * 2 // 3
    return f"{text[:head]}…{text[-(most - 1 - head) :]}"


def shortened_apart(texts: Sequence[str], most: int) -> list[str]:
    """Shortens a chart's texts. Those that would become equal lose their common beginning."""
    short = [shortened(text, most) for text in texts]
    results = []
    for text, label in zip(texts, short, strict=True):
        colliding = {other for other, cut in zip(texts, short, strict=True) if cut == label}
        if len(colliding) > 1:
            columns = zip(*colliding, strict=False)
            equal = list(itertools.takewhile(lambda column: len(set(column)) == 1, columns))
            common = text[: len(equal)]
            different = text[max(common.rfind(mark) for mark in "( =") + 1 :]
            label = shortened(f"{text[: text.find('(') + 1]}…{different}", most)
        results.append(label)
    return results


def bits(value: float, digits: int = 3) -> str:
    """Formats bits per second: `948 Mbit/s`, `9.5 Gbit/s`."""
    size, name = next(
        (size, name)
        for size, name in ((1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s"), (1.0, "bit/s"))
        if value >= size or size == 1.0
    )
    return f"{plain(float(f'{value / size:.{digits}g}'))} {name}"


def printable(text: str) -> str:
    """Removes characters that XML cannot hold or that change the text direction."""
    return re.sub(
        r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff\u202a-\u202e\u2066-\u2069]",
        "",
        text,
    )
