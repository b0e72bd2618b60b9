"""Throughput of each strategy against measured bandwidth between nodes, and crossovers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from harness.analysis.cell_result import CellResult, Placement
from harness.analysis.setting import setting
from harness.record.profile import ProfileRecord
from harness.record.trial import TrialRecord
from reports.crossovers import LinkSeries, crossovers, order_by_bytes
from reports.data import NOTES
from reports.grid import Column, Grid, Td, grid, in_mebibytes, interval, numeral, words
from reports.groups import Group
from reports.link_facts import MeasuredLink, measured_links, slowest_first
from reports.names import OVERSUBSCRIBED, named
from reports.text import number, plural

MOST_NAMED = 12
EMULATED = "emulated links between nodes of one machine"


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
    """Lines by throughput on the slowest link; `links`: (measured bits per second, request)."""

    name: str
    title: str
    unit: str
    lines: tuple[BandwidthLine, ...]
    links: tuple[tuple[float, str], ...]
    summary: str
    notes: tuple[str, ...]


@dataclass(frozen=True)
class LinkedCell(CellResult):
    """A strategy's row: its first cell, with those of all links."""

    by_link: Mapping[str, CellResult] = field(default_factory=dict)
    sent: float | None = None
    """Bytes per step of the rank that sends most."""


@dataclass(frozen=True)
class Chapter:
    title: str
    links: tuple[MeasuredLink, ...]
    """Links by bandwidth, slowest first; delayed and unknown ones last."""
    chart: Bandwidths | None
    grid: Grid[LinkedCell]
    unit: str
    crossovers: tuple[str, ...]
    more: int
    """Number of omitted crossovers."""
    by_bytes: str
    """Whether strategies rank by bytes sent, as text; empty if unknown."""


def chapters(
    cells: Iterable[CellResult], trials: Iterable[TrialRecord], profiles: Iterable[ProfileRecord]
) -> list[Chapter]:
    """Returns a chapter per setting on two or more emulated links, most strategies first."""
    by_setting: dict[tuple[object, ...], list[CellResult]] = {}
    for cell in cells:
        if cell.ranked and cell.cell.links:
            by_setting.setdefault(setting(cell.cell, without=["links"]), []).append(cell)
    measured, wire = measured_links(trials), _wire_bytes(profiles)
    chapters: list[Chapter] = []
    for some in by_setting.values():
        links = slowest_first(measured[link] for link in {cell.cell.links: None for cell in some})
        if len(links) > 1:
            chapters.append(_chapter(len(chapters), some, links, _series(some, wire)))
    return sorted(chapters, key=lambda chapter: -len(chapter.grid.rows))


def _wire_bytes(profiles: Iterable[ProfileRecord]) -> dict[str, float]:
    """Returns bytes per step of the rank that sends most, of profiled cells."""
    return {
        profile.cell_id: max(profile.sent_bytes)
        for profile in profiles
        if profile.status == "ok" and profile.sent_bytes
    }


def _series(cells: Sequence[CellResult], wire: Mapping[str, float]) -> list[LinkSeries]:
    by_label: dict[str, dict[str, CellResult]] = {}
    for cell in cells:
        plain = dataclasses.replace(cell.varied(links="", nodes=1), placement=Placement())
        by_label.setdefault(named(plain), {})[cell.cell.links] = cell
    return [
        LinkSeries(
            label,
            by_link,
            {
                link: wire.get(cell.cell_id, cell.traffic.sent_bytes_per_step)
                for link, cell in by_link.items()
            },
        )
        for label, by_link in by_label.items()
    ]


def _chapter(
    index: int, cells: Sequence[CellResult], links: Sequence[MeasuredLink], series: list[LinkSeries]
) -> Chapter:
    group = Group((cells[0].varied(links=""), *cells[1:]))
    slowest = links[0].asked

    def order(line: LinkSeries) -> float:
        cell = line.by_link.get(slowest)
        return 0.0 if cell is None else -group.rate(cell).value

    series.sort(key=order)
    crossings = crossovers(series, links)
    return Chapter(
        group.full_title,
        tuple(links),
        _chart(f"links-{index}", group, links, series),
        _grid(f"links-table-{index}", group, links, series),
        group.unit,
        tuple(crossover.words for crossover in crossings[:MOST_NAMED]),
        max(0, len(crossings) - MOST_NAMED),
        order_by_bytes(series, links[0]),
    )


def _chart(
    name: str,
    group: Group[CellResult],
    links: Sequence[MeasuredLink],
    series: Sequence[LinkSeries],
) -> Bandwidths | None:
    """Returns the chart; None below two links that differ only in bandwidth."""
    drawn = [(link, rate) for link in links if not link.delayed and (rate := link.bits_per_second)]
    if len(drawn) < 2:
        return None
    lines = []
    for line in series:
        there = [
            (bandwidth, group.rate(line.by_link[link.asked]))
            for link, bandwidth in drawn
            if link.asked in line.by_link
        ]
        if there:
            bandwidths, rates = zip(*there, strict=True)
            lines.append(
                BandwidthLine(
                    line.label,
                    bandwidths,
                    tuple(rate.value for rate in rates),
                    tuple(rate.low for rate in rates),
                    tuple(rate.high for rate in rates),
                )
            )
    summary = (
        f"Throughput of {plural(len(lines), 'strategy variant')} over the measured bandwidth of"
        f" emulated links between nodes, {group.full_title}, from {drawn[0][0].rate} to"
        f" {drawn[-1][0].rate}: "
    )
    summary += "; ".join(
        f"{line.label} {number(line.values[0])} to {number(line.values[-1])} {group.unit}"
        for line in lines[:6]
    )
    notes = [EMULATED]
    if any(cell.placement.oversubscribed for cell in group.rows):
        notes.append(NOTES[OVERSUBSCRIBED].replace("hatched", "some of it"))
    places = tuple((bandwidth, link.words) for link, bandwidth in drawn)
    title, unit = group.full_title, group.unit
    return Bandwidths(name, title, unit, tuple(lines), places, summary, tuple(notes))


def _grid(
    name: str,
    group: Group[CellResult],
    links: Sequence[MeasuredLink],
    series: Sequence[LinkSeries],
) -> Grid[LinkedCell]:
    """Returns strategies by link; a row's own cell is that of its first link."""
    rows = []
    for line in series:
        first = next(line.by_link[link.asked] for link in links if link.asked in line.by_link)
        plain = first.varied(links="", nodes=1)
        rows.append(LinkedCell(**vars(plain), by_link=line.by_link, sent=line.sent))

    def over(link: MeasuredLink) -> Callable[[LinkedCell], Td]:
        def make(row: LinkedCell) -> Td:
            cell = row.by_link.get(link.asked)
            return words("") if cell is None else interval(cell, group.throughput)

        return make

    columns = [
        Column(
            link.words,
            group.unit,
            f"{link.words} asked for, emulated; measured {link.rate}, {link.latency}",
            over(link),
        )
        for link in links
    ]
    columns.append(
        Column(
            "Sent",
            "MiB per step",
            "by the rank that sends most",
            lambda row: numeral(in_mebibytes(row.sent), "sent", row.sent),
        )
    )
    return grid(name, f"Throughput over emulated links, {group.full_title}", rows, columns)
