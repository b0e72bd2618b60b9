"""A link as it is asked for: text of a cell's axis, and what it means."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

UNSHAPED = "none"
_RATES = {"gbit": 1e9, "mbit": 1e6, "kbit": 1e3}
_DELAYS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_LEAST_RATE, _MOST_RATE, _MOST_DELAY = 1e6, 1e11, 1.0
_HOW = "write a link as none, 1gbit, 100mbit, or {rate: 1gbit, delay: 1ms}"


@dataclass(frozen=True)
class Link:
    """What each node's link to the switch is asked to do."""

    bits_per_second: float | None = None
    """In each direction, frames with their headers; None: as fast as the machine can."""
    delay_seconds: float = 0.0
    """One way, from node to node."""

    @classmethod
    def of(cls, text: str) -> Link:
        """The link of a cell's text; raises ValueError with a sentence for anything that is
        none."""
        if text == UNSHAPED:
            return cls()
        rate, delay = None, 0.0
        words = text.lower().split()
        for place, word in enumerate(words):
            found = re.fullmatch(r"(\d+(?:\.\d+)?)(?:(gbit|mbit|kbit)|(s|ms|us))", word)
            if not found or (found[2] and place > 0) or (found[3] and place < len(words) - 1):
                raise ValueError(_HOW)
            if found[2]:
                rate = float(found[1]) * _RATES[found[2]]
            else:
                delay = float(found[1]) * _DELAYS[found[3]]
        if not words:
            raise ValueError(_HOW)
        if rate is not None and not _LEAST_RATE <= rate <= _MOST_RATE:
            raise ValueError("the rate of a link must be from 1mbit to 100gbit")
        if delay > _MOST_DELAY:
            raise ValueError("the delay of a link must be at most 1s")
        return cls(rate, delay)

    @property
    def text(self) -> str:
        """One text for one link: `1gbit 1ms`, `100mbit`, `none`."""
        words = [_in_units(self.bits_per_second, _RATES)] if self.bits_per_second else []
        words += [_in_units(self.delay_seconds, _DELAYS)] if self.delay_seconds else []
        return " ".join(words) or UNSHAPED


def over(text: str) -> str:
    """The link of a cell in words: `over 1gbit (emulated)`."""
    return f"over {'unshaped links' if text == UNSHAPED else text} (emulated)"


def _in_units(value: float, units: Mapping[str, float]) -> str:
    """In the largest unit of which there is at least one."""
    name = next(
        (name for name, size in units.items() if value >= size * (1 - 1e-9)), list(units)[-1]
    )
    return f"{value / units[name]:.6g}{name}"


def link_text(value: object) -> str:
    """The text of what a matrix says: a text, a mapping with `rate`, `delay` or both, or nothing
    (the machine's own network).

    Raises ValueError with a sentence for anything else.
    """
    if value is None or value == "":
        return ""
    if isinstance(value, Mapping):
        if not value or set(value) - {"rate", "delay"}:
            raise ValueError(_HOW)
        value = " ".join(
            str(value[name])
            for name in ("rate", "delay")
            if value.get(name) not in (None, UNSHAPED)
        )
        return Link.of(value).text if value else UNSHAPED
    if not isinstance(value, str):
        raise ValueError(_HOW)
    return Link.of(value).text
