from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from harness.analysis.cell_result import CellResult, Placement
from harness.analysis.ranking import compare
from harness.analysis.setting import grouped, setting
from harness.cell.cell import UNSHAPED, Link
from harness.cell.errors import plural
from harness.record.profile_record import ProfileRecord
from harness.record.trial import TrialRecord
from reports import blocks as ui
from reports.blocks import data, prose
from reports.columns import ReportColumn, computed, interval, table_of, text_cell
from reports.groups import Group
from reports.line_chart import Bandwidths, Line
from reports.names import NOTES, OVERSUBSCRIBED, cell_name, named
from reports.run_report import RunReport
from reports.text import DASH, bits, number, size

MOST_NAMED = 12
EMULATED = "emulated links between nodes of one machine"


@dataclass(frozen=True)
class MeasuredLink:
    request: str
    bits_per_second: float | None
    latency_seconds: float | None
    emulation: str

    @property
    def delayed(self) -> bool:
        """Whether latency was requested too."""
        try:
            return Link.of(self.request).delay_seconds > 0
        except ValueError:
            return False

    @property
    def name(self) -> str:
        """Requested link: `1gbit`, `unshaped`."""
        return "unshaped" if self.request == UNSHAPED else self.request

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
        request: MeasuredLink(
            request,
            _median([trial.link_bits_per_second for trial in some]),
            _median([trial.link_latency_seconds for trial in some]),
            next((trial.link_emulation for trial in some if trial.link_emulation), ""),
        )
        for request, some in by_link.items()
    }


def _median(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return statistics.median(present) if present else None


def slowest_first(links: Iterable[MeasuredLink]) -> list[MeasuredLink]:
    def order(link: MeasuredLink) -> tuple[bool, bool, float]:
        return link.delayed, link.bits_per_second is None, link.bits_per_second or 0.0

    return sorted(links, key=order)


@dataclass(frozen=True)
class LinkSeries:
    """A strategy's cells in one setting, by link."""

    label: str
    by_link: Mapping[str, CellResult]
    wire_bytes: Mapping[str, float | None]
    """Busiest rank's bytes per step, by link."""

    @property
    def sent(self) -> float | None:
        """Busiest rank's bytes per step."""
        return _median([*self.wire_bytes.values()])


Crossover = tuple[float, str]
"""The smaller absolute log ratio of the throughputs at the two links, and a sentence."""


def crossovers(series: Sequence[LinkSeries], links: Sequence[MeasuredLink]) -> list[str]:
    """Returns sentences about crossovers, clearest first.

    One strategy is significantly faster at one link, and the other at the next such link. Crossings
    are interpolated on logarithmic axes.
    """
    with_bandwidth = [link for link in links if not link.delayed and link.bits_per_second]
    found = [*_by_bandwidth(series, with_bandwidth), *_by_delay(series, links)]
    return [sentence for _, sentence in sorted(found, key=lambda crossover: -crossover[0])]


def _by_bandwidth(
    series: Sequence[LinkSeries], links: Sequence[MeasuredLink]
) -> Iterator[Crossover]:
    for a, b in itertools.combinations(series, 2):
        both = [link for link in links if link.request in a.by_link and link.request in b.by_link]
        leads = [_lead(a, b, link.request) for link in both]
        orders = [_order(a, b, link.request) for link in both]
        clear = [index for index, order in enumerate(orders) if order]
        for first, last in itertools.pairwise(clear):
            lead, after = leads[first], leads[last]
            if orders[first] == orders[last] or lead * after >= 0:
                continue
            points = [
                (math.log(link.bits_per_second or 1.0), value)
                for link, value in zip(both[first : last + 1], leads[first:], strict=False)
            ]
            fast, slow = (a, b) if lead > 0 else (b, a)
            text = (
                f"Below about {bits(math.exp(_zero(points)), 2)} {fast.label} is faster than"
                f" {slow.label}, above it slower (measured at {both[first].rate} and"
                f" {both[last].rate})."
            )
            yield min(abs(lead), abs(after)), text


def _by_delay(series: Sequence[LinkSeries], links: Sequence[MeasuredLink]) -> Iterator[Crossover]:
    by_rate = {Link.of(link.request).bits_per_second: link for link in links if not link.delayed}
    for far in links:
        near = by_rate.get(Link.of(far.request).bits_per_second) if far.delayed else None
        for a, b in itertools.combinations(series, 2) if near else ():
            if near is None or any(
                link.request not in strategy.by_link for link in (near, far) for strategy in (a, b)
            ):
                continue
            here, there = _order(a, b, near.request), _order(a, b, far.request)
            if here * there < 0:
                fast, slow = (a, b) if here > 0 else (b, a)
                text = (
                    f"Latency reverses an order: over {near.name} {fast.label} is faster than"
                    f" {slow.label}, over {far.name} slower."
                )
                leads = [abs(_lead(a, b, link.request)) for link in (near, far)]
                yield min(leads), text


def _lead(a: LinkSeries, b: LinkSeries, link: str) -> float:
    first, second = (strategy.by_link[link].speed.samples_per_second or 1.0 for strategy in (a, b))
    return math.log(first / second)


def _order(a: LinkSeries, b: LinkSeries, link: str) -> int:
    """Returns 1 if `a` is clearly faster, -1 if clearly slower, else 0."""
    comparison = compare(a.by_link[link], b.by_link[link])
    return {"faster": 1, "slower": -1}.get(comparison.verdict, 0) if comparison else 0


def _zero(points: Sequence[tuple[float, float]]) -> float:
    (x, y), (after, then) = next(
        pair for pair in itertools.pairwise(points) if pair[0][1] * pair[1][1] <= 0
    )
    return x + (after - x) * y / (y - then) if y != then else x


@dataclass(frozen=True)
class Chapter:
    """Strategies over several links in one setting."""

    index: int
    group: Group
    links: tuple[MeasuredLink, ...]
    series: tuple[LinkSeries, ...]

    @functools.cached_property
    def chart(self) -> Bandwidths | None:
        return _chart(f"links-{self.index}", self.group, self.links, self.series)

    @functools.cached_property
    def table(self) -> ui.Table:
        return _link_table(f"links-table-{self.index}", self.group, self.links, self.series)

    @functools.cached_property
    def crossovers(self) -> list[str]:
        return crossovers(self.series, self.links)


def chapters(
    cells: Iterable[CellResult], trials: Iterable[TrialRecord], profiles: Iterable[ProfileRecord]
) -> list[Chapter]:
    linked = [cell for cell in cells if cell.ranked and cell.cell.links]
    by_setting = grouped(linked, lambda cell: setting(cell.cell, without=["links"]))
    measured, wire = measured_links(trials), _wire_bytes(profiles)
    chapters: list[Chapter] = []
    for some in by_setting.values():
        links = slowest_first(measured[link] for link in {cell.cell.links: None for cell in some})
        if len(links) > 1:
            chapters.append(_chapter(len(chapters), some, links, _series(some, wire)))
    return sorted(chapters, key=lambda chapter: -len(chapter.table.rows))


def _wire_bytes(profiles: Iterable[ProfileRecord]) -> dict[str, float]:
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

    def order(line: LinkSeries) -> float:
        cell = line.by_link.get(links[0].request)
        return 0.0 if cell is None else -group.rate(cell).value

    return Chapter(index, group, tuple(links), tuple(sorted(series, key=order)))


def _chart(
    name: str, group: Group, links: Sequence[MeasuredLink], series: Sequence[LinkSeries]
) -> Bandwidths | None:
    drawn = [(link, rate) for link in links if not link.delayed and (rate := link.bits_per_second)]
    if len(drawn) < 2:
        return None
    lines = []
    for line in series:
        there = [
            (bandwidth, group.rate(line.by_link[link.request]))
            for link, bandwidth in drawn
            if link.request in line.by_link
        ]
        if there:
            bandwidths, rates = zip(*there, strict=True)
            lines.append(
                Line(
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
    summary += "; ".join(f"{line.summary} {group.unit}" for line in lines[:6])
    notes = [EMULATED]
    if any(cell.placement.oversubscribed for cell in group.rows):
        notes.append(NOTES[OVERSUBSCRIBED].replace("hatched", "some of it"))
    places = tuple((bandwidth, link.name) for link, bandwidth in drawn)
    title, unit = group.full_title, group.unit
    return Bandwidths(name, title, unit, tuple(lines), places, summary, tuple(notes))


def _link_table(
    name: str, group: Group, links: Sequence[MeasuredLink], series: Sequence[LinkSeries]
) -> ui.Table:
    def over(link: MeasuredLink) -> Callable[[LinkSeries], ui.Td]:
        def make(line: LinkSeries) -> ui.Td:
            cell = line.by_link.get(link.request)
            return text_cell("") if cell is None else interval(cell, group.throughput)

        return make

    columns = [
        ReportColumn(
            link.name,
            over(link),
            f"{group.unit}; {link.rate}, {link.latency} measured",
            "requested, and emulated",
        )
        for link in links
    ]
    by_rank = "by the rank that sends most"
    columns.append(computed("Sent", "sent", lambda line: line.sent, size, "per step", by_rank))
    rows = []
    for line in series:
        first = next(line.by_link[link.request] for link in links if link.request in line.by_link)
        plain = first.varied(links="", nodes=1)
        cells = [column.make(line) for column in columns]
        rows.append(ui.Row(cell_name(plain), cells, {"data-cell": first.cell_id}))
    label = f"Throughput over emulated links, {group.full_title}"
    return table_of(name, label, "Strategy", columns, rows)


def links_blocks(report: RunReport) -> ui.Blocks:
    found = chapters(report.cells, report.trials, report.profiles)
    blocks = [block for chapter in found for block in _chapter_blocks(chapter)]
    return [ui.Part("", blocks, prose("links"))]


def _chapter_blocks(chapter: Chapter) -> ui.Blocks:
    title, found = ui.Heading(data(chapter.group.full_title)), chapter.crossovers
    chart = ui.Charts([ui.Chart(chapter.chart)]) if chapter.chart else title
    crossings: ui.Blocks = [
        ui.Heading("Where strategies change places"),
        ui.Bullets(list(map(data, found[:MOST_NAMED]))),
    ]
    if not found:
        crossings.append(ui.Paragraph(prose("no crossovers")))
    if (more := len(found) - MOST_NAMED) > 0:
        text = prose("more crossovers", pairs=plural(more, "more pair"))
        crossings.append(ui.Paragraph(text, "small"))
    crossings.append(ui.Paragraph(prose("crossovers"), "small"))
    what = ui.Paragraph(f"Throughput ({chapter.group.unit}) over {EMULATED}.")
    return [
        ui.Only("text", [title, what]),
        ui.Box("side-by-side", [ui.Only("page", [chart]), ui.Box("", crossings)]),
        chapter.table,
        _requests_table(chapter.links),
    ]


def _requests_table(links: Sequence[MeasuredLink]) -> ui.Table:
    columns = ui.heads(
        "Bandwidth (measured)", "Latency (one way, measured)", "How it is emulated: prose"
    )
    rows = [
        ui.Row(
            data(link.name),
            [ui.Td(link.rate), ui.Td(link.latency), ui.Td(data(link.emulation or DASH), "prose")],
        )
        for link in links
    ]
    return ui.Table("", "Emulated links", "Requested link", columns, rows, "compact")
