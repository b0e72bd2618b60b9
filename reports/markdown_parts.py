"""Markdown of each section of a run's report; empty without data."""

from __future__ import annotations

from collections.abc import Iterable

from harness.analysis.answer import answer
from harness.analysis.cell_result import CellResult
from reports import facts, links, systems
from reports.failures import failures
from reports.groups import RankedGroup, biggest
from reports.markdown import escaped, table
from reports.methods import methods
from reports.names import OVERSUBSCRIBED, STAND_IN, named
from reports.run_report import RunReport
from reports.sections import Paragraphs
from reports.table import scaled_cells
from reports.text import DASH, MIB, deviation, listed, number, percent, plain, plural, scaled
from reports.verdict import FastestVerdict, Pick, verdict

MOST_TIED = 4
ALIKE = "≈"
CAUTIONS = {
    STAND_IN: "a stand-in ran instead of the real thing",
    OVERSUBSCRIBED: "more ranks than cores, so its times say nothing of real hardware",
}


def verdict_text(report: RunReport) -> Paragraphs:
    if search := report.largest:
        best = search.winner
        if best is None:
            return [f"No strategy has trained a model within {search.budget} per rank yet."]
        return [
            (
                f"Within {search.budget} per rank, the {search.what} that trains here has"
                f" {plain(best.reached)} {search.unit}, under **{escaped(named(best))}**."
            ),
            *map(escaped, search.order),
        ]
    if report.leading is None:
        return ["No cell of this run both finished and passed parity, so nothing is ranked."]
    group = report.leading
    what = plural(len(group.rows), "strategy variant")
    paragraphs = [
        (
            f"Training **{escaped(group.workload)}** on {escaped(group.details)}, {what} that"
            " passed parity:"
        ),
        *_advised(group),
        "\n".join(_picks(verdict(group))),
    ]
    others = [verdict(other) for other in biggest(report.groups) if len(other.rows) > 1]
    if len(others) > 1:
        rows = [
            [
                other.group.full_title,
                _in_a_row(other.fastest, other.fastest.interval),
                _in_a_row(other.frugal) if other.frugal else DASH,
            ]
            for other in others
        ]
        paragraphs.append(table(["workload and setting", "fastest", "least memory"], [], rows))
    return paragraphs


def _advised(group: RankedGroup) -> Paragraphs:
    advised = answer(group.rows)
    if advised is None:
        return []
    lines = [f"- **{advice.role}** {escaped(advice.sentence)}." for advice in advised.advice]
    if advised.caveat:
        lines.append(f"- **Caveat** {escaped(advised.caveat)}.")
    return ["\n".join(lines)]


def _picks(best: FastestVerdict) -> Iterable[str]:
    yield f"- **Fastest: {_pick(best.fastest)}"
    if best.faster:
        yield (
            f"- {escaped(named(best.faster.row))} was faster ({best.faster.value}), which says"
            " nothing of the real thing"
        )
    for title, pick in (
        ("Least memory", best.frugal),
        ("Most throughput for its memory", best.balanced),
    ):
        if pick:
            yield f"- **{title}: {_pick(pick)}{f' {pick.then}.' if pick.then else ''}"


def _in_a_row(pick: Pick, *more: str) -> str:
    return ", ".join([named(pick.row, place=False), pick.value, *more])


def _pick(pick: Pick) -> str:
    tied = [named(cell, place=False) for cell in pick.tied]
    alike = f" Cannot be told apart from {escaped(listed(tied, MOST_TIED))}." if tied else ""
    return (
        f"{escaped(named(pick.row, place=False))}**, {pick.value} ({pick.interval}), parity"
        f" {escaped(pick.row.parity.verdict or DASH)}.{alike}"
    )


def ranking_text(report: RunReport) -> Paragraphs:
    paragraphs = []
    for group in report.groups:
        paragraphs += [f"### {escaped(group.full_title)}", _ranked(group)]
    cells = [cell for group in report.groups for cell in group.rows]
    if any(cell.same_as_above for cell in cells):
        paragraphs.append(
            f"{ALIKE} cannot be told apart from the one above: no difference is seen within rounds."
        )
    names = "".join(map(named, cells))
    cautions = [f"{mark} {text}." for mark, text in CAUTIONS.items() if mark in names]
    return [*paragraphs, *cautions]


def _ranked(group: RankedGroup) -> str:
    columns = [
        "place",
        "strategy",
        f"throughput ({group.unit})",
        "95 % interval",
        "step p50 (ms)",
        "peak memory (MiB)",
        "parity",
    ]
    rows = []
    for cell in group.rows:
        rate = group.rate(cell)
        rows.append(
            [
                f"{cell.place}{f' {ALIKE} {cell.place - 1}' if cell.same_as_above else ''}",
                named(cell),
                number(rate.value),
                (
                    "1 trial: no interval"
                    if rate.low is None
                    else f"{number(rate.low)} to {number(rate.high)}"
                ),
                scaled(cell.times.step_seconds_p50, 1e3),
                scaled(cell.memory.peak_memory_bytes, 1 / MIB),
                cell.parity.verdict or DASH,
            ]
        )
    return table(columns, [columns[0], *columns[2:6]], rows)


def scaling_text(report: RunReport) -> Paragraphs:
    columns = [
        "strategy",
        "workload",
        "devices",
        "scaling",
        "precision",
        "against itself on one device",
        "against the plain process",
    ]
    rows = [
        [
            named(cell),
            cell.cell.workload,
            plain(cell.cell.devices),
            cell.cell.regime,
            cell.cell.precision,
            percent(cell.relative.efficiency_own),
            percent(cell.relative.efficiency_single),
        ]
        for cell in scaled_cells(report.cells)
    ]
    if not rows:
        return []
    meaning = (
        "Scaling efficiency: throughput over (devices x throughput on one device), 100 % is ideal."
    )
    return [meaning, table(columns, [columns[2], *columns[5:]], rows)]


def links_text(report: RunReport) -> Paragraphs:
    paragraphs: Paragraphs = []
    for chapter in links.chapters(report.cells, report.trials, report.profiles):
        columns = [
            "strategy",
            *(f"{link.words} ({link.rate}, {link.latency} measured)" for link in chapter.links),
        ]
        rows = [
            [
                row.row.cell.label,
                *(
                    "".join(part.text for part in cell.parts)
                    for cell in row.cells[: len(chapter.links)]
                ),
            ]
            for row in chapter.grid.rows
        ]
        sentences = [text for text in (*chapter.crossovers, chapter.by_bytes) if text]
        paragraphs += [
            f"### {escaped(chapter.title)}",
            f"Throughput ({chapter.unit}) over {links.EMULATED}.",
            table(columns, columns[1:], rows),
            "\n".join(f"- {escaped(text)}" for text in sentences),
        ]
    return [paragraph for paragraph in paragraphs if paragraph]


def parity_text(report: RunReport) -> Paragraphs:
    columns = [
        "cell",
        "parity",
        "loss deviation",
        "allowed",
        "parameter deviation",
        "allowed there",
    ]
    rows = [_judged(cell) for cell in report.cells if cell.parity.loss_tolerance is not None]
    if not rows:
        return []
    return ["Largest relative deviations from the reference.", table(columns, columns[2:], rows)]


def _judged(cell: CellResult) -> list[str]:
    return [
        cell.cell.name,
        cell.parity.verdict or DASH,
        deviation(cell.parity.max_loss_deviation),
        deviation(cell.parity.loss_tolerance),
        deviation(cell.parity.max_update_deviation),
        deviation(cell.parity.update_tolerance),
    ]


def failures_text(report: RunReport) -> Paragraphs:
    lines = []
    for failure in failures(report.cells, report.trials):
        expected = ", as expected" if failure.row.expected else ""
        reason = escaped(failure.row.reason or "no reason was recorded")
        lines.append(
            f"- **{failure.what}{expected}** {escaped(failure.row.cell.name)} ({failure.trials}):"
            f" {reason}"
        )
    for missing in systems.not_run(report.systems):
        lines += [
            f"- **{escaped(missing.system)}**, {reason.what}: {escaped(reason.reason)}"
            for reason in missing.reasons
        ]
    return ["\n".join(lines)] if lines else []


def environment_text(report: RunReport) -> Paragraphs:
    return _listed(facts.environment(report.run))


def method_text(report: RunReport) -> Paragraphs:
    return _listed(methods(report.cells, report.adjustment))


def _listed(rows: Iterable[tuple[str, str]]) -> Paragraphs:
    return ["\n".join(f"- {escaped(name)}: {escaped(text)}" for name, text in rows)]
