"""Finds strategies that change order from one link to another."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from harness.analysis.cell_result import CellResult
from harness.analysis.ranking import compare
from harness.spec.link import Link
from reports.link_facts import MeasuredLink, bits
from reports.text import MIB, listed, number, plural

ALIKE_BYTES = 0.02
"""Relative difference in bytes below which strategies are not ordered."""


@dataclass(frozen=True)
class LinkSeries:
    """A strategy in one setting: its cell for each link."""

    label: str
    by_link: Mapping[str, CellResult]
    wire_bytes: Mapping[str, float | None]
    """Bytes per step of the rank that sends most, by link."""

    @property
    def sent(self) -> float | None:
        """Bytes per step of the rank that sends most; they do not depend on the link."""
        known = [size for size in self.wire_bytes.values() if size is not None]
        return statistics.median(known) if known else None


@dataclass(frozen=True)
class Crossover:
    clearness: float
    """Smaller absolute log ratio of their throughputs on the two sides."""
    words: str


def crossovers(series: Sequence[LinkSeries], links: Sequence[MeasuredLink]) -> list[Crossover]:
    """Returns the crossovers, the clearest first.

    One strategy must be faster within rounds at one link, and the other at the next link that
    differs. The crossing point is interpolated between measured links, on logarithmic axes.
    """
    with_bandwidth = [link for link in links if not link.delayed and link.bits_per_second]
    found = [*_by_bandwidth(series, with_bandwidth), *_by_delay(series, links)]
    return sorted(found, key=lambda crossover: -crossover.clearness)


def _by_bandwidth(
    series: Sequence[LinkSeries], links: Sequence[MeasuredLink]
) -> Iterator[Crossover]:
    for a, b in itertools.combinations(series, 2):
        both = [link for link in links if link.asked in a.by_link and link.asked in b.by_link]
        leads = [_lead(a, b, link.asked) for link in both]
        orders = [_order(a, b, link.asked) for link in both]
        clear = [place for place, order in enumerate(orders) if order]
        for first, last in itertools.pairwise(clear):
            lead, after = leads[first], leads[last]
            if orders[first] == orders[last] or lead * after >= 0:
                continue
            points = [
                (math.log(link.bits_per_second or 1.0), value)
                for link, value in zip(both[first : last + 1], leads[first:], strict=False)
            ]
            fast, slow = (a, b) if lead > 0 else (b, a)
            words = (
                f"Below about {bits(math.exp(_zero(points)), 2)} {fast.label} is faster than"
                f" {slow.label}, above it slower (measured at {both[first].rate} and"
                f" {both[last].rate})."
            )
            yield Crossover(min(abs(lead), abs(after)), words)


def _by_delay(series: Sequence[LinkSeries], links: Sequence[MeasuredLink]) -> Iterator[Crossover]:
    """Yields strategies that change order when a link of the same rate has a longer delay."""
    by_rate = {Link.of(link.asked).bits_per_second: link for link in links if not link.delayed}
    for far in links:
        near = by_rate.get(Link.of(far.asked).bits_per_second) if far.delayed else None
        for a, b in itertools.combinations(series, 2) if near else ():
            if near is None or any(
                link.asked not in strategy.by_link for link in (near, far) for strategy in (a, b)
            ):
                continue
            here, there = _order(a, b, near.asked), _order(a, b, far.asked)
            if here * there < 0:
                fast, slow = (a, b) if here > 0 else (b, a)
                words = (
                    f"Latency reverses an order: over {near.words} {fast.label} is faster than"
                    f" {slow.label}, over {far.words} slower."
                )
                leads = [abs(_lead(a, b, link.asked)) for link in (near, far)]
                yield Crossover(min(leads), words)


def _lead(a: LinkSeries, b: LinkSeries, link: str) -> float:
    first, second = (strategy.by_link[link].speed.samples_per_second or 1.0 for strategy in (a, b))
    return math.log(first / second)


def _order(a: LinkSeries, b: LinkSeries, link: str) -> int:
    """Returns 1 if `a` is clearly faster, -1 if clearly slower, else 0."""
    comparison = compare(a.by_link[link], b.by_link[link])
    return {"faster": 1, "slower": -1}.get(comparison.verdict, 0) if comparison else 0


def _zero(points: Sequence[tuple[float, float]]) -> float:
    """Returns where the line through the points first crosses zero; its ends must differ in
    sign."""
    (x, y), (after, then) = next(
        pair for pair in itertools.pairwise(points) if pair[0][1] * pair[1][1] <= 0
    )
    return x + (after - x) * y / (y - then) if y != then else x


def order_by_bytes(series: Sequence[LinkSeries], slowest: MeasuredLink) -> str:
    """Describes whether strategies on the slowest link rank by bytes sent; empty if unknown."""
    known = [
        strategy
        for strategy in series
        if strategy.sent is not None and slowest.asked in strategy.by_link
    ]
    against, judged = [], 0
    for a, b in itertools.combinations(known, 2):
        order = _order(a, b, slowest.asked)
        fast, slow = (a, b) if order > 0 else (b, a)
        more, less = fast.sent or 0.0, slow.sent or 0.0
        if order and abs(more - less) > ALIKE_BYTES * max(more, less):
            judged += 1
            if more > less:
                words = (
                    f"{fast.label} ({number(more / MIB)} MiB) is faster than {slow.label}"
                    f" ({number(less / MIB)} MiB)"
                )
                against.append((more / max(less, 1.0), words))
    if not judged:
        return ""
    where = f"On the slowest link, {slowest.words} ({slowest.rate} measured),"
    pairs = f"{plural(judged, 'pair')} that can be told apart"
    if not against:
        return (
            f"{where} the order by throughput is the order of the bytes sent, fewest first, in all"
            f" {pairs}."
        )
    worst = listed([words for _, words in sorted(against, reverse=True)], 3)
    return (
        f"{where} the faster of two strategies sends fewer bytes in {judged - len(against)} of"
        f" {pairs}; not so: {worst}."
    )
