"""Emulated links of a run's cells, as measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harness.record.trial import TrialRecord
from harness.spec.link import UNSHAPED, Link
from reports.text import DASH, number, plain


@dataclass(frozen=True)
class MeasuredLink:
    asked: str
    bits_per_second: float | None
    latency_seconds: float | None
    emulation: str

    @property
    def delayed(self) -> bool:
        """Whether a latency was requested too."""
        try:
            return Link.of(self.asked).delay_seconds > 0
        except ValueError:
            return False

    @property
    def words(self) -> str:
        """Requested link: `1gbit`, `unshaped`."""
        return "unshaped" if self.asked == UNSHAPED else self.asked

    @property
    def rate(self) -> str:
        return DASH if self.bits_per_second is None else bits(self.bits_per_second)

    @property
    def latency(self) -> str:
        if self.latency_seconds is None:
            return DASH
        return f"{number(self.latency_seconds * 1e3, 2)} ms"


def measured_links(trials: Iterable[TrialRecord]) -> dict[str, MeasuredLink]:
    by_link: dict[str, list[TrialRecord]] = {}
    for trial in trials:
        if trial.links is not None:
            by_link.setdefault(trial.links, []).append(trial)
    return {
        asked: MeasuredLink(
            asked,
            _median([trial.link_bits_per_second for trial in some]),
            _median([trial.link_latency_seconds for trial in some]),
            next((trial.link_emulation for trial in some if trial.link_emulation), ""),
        )
        for asked, some in by_link.items()
    }


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def slowest_first(links: Iterable[MeasuredLink]) -> list[MeasuredLink]:
    """Sorts by bandwidth; delayed links and those of unknown bandwidth last."""

    def order(link: MeasuredLink) -> tuple[bool, bool, float]:
        return link.delayed, link.bits_per_second is None, link.bits_per_second or 0.0

    return sorted(links, key=order)


def bits(value: float, digits: int = 3) -> str:
    """Formats bits per second: `948 Mbit/s`, `9.5 Gbit/s`."""
    size, name = next(
        (size, name)
        for size, name in ((1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s"), (1.0, "bit/s"))
        if value >= size or size == 1.0
    )
    return f"{plain(float(f'{value / size:.{digits}g}'))} {name}"
