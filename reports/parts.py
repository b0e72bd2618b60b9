"""Contents of each section of a run's page; a section without data has none."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from harness.analysis.answer import Answer, answer
from harness.analysis.cell_result import CellResult
from reports import (
    bubble,
    data,
    deviations,
    failures,
    figures,
    front,
    gpu_time,
    groups,
    lines,
    links,
    losses,
    methods,
    profile,
    rank_peaks,
    scaling,
    states,
    systems,
    table,
    traffic,
    variants,
    wrappers,
)
from reports.grid import Grid
from reports.groups import RankedGroup
from reports.largest import Largest
from reports.methods import Tolerance
from reports.panels import Panel, Panels
from reports.run_report import RunReport
from reports.verdict import FastestVerdict, verdict

MOST_PANELS = 12


@dataclass(frozen=True)
class Parity:
    passed: int
    judged: int
    steps: str
    unexpected: int
    """Divergences that the matrix does not expect."""
    set_back: int
    """Cells rewound between timed steps and verified again."""

    @classmethod
    def of(cls, report: RunReport) -> Parity | None:
        """Returns None if no cell was verified."""
        verdicts = ("exact", "within tolerance", "diverged")
        judged = [cell for cell in report.cells if cell.parity.verdict in verdicts]
        if not judged:
            return None
        steps = sorted({cell.cell.parity_steps for cell in judged})
        away = [cell for cell in judged if cell.parity.verdict == "diverged"]
        unexpected = sum(not cell.expected for cell in away)
        words = " or ".join(map(str, steps))
        set_back = sum(bool(cell.parity.rewinds) for cell in judged)
        return cls(len(judged) - len(away), len(judged), words, unexpected, set_back)


@dataclass(frozen=True)
class VerdictPart:
    answer: Answer | None
    """Which strategy of the headline's group to use."""
    headline: FastestVerdict | None
    verdicts: list[FastestVerdict]
    """Verdicts on the largest group of each workload and number of devices."""
    parity: Parity | None
    largest: Largest | None
    recorded: bool


def verdict_part(report: RunReport, _: Panels) -> VerdictPart:
    leading = report.leading
    several = [group for group in groups.biggest(report.groups) if len(group.rows) > 1]
    return VerdictPart(
        answer(leading.rows) if leading else None,
        verdict(leading) if leading else None,
        [verdict(group) for group in several] if leading else [],
        Parity.of(report),
        report.largest,
        bool(report.cells),
    )


@dataclass(frozen=True)
class LargestPart:
    largest: Largest
    panel: Panel


def largest_part(report: RunReport, panels: Panels) -> LargestPart | None:
    largest = report.largest
    return LargestPart(largest, panels.written(largest.bars, lines.bars)) if largest else None


@dataclass(frozen=True)
class SystemsPart:
    systems: list[systems.Overview]
    absent: list[str]
    """Systems of which this host could run nothing."""


def systems_part(report: RunReport, _: Panels) -> SystemsPart | None:
    if report.largest:
        return None
    overviews = systems.overview(report.systems, report.groups, report.leading)
    missing = systems.not_run(report.systems)
    absent = [system.system for system in missing if system.kind == "absent"]
    return SystemsPart(overviews, absent) if overviews else None


def _comparable(report: RunReport) -> list[tuple[int, RankedGroup]]:
    """Numbers the groups whose cells are compared by speed."""
    several = [group for group in report.groups if len(group.rows) > 1]
    return [] if report.largest else list(enumerate(several[:MOST_PANELS]))


@dataclass(frozen=True)
class RankingPart:
    main: list[Panel]
    """Panels of the workload with most cells."""
    other: list[Panel]


def ranking_part(report: RunReport, panels: Panels) -> RankingPart | None:
    part = RankingPart([], [])
    for index, group in _comparable(report):
        main = report.groups[0].workload
        bars = data.throughput_bars(group, f"speed-{index}")
        panel = panels.written(bars, lines.bars, group.title_beside(main))
        (part.main if group.workload == main else part.other).append(panel)
    return part if part.main or part.other else None


def memory_part(report: RunReport, panels: Panels) -> list[Panel]:
    return [
        panels.written(bars, lines.bars, group.title_beside(report.groups[0].workload))
        for index, group in _comparable(report)
        if (bars := data.memory_bars(group, f"memory-{index}"))
    ]


def front_part(report: RunReport, panels: Panels) -> list[Panel]:
    return [
        dataclasses.replace(
            panels.drawn(scatter, figures.scatter, group.title_beside(report.groups[0].workload)),
            numbered=tuple(scatter.front),
            unit=scatter.unit,
        )
        for index, group in _comparable(report)
        if (scatter := front.memory_scatter(group, f"front-{index}"))
    ]


@dataclass(frozen=True)
class ScalingPart:
    panels: list[Panel]
    efficiency: Grid[CellResult] | None


def scaling_part(report: RunReport, panels: Panels) -> ScalingPart | None:
    drawn = [
        panels.drawn(curves, figures.scaling)
        for regime in ("strong", "weak")
        for curves in scaling.scaling(report.cells, regime)[:4]
    ]
    efficiency = table.efficiency(report.cells)
    return ScalingPart(drawn, efficiency) if drawn or efficiency else None


@dataclass(frozen=True)
class StatesPart:
    panels: list[Panel]
    table: Grid[CellResult] | None
    buffers: list[states.Buffers]
    ranks: list[Panel]
    ranks_table: Grid[CellResult] | None


def states_part(report: RunReport, panels: Panels) -> StatesPart | None:
    cells = report.cells
    charts = [] if report.largest else states.charts(cells)  # Models of a search differ in size.
    uneven = rank_peaks.chart(cells)
    part = StatesPart(
        [panels.written(chart, lines.stacks) for chart in charts[:MOST_PANELS]],
        states.table(cells),
        states.buffers(cells),
        [panels.written(uneven, lines.ranks)] if uneven else [],
        rank_peaks.table(cells),
    )
    return part if part.panels or part.table else None


@dataclass(frozen=True)
class TimePart:
    panels: list[Panel]
    table: Grid[profile.ProfiledCell] | None
    peak_table: Grid[profile.ProfiledCell] | None
    gpu_table: Grid[profile.ProfiledCell] | None


def time_part(report: RunReport, panels: Panels) -> TimePart | None:
    cells = report.profiled
    drawn = [panels.written(chart, lines.stacks) for chart in profile.charts(cells)[:MOST_PANELS]]
    if not drawn:
        return None
    return TimePart(drawn, profile.table(cells), profile.memory(cells), gpu_time.table(cells))


@dataclass(frozen=True)
class TrafficPart:
    panels: list[Panel]
    table: Grid[CellResult] | None
    ring_bound: str
    """Bound for the numbers of ranks that occur, as text."""
    offload: Grid[CellResult] | None


def traffic_part(report: RunReport, panels: Panels) -> TrafficPart | None:
    cells = report.cells
    charts = [] if report.largest else traffic.charts(cells)
    part = TrafficPart(
        [panels.written(chart, lines.bars) for chart in charts[:MOST_PANELS]],
        traffic.table(cells),
        traffic.bounds_in_words(cells),
        traffic.offload(cells),
    )
    return part if part.panels or part.table or part.offload else None


def links_part(report: RunReport, panels: Panels) -> list[tuple[links.Chapter, Panel | None]]:
    return [
        (chapter, panels.drawn(chapter.chart, figures.links) if chapter.chart else None)
        for chapter in links.chapters(report.cells, report.trials, report.profiles)
    ]


@dataclass(frozen=True)
class ParityPart:
    losses: list[Panel]
    deviations: list[Panel]


def parity_part(report: RunReport, panels: Panels) -> ParityPart | None:
    part = ParityPart(
        [panels.drawn(curves, figures.losses) for curves in losses.losses(report.cells)[:6]],
        [panels.written(bars, lines.bars) for bars in deviations.deviation_bars(report.cells)],
    )
    return part if part.losses or part.deviations else None


def bubble_part(report: RunReport, panels: Panels) -> list[Panel]:
    bars = bubble.bubble_bars(report.cells, "bubble")
    return [panels.written(bars, lines.bars)] if bars else []


def wrappers_part(report: RunReport, panels: Panels) -> list[tuple[wrappers.Wrappers, Panel]]:
    return [
        (compared, panels.written(compared.bars, lines.bars))
        for compared in wrappers.wrappers(report.cells)[:MOST_PANELS]
    ]


def variants_part(
    report: RunReport, panels: Panels
) -> list[tuple[variants.Variants, Panel | None]]:
    return [
        (compared, panels.written(compared.stacks, lines.stacks) if compared.stacks else None)
        for compared in variants.variants(report.cells)[:MOST_PANELS]
    ]


@dataclass(frozen=True)
class CellsPart:
    grid: Grid[CellResult]

    def choices(self, name: str) -> list[object]:
        """Returns a field's values for filtering; empty if there is only one."""
        values = sorted({row.row.column(name) for row in self.grid.rows})
        return values if len(values) > 1 else []


def cells_part(report: RunReport, _: Panels) -> CellsPart | None:
    return CellsPart(table.full_table(report.cells, report.groups)) if report.cells else None


@dataclass(frozen=True)
class FailuresPart:
    failures: list[failures.Failure]
    not_run: list[systems.Missing]


def failures_part(report: RunReport, _: Panels) -> FailuresPart | None:
    part = FailuresPart(
        failures.failures(report.cells, report.trials), systems.not_run(report.systems)
    )
    return part if part.failures or part.not_run else None


@dataclass(frozen=True)
class MethodPart:
    methods: list[tuple[str, str]]
    parity: Parity | None
    tolerances: list[Tolerance]


def method_part(report: RunReport, _: Panels) -> MethodPart:
    cells = report.cells
    words = methods.methods(cells, report.adjustment)
    return MethodPart(words, Parity.of(report), methods.tolerances(cells))
