from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

UNSHAPED = "none"
_RATES = {"gbit": 1e9, "mbit": 1e6, "kbit": 1e3}
"""Units in bits per second."""
_DELAYS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
"""Units in seconds."""
_LEAST_RATE, _MOST_RATE, _MOST_DELAY = 1e6, 1e11, 1.0
_HOW = "write a link as none, 1gbit, 100mbit, or {rate: 1gbit, delay: 1ms}"


@dataclass(frozen=True)
class Link:
    """Rate and delay of each node's link to the switch."""

    bits_per_second: float | None = None
    """Rate per direction, including frame headers; None if unlimited."""
    delay_seconds: float = 0.0
    """One-way delay between two nodes."""

    @classmethod
    def of(cls, text: str) -> Link:
        """Parses text such as `1gbit 1ms`; raises ValueError if it is invalid."""
        if text == UNSHAPED:
            return cls()
        rate, delay = None, 0.0
        parts = text.lower().split()
        for index, word in enumerate(parts):
            match = re.fullmatch(r"(\d+(?:\.\d+)?)(?:(gbit|mbit|kbit)|(s|ms|us))", word)
            if not match or (match[2] and index > 0) or (match[3] and index < len(parts) - 1):
                raise ValueError(_HOW)
            if match[2]:
                rate = float(match[1]) * _RATES[match[2]]
            else:
                delay = float(match[1]) * _DELAYS[match[3]]
        if not parts:
            raise ValueError(_HOW)
        if rate is not None and not _LEAST_RATE <= rate <= _MOST_RATE:
            raise ValueError("the rate of a link must be from 1mbit to 100gbit")
        if delay > _MOST_DELAY:
            raise ValueError("the delay of a link must be at most 1s")
        return cls(rate, delay)

    @property
    def text(self) -> str:
        """Canonical text: `1gbit 1ms`, `100mbit`, `none`."""
        parts = [_in_units(self.bits_per_second, _RATES)] if self.bits_per_second else []
        parts += [_in_units(self.delay_seconds, _DELAYS)] if self.delay_seconds else []
        return " ".join(parts) or UNSHAPED


def over(text: str) -> str:
    """Describes a link in a cell's name: `over 1gbit (emulated)`."""
    return f"over {'unshaped links' if text == UNSHAPED else text} (emulated)"


def _in_units(value: float, units: Mapping[str, float]) -> str:
    name = next(
        (name for name, size in units.items() if value >= size * (1 - 1e-9)), list(units)[-1]
    )
    return f"{value / units[name]:.6g}{name}"


def link_text(value: object) -> str:
    """Returns a link's canonical text; empty for the real network.

    `value`: text, or a mapping with `rate`, `delay` or both. Raises ValueError if invalid.
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
