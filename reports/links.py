"""What a slow link between nodes does to each strategy: throughput against measured bandwidth, and
where two strategies change places."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.analysis.setting import SETTING, setting
from harness.analysis.summary import compared
from harness.spec.link import UNSHAPED, Link
from reports.data import NOTES
from reports.groups import OVERSUBSCRIBED, Group, Row, named, records, unit
from reports.table import Column, Grid, Part, Td, grid, interval, mebibytes
from reports.text import DASH, MIB, listed, missing, number, plain, plural

if TYPE_CHECKING:
    import pandas as pd

_MEASURED = ("link_bits_per_second", "link_latency_seconds", "link_emulation")
MOST_NAMED = 12
EMULATED = "emulated links between nodes of one machine"
ALIKE_BYTES = 0.02
"""Strategies whose bytes differ by less have no order by bytes."""


@dataclass(frozen=True)
class MeasuredLink:
    """A link: asked for, and as the run measured it."""

    asked: str
    bits_per_second: float | None
    latency_seconds: float | None
    emulation: str

    @property
    def delayed(self) -> bool:
        """Whether its latency was asked for too, which sets it apart from links that differ in
        bandwidth only."""
        try:
            return Link.of(self.asked).delay_seconds > 0
        except ValueError:
            return False

    @property
    def words(self) -> str:
        """As asked for: `1gbit`, `unshaped`."""
        return "unshaped" if self.asked == UNSHAPED else self.asked

    @property
    def rate(self) -> str:
        return DASH if self.bits_per_second is None else bits(self.bits_per_second)

    @property
    def latency(self) -> str:
        return (
            DASH if self.latency_seconds is None else f"{number(self.latency_seconds * 1e3, 2)} ms"
        )


@dataclass(frozen=True)
class BandwidthLine:
    """A strategy's throughput over bandwidth, slowest link first."""

    label: str
    bits_per_second: tuple[float, ...]
    values: tuple[float, ...]
    lows: tuple[float | None, ...]
    highs: tuple[float | None, ...]


@dataclass(frozen=True)
class Bandwidths:
    """Lines in the order of their throughput on the slowest link; `links`: (bits per second, as
    asked for) that were measured."""

    name: str
    title: str
    unit: str
    lines: tuple[BandwidthLine, ...]
    links: tuple[tuple[float, str], ...]
    summary: str
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Series:
    """A strategy in one setting: its cell for each link."""

    label: str
    by_link: dict[str, Row]

    @property
    def sent(self) -> float | None:
        """Bytes that its rank which sends most sends per step; they do not depend on the link."""
        found = [
            row["wire_bytes"] for row in self.by_link.values() if not missing(row["wire_bytes"])
        ]
        return statistics.median(found) if found else None


@dataclass(frozen=True)
class Chapter:
    """One setting on all its links."""

    title: str
    links: tuple[MeasuredLink, ...]
    """By bandwidth, slowest first, delayed ones and unknown ones last."""
    chart: Bandwidths | None
    grid: Grid
    unit: str
    crossovers: tuple[str, ...]
    more: int
    """Crossovers that are not named."""
    by_bytes: str
    """Whether strategies are in the order of what they send, in words; empty where that is not
    known."""


def chapters(cells: Sequence[Row], trials: pd.DataFrame, explained: pd.DataFrame) -> list[Chapter]:
    """A chapter for each setting that ran on two or more emulated links; those with most strategies
    first."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in cells:
        if row["ranked"] and not missing(row.get("links")):
            found.setdefault(setting(row, without=["links"]), []).append(row)
    measured, wire = _measured(trials), _wire(explained)
    made: list[Chapter] = []
    for rows in found.values():
        links = _ordered({str(row["links"]): measured[str(row["links"])] for row in rows})
        series: dict[str, dict[str, Row]] = {}
        for row in rows:
            sent = wire.get(row["cell_id"], row.get("sent_bytes_per_step"))
            label = named(
                row | {"links": None, "nodes": 1, "stand_in": None, "oversubscribed": False}
            )
            series.setdefault(label, {})[str(row["links"])] = row | {"wire_bytes": sent}
        if len(links) > 1:
            made.append(
                _chapter(
                    len(made),
                    rows,
                    links,
                    [Series(label, by_link) for label, by_link in series.items()],
                )
            )
    return sorted(made, key=lambda one: -len(one.grid.rows))


def _measured(trials: pd.DataFrame) -> dict[str, MeasuredLink]:
    """What the trials say of each link that they ran over."""
    if "links" not in trials:
        return {}
    found = {}
    for asked, some in trials[trials["links"].notna()].groupby("links"):
        known = {name: some[name].dropna().tolist() if name in some else [] for name in _MEASURED}
        bandwidth, latency = (
            statistics.median(known[name]) if known[name] else None for name in _MEASURED[:2]
        )
        found[str(asked)] = MeasuredLink(
            str(asked), bandwidth, latency, str(next(iter(known["link_emulation"]), ""))
        )
    return found


def _wire(explained: pd.DataFrame) -> dict[str, float]:
    """Bytes per step of the rank that sends most, of cells that were explained."""
    return {
        row["cell_id"]: max(row["sent_bytes"])
        for row in records(explained)
        if row["status"] == "ok" and len(row["sent_bytes"])
    }


def _ordered(links: dict[str, MeasuredLink]) -> list[MeasuredLink]:
    return sorted(
        links.values(),
        key=lambda one: (one.delayed, one.bits_per_second is None, one.bits_per_second or 0.0),
    )


def _chapter(
    index: int, rows: Sequence[Row], links: Sequence[MeasuredLink], series: list[Series]
) -> Chapter:
    group = Group({name: rows[0].get(name) for name in SETTING} | {"links": None}, tuple(rows))
    title, slowest = f"{group.workload} · {group.title}", links[0].asked
    series.sort(
        key=lambda one: -one.by_link[slowest][group.throughput] if slowest in one.by_link else 0.0
    )
    plain_links = [one for one in links if not one.delayed and one.bits_per_second]
    crossed = [*crossovers(series, plain_links, group.throughput), *_by_delay(series, links)]
    crossed.sort(key=lambda pair: -pair[0])
    return Chapter(
        title,
        tuple(links),
        (
            _chart(f"links-{index}", title, group, plain_links, series)
            if len(plain_links) > 1
            else None
        ),
        _grid(f"links-table-{index}", title, group.throughput, links, series),
        group.unit,
        tuple(said for _, said in crossed[:MOST_NAMED]),
        max(0, len(crossed) - MOST_NAMED),
        _by_bytes(series, links[0]),
    )


def _chart(
    name: str, title: str, group: Group, links: Sequence[MeasuredLink], series: Sequence[Series]
) -> Bandwidths:
    lines = []
    for one in series:
        there = [link for link in links if link.asked in one.by_link]
        rows = [one.by_link[link.asked] for link in there]
        ends = [
            tuple(
                None if missing(row[group.throughput + end]) else float(row[group.throughput + end])
                for row in rows
            )
            for end in ("_low", "_high")
        ]
        bandwidths = tuple(link.bits_per_second or 0.0 for link in there)
        if rows:
            lines.append(
                BandwidthLine(
                    one.label,
                    bandwidths,
                    tuple(float(row[group.throughput]) for row in rows),
                    *ends,
                )
            )
    words = "; ".join(
        f"{line.label} {number(line.values[0])} to {number(line.values[-1])} {group.unit}"
        for line in lines[:6]
    )
    summary = (
        f"Throughput of {plural(len(lines), 'strategy variant')} over the measured bandwidth of"
        f" emulated links between nodes, {title}, from {links[0].rate} to {links[-1].rate}: {words}"
    )
    crowded = (
        [NOTES[OVERSUBSCRIBED].replace("hatched", "some of it")]
        if any(row["oversubscribed"] for row in group.rows)
        else []
    )
    places = tuple((link.bits_per_second or 0.0, link.words) for link in links)
    return Bandwidths(name, title, group.unit, tuple(lines), places, summary, (EMULATED, *crowded))


def _grid(
    name: str, title: str, throughput: str, links: Sequence[MeasuredLink], series: Sequence[Series]
) -> Grid:
    """Strategy by link; a row's own cell is that of the first link it ran over."""
    rows = []
    for one in series:
        first = next(one.by_link[link.asked] for link in links if link.asked in one.by_link)
        rows.append(first | {"links": None, "nodes": 1, "by_link": one.by_link, "sent": one.sent})

    def over(link: MeasuredLink) -> Callable[[Row], Td]:
        return lambda row: (
            interval(row["by_link"][link.asked], throughput, False)
            if link.asked in row["by_link"]
            else Td((Part(DASH),))
        )

    said = "{} asked for, emulated; measured {}, {}"
    columns = [
        Column(
            link.words,
            unit(throughput),
            said.format(link.words, link.rate, link.latency),
            over(link),
        )
        for link in links
    ]
    columns.append(Column("Sent", "MiB per step", "by the rank that sends most", mebibytes("sent")))
    made = grid(name, f"Throughput over emulated links, {title}", rows, columns)
    assert made is not None
    return made


def crossovers(
    series: Sequence[Series], links: Sequence[MeasuredLink], throughput: str
) -> list[tuple[float, str]]:
    """Where two strategies change places, in words, with how clear that is: the lesser of the two
    logarithms of their ratio.

    Only where within rounds one is faster at one link and the other at the next at which there is a
    difference. The place is interpolated between measured points, on logarithmic axes.
    """
    found = []
    for a, b in itertools.combinations(series, 2):
        points = [
            (link, _lead(a, b, link.asked, throughput))
            for link in links
            if link.asked in a.by_link and link.asked in b.by_link
        ]
        told = [place for place, (link, _) in enumerate(points) if _order(a, b, link.asked)]
        for first, last in itertools.pairwise(told):
            (low, lead), (high, after) = points[first], points[last]
            if _order(a, b, low.asked) != _order(a, b, high.asked) and lead * after < 0:
                place = _zero(
                    [
                        (math.log(link.bits_per_second or 1.0), value)
                        for link, value in points[first : last + 1]
                    ]
                )
                fast, slow = (a, b) if lead > 0 else (b, a)
                said = (
                    f"Below about {bits(math.exp(place), 2)} {fast.label} is faster than"
                    f" {slow.label}, above it slower (measured at {low.rate} and {high.rate})."
                )
                found.append((min(abs(lead), abs(after)), said))
    return found


def _by_delay(series: Sequence[Series], links: Sequence[MeasuredLink]) -> list[tuple[float, str]]:
    """Strategies that change places when a link of the same rate is further away."""
    by_rate = {Link.of(one.asked).bits_per_second: one for one in links if not one.delayed}
    found = []
    for far in (one for one in links if one.delayed):
        near = by_rate.get(Link.of(far.asked).bits_per_second)
        for a, b in itertools.combinations(series, 2) if near else ():
            if near and all(link.asked in one.by_link for link in (near, far) for one in (a, b)):
                here, there = _order(a, b, near.asked), _order(a, b, far.asked)
                if here * there < 0:
                    leads = [
                        abs(_lead(a, b, link.asked, "samples_per_second")) for link in (near, far)
                    ]
                    fast, slow = (a, b) if here > 0 else (b, a)
                    said = (
                        f"Latency turns two around: over {near.words} {fast.label} is faster than"
                        f" {slow.label}, over {far.words} slower."
                    )
                    found.append((min(leads), said))
    return found


def _lead(a: Series, b: Series, link: str, throughput: str) -> float:
    """Logarithm of the ratio of their throughputs."""
    return math.log(float(a.by_link[link][throughput]) / float(b.by_link[link][throughput]))


def _order(a: Series, b: Series, link: str) -> int:
    """1 where the first is faster beyond doubt, -1 where it is slower, else 0."""
    found = compared(a.by_link[link], b.by_link[link])
    return 0 if found is None else {"faster": 1, "slower": -1}.get(found.verdict, 0)


def _zero(points: Sequence[tuple[float, float]]) -> float:
    """Where straight lines through the points first cross zero; the points begin and end on
    different sides of it."""
    (x, y), (after, then) = next(
        pair for pair in itertools.pairwise(points) if pair[0][1] * pair[1][1] <= 0
    )
    return x + (after - x) * y / (y - then) if y != then else x


def _by_bytes(series: Sequence[Series], slowest: MeasuredLink) -> str:
    """Whether the slowest link puts the strategies in the order of what they send."""
    known = [one for one in series if one.sent is not None and slowest.asked in one.by_link]
    pairs = [(a, b) for a, b in itertools.combinations(known, 2) if _order(a, b, slowest.asked)]
    against, judged = [], 0
    for a, b in pairs:
        fast, slow = (a, b) if _lead(a, b, slowest.asked, "samples_per_second") > 0 else (b, a)
        more, less = fast.sent or 0.0, slow.sent or 0.0
        if abs(more - less) > ALIKE_BYTES * max(more, less):
            judged += 1
            if more > less:
                said = (
                    f"{fast.label} ({number(more / MIB)} MiB) is faster than {slow.label}"
                    f" ({number(less / MIB)} MiB)"
                )
                against.append((more / max(less, 1.0), said))
    if not judged:
        return ""
    where = f"On the slowest link, {slowest.words} ({slowest.rate} measured),"
    told = f"{plural(judged, 'pair')} that can be told apart"
    if not against:
        return (
            f"{where} the order by throughput is the order of the bytes sent, fewest first, in all"
            f" {told}."
        )
    worst = listed([words for _, words in sorted(against, reverse=True)], 3)
    return (
        f"{where} the faster of two strategies sends fewer bytes in {judged - len(against)} of"
        f" {told}; not so: {worst}."
    )


def bits(value: float, digits: int = 3) -> str:
    """Bits per second: `948 Mbit/s`, `9.5 Gbit/s`."""
    size, name = next(
        (size, name)
        for size, name in ((1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s"), (1.0, "bit/s"))
        if value >= size or size == 1.0
    )
    return f"{plain(float(f'{value / size:.{digits}g}'))} {name}"
