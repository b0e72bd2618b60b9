"""Results of one run -> everything that the template shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from reports import (
    compared,
    curves,
    data,
    facts,
    figures,
    groups,
    largest,
    lines,
    links,
    profile,
    states,
    systems,
    table,
    traffic,
)
from reports.groups import FastestVerdict, Group, Row
from reports.largest import Largest
from reports.links import Chapter
from reports.run_report import ran
from reports.states import Buffers
from reports.svg import Picture, Pictures
from reports.systems import Missing, Overview
from reports.text import plural

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from harness.record.store import Results

MOST_PANELS = 12


@dataclass(frozen=True)
class Panel:
    """A picture with its heading, its legend in words and, for a numbered front, the names of the
    numbers."""

    title: str
    picture: Picture
    notes: tuple[str, ...] = ()
    numbered: tuple[data.Point, ...] = ()
    unit: str = ""


@dataclass(frozen=True)
class ComparedView:
    """A comparison as a picture and as a table."""

    title: str
    panel: Panel | None
    grid: table.Grid


@dataclass(frozen=True)
class Parity:
    passed: int
    judged: int
    steps: str
    unexpected: int
    """Diverged though the matrix does not expect it."""


@dataclass
class View:
    """What the page says; an empty list leaves its section out."""

    run: Row
    hardware: str
    environment: list[tuple[str, str]]
    counts: str
    measured: list[tuple[str, str]]
    headline: FastestVerdict | None = None
    verdicts: list[FastestVerdict] = field(default_factory=list)
    parity: Parity | None = None
    ranking: list[Panel] = field(default_factory=list)
    other_ranking: list[Panel] = field(default_factory=list)
    memory: list[Panel] = field(default_factory=list)
    front: list[Panel] = field(default_factory=list)
    scaling: list[Panel] = field(default_factory=list)
    efficiency: table.Grid | None = None
    losses: list[Panel] = field(default_factory=list)
    deviations: list[Panel] = field(default_factory=list)
    tolerances: list[facts.Tolerance] = field(default_factory=list)
    bubble: list[Panel] = field(default_factory=list)
    columns: list[table.Column] = field(default_factory=list)
    rows: list[table.TableRow] = field(default_factory=list)
    failures: list[facts.Failure] = field(default_factory=list)
    systems: list[Overview] = field(default_factory=list)
    not_run: list[Missing] = field(default_factory=list)
    states: list[Panel] = field(default_factory=list)
    states_table: table.Grid | None = None
    buffers: list[Buffers] = field(default_factory=list)
    ranks: list[Panel] = field(default_factory=list)
    ranks_table: table.Grid | None = None
    parts: list[Panel] = field(default_factory=list)
    """Of a profiled step; empty where no cell was explained."""
    parts_table: table.Grid | None = None
    peak_table: table.Grid | None = None
    traffic: list[Panel] = field(default_factory=list)
    traffic_table: table.Grid | None = None
    ring_bound: str = ""
    """In words, for the numbers of ranks that occur."""
    offload: table.Grid | None = None
    links: list[tuple[Chapter, Panel | None]] = field(default_factory=list)
    wrappers: list[ComparedView] = field(default_factory=list)
    variants: list[ComparedView] = field(default_factory=list)
    largest: Largest | None = None
    largest_panel: Panel | None = None
    figure_styles: str = ""

    @property
    def absent(self) -> list[Missing]:
        """Systems that this host could run nothing of."""
        return [one for one in self.not_run if one.kind == "absent"]

    def choices(self, name: str) -> list[Any]:
        """The values of a column that a reader can filter by, where there are several."""
        found = sorted({row.row[name] for row in self.rows})
        return found if len(found) > 1 else []


def make_view(results: Results) -> View:
    """Everything the page of one run shows; ValueError where there is not exactly one run."""
    one = ran(results)
    run, trials, cells, found = one.run, one.trials, list(one.cells), list(one.groups)
    view = View(
        run,
        facts.hardware(run),
        facts.environment(run),
        _counts(cells, found),
        facts.measured(cells),
    )
    view.failures = facts.failures(cells, trials)
    view.tolerances = facts.tolerances(cells)
    view.parity = _parity(cells)
    view.columns = table.columns(cells) if cells else []
    view.rows = table.table_rows(cells, found, view.columns)
    view.efficiency = table.efficiency(cells)
    view.states_table, view.buffers, view.ranks_table = (
        states.table(cells),
        states.buffers(cells),
        states.ranks_table(cells),
    )
    view.traffic_table, view.offload, view.ring_bound = (
        traffic.table(cells),
        traffic.offload(cells),
        traffic.ranks(cells),
    )
    linked = links.chapters(cells, trials, results.explained)
    told = [] if largest.is_search(run) else profile.known(cells, results.explained)
    view.parts_table, view.peak_table = profile.table(told), profile.memory(told)
    if largest.is_search(run):
        view.largest = largest.largest(results)
    unreached = [] if view.largest else facts.unreached(run, cells)
    by_system = systems.all_systems(cells, unreached)
    view.not_run = systems.not_run(by_system)
    if not view.largest:
        view.systems = systems.overview(by_system, found, groups.headline(found))
        _verdicts(view, found)
    _pictures(view, cells, [] if view.largest else found, told, linked)
    return view


def _counts(cells: Sequence[Row], found: Sequence[Group]) -> str:
    ranked = sum(len(group.rows) for group in found)
    return f"{plural(len(cells), 'cell')}, {ranked} ranked"


def _parity(cells: Sequence[Row]) -> Parity | None:
    judged = [
        row for row in cells if row["parity_verdict"] in ("exact", "within tolerance", "diverged")
    ]
    if not judged:
        return None
    steps = sorted({int(row["parity_steps"]) for row in judged})
    away = [row for row in judged if row["parity_verdict"] == "diverged"]
    return Parity(
        len(judged) - len(away),
        len(judged),
        " or ".join(map(str, steps)),
        sum(not row["expected"] for row in away),
    )


def _verdicts(view: View, found: list[Group]) -> None:
    leading = groups.headline(found)
    if leading is None:
        return
    view.headline = groups.verdict(leading)
    view.verdicts = [
        groups.verdict(group) for group in groups.biggest(found) if len(group.rows) > 1
    ]


def _pictures(
    view: View,
    cells: Sequence[Row],
    found: list[Group],
    told: Sequence[Row],
    linked: Sequence[Chapter],
) -> None:
    pictures = Pictures()

    def panel(shown: Any, draw: Callable[[Any], Figure], title: str = "", **more: Any) -> Panel:
        return Panel(
            title or shown.title, pictures.add(draw, shown), getattr(shown, "notes", ()), **more
        )

    def lined(shown: Any, write: Callable[[Any], str], title: str = "") -> Panel:
        return Panel(title or shown.title, pictures.write(write, shown), shown.notes)

    comparable = [group for group in found if len(group.rows) > 1][:MOST_PANELS]
    for index, group in enumerate(comparable):
        title = (
            group.title
            if group.workload == found[0].workload
            else f"{group.workload} · {group.title}"
        )
        bars = lined(data.throughput_bars(group, f"speed-{index}"), lines.bars, title)
        (view.ranking if group.workload == found[0].workload else view.other_ranking).append(bars)
        if (memory := data.memory_bars(group, f"memory-{index}")) is not None:
            view.memory.append(lined(memory, lines.bars, title))
        if (scatter := data.memory_scatter(group, f"front-{index}")) is not None:
            view.front.append(
                panel(
                    scatter,
                    figures.scatter,
                    title,
                    numbered=tuple(scatter.front),
                    unit=scatter.unit,
                )
            )
    for regime in ("strong", "weak"):
        view.scaling += [panel(one, figures.scaling) for one in curves.scaling(cells, regime)[:4]]
    view.losses = [panel(one, figures.losses) for one in curves.losses(cells)[:6]]
    for column, tolerance, title in (
        (
            "parity_max_loss_deviation",
            "parity_loss_tolerance",
            "Loss: largest deviation of any step",
        ),
        (
            "parity_max_update_deviation",
            "parity_update_tolerance",
            "Parameters: largest deviation of any tensor, relative to its update",
        ),
    ):
        if (bars_ := data.deviation_bars(cells, column, tolerance, f"{column}", title)) is not None:
            view.deviations.append(lined(bars_, lines.bars))
    if (bubble := data.bubble_bars(cells, "bubble")) is not None:
        view.bubble = [lined(bubble, lines.bars)]
    if not view.largest:  # models of a search differ in size
        view.states = [lined(one, lines.stacks) for one in states.charts(cells)[:MOST_PANELS]]
        view.traffic = [lined(one, lines.bars) for one in traffic.charts(cells)[:MOST_PANELS]]
    view.parts = [lined(one, lines.stacks) for one in profile.charts(told)[:MOST_PANELS]]
    view.links = [(one, panel(one.chart, figures.links) if one.chart else None) for one in linked]
    if (uneven := states.ranks(cells)) is not None:
        view.ranks = [lined(uneven, lines.ranks)]
    view.wrappers = [
        ComparedView(one.title, lined(one.bars, lines.bars), one.grid)
        for one in compared.wrappers(cells)[:MOST_PANELS]
    ]
    for one in compared.variants(cells)[:MOST_PANELS]:
        view.variants.append(
            ComparedView(
                one.title, lined(one.stacks, lines.stacks) if one.stacks else None, one.grid
            )
        )
    if view.largest:
        view.largest_panel = lined(view.largest.bars, lines.bars)
    pictures.draw()
    view.figure_styles = pictures.styles
