"""One run as Markdown: the verdict, the rankings with intervals and what cannot be told apart,
failures, where and how."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from reports import facts, links, systems
from reports.groups import Group, Pick, Row, biggest, headline, named, verdict
from reports.largest import largest
from reports.markdown import escaped, table
from reports.run_report import RunReport
from reports.sections import require_some
from reports.text import (
    DASH,
    MIB,
    deviation,
    listed,
    missing,
    number,
    percent,
    plain,
    plural,
    scaled,
)

MOST_TIED = 4
ALIKE = "≈"
CAUTIONS = {
    "†": "a stand-in ran instead of the real thing",
    "‡": "more ranks than cores, so its times say nothing of real hardware",
}


def markdown(one: RunReport, wanted: Sequence[str] = ()) -> tuple[str, list[str]]:
    """The report, of all sections that have data or of the wanted ones; and which of these it
    lacks.

    Raises UsageError where it lacks all.
    """
    run = one.run
    parts = {name: made for name, make in SECTIONS.items() if (made := make(one))}
    absent = require_some(wanted, parts)
    lines = [
        (
            f"# Which parallelism strategy? Matrix {escaped(str(run['matrix']))}, run"
            f" {escaped(one.run_id)}"
        )
    ]
    ranked = sum(len(group.rows) for group in one.groups)
    told = (
        f"{facts.hardware(run)}; PyTorch {run['torch_version']}; {plural(len(one.cells), 'cell')},"
        f" {ranked} ranked"
    )
    lines.append(escaped(told))
    for name, made in parts.items():
        if not wanted or name in wanted:
            lines += [f"## {TITLES[name]}", *made]
    return "\n\n".join(lines) + "\n", absent


def _verdict(one: RunReport) -> list[str]:
    if search := largest(one.results):
        best = search.winner
        if best is None:
            return [f"No strategy has trained a model within {search.budget} per rank yet."]
        told = f"the largest model that trains here has {plain(best['reached'])} parameters, under"
        return [
            f"Within {search.budget} per rank, {told} **{escaped(named(best))}**.",
            *map(escaped, search.order),
        ]
    group = headline(list(one.groups))
    if group is None:
        return ["No cell of this run both finished and passed parity, so nothing is ranked."]
    found = verdict(group)
    what = plural(len(group.rows), "strategy variant")
    lines = [
        (
            f"Training **{escaped(group.workload)}** on {escaped(group.details)}, {what} that"
            " passed parity:"
        )
    ]
    picks = [f"- **Fastest: {_pick(found.fastest)}"]
    if found.faster:
        picks.append(
            f"- {escaped(named(found.faster.row))} was faster ({found.faster.value}), which says"
            " nothing of the real thing"
        )
    if found.frugal:
        then = f" {found.frugal.then}." if found.frugal.then else ""
        picks.append(f"- **Least memory: {_pick(found.frugal)}{then}")
    if found.balanced:
        then = f" {found.balanced.then}." if found.balanced.then else ""
        picks.append(f"- **Most throughput for its memory: {_pick(found.balanced)}{then}")
    lines.append("\n".join(picks))
    others = [verdict(other) for other in biggest(list(one.groups)) if len(other.rows) > 1]
    if len(others) > 1:
        rows = [
            [
                f"{other.group.workload} · {other.group.title}",
                f"{named(other.fastest.row)}, {other.fastest.value}, {other.fastest.interval}",
                f"{named(other.frugal.row)}, {other.frugal.value}" if other.frugal else DASH,
            ]
            for other in others
        ]
        lines.append(table(["workload and setting", "fastest", "least memory"], [], rows))
    return lines


def _pick(pick: Pick) -> str:
    tied = [named(row) for row in pick.tied]
    alike = f" Cannot be told apart from {escaped(listed(tied, MOST_TIED))}." if tied else ""
    return (
        f"{escaped(named(pick.row))}**, {pick.value} ({pick.interval}), parity"
        f" {escaped(str(pick.row['parity_verdict']))}.{alike}"
    )


def _ranking(one: RunReport) -> list[str]:
    lines = []
    for group in one.groups:
        lines += [f"### {escaped(group.workload)} · {escaped(group.title)}", _ranked(group)]
    if any(row["same_as_above"] for group in one.groups for row in group.rows):
        lines.append(
            f"{ALIKE} cannot be told apart from the one above: no difference is seen within rounds."
        )
    seen = "".join(named(row) for group in one.groups for row in group.rows)
    return [*lines, *(f"{mark} {said}." for mark, said in CAUTIONS.items() if mark in seen)]


def _ranked(group: Group) -> str:
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
    for row in group.rows:
        low, high = (row[f"{group.throughput}{end}"] for end in ("_low", "_high"))
        interval = "1 trial: no interval" if missing(low) else f"{number(low)} to {number(high)}"
        place = (
            f"{row['place']}{f' {ALIKE} ' + str(row['place'] - 1) if row['same_as_above'] else ''}"
        )
        figures = [
            number(row[group.throughput]),
            interval,
            scaled(row["step_seconds_p50"], 1e3),
            scaled(row["peak_memory_bytes"], 1 / MIB),
        ]
        rows.append([place, named(row), *figures, str(row["parity_verdict"])])
    return table(columns, [columns[0], *columns[2:6]], rows)


def _scaling(one: RunReport) -> list[str]:
    rows = [
        row
        for row in one.cells
        if row["devices"] > 1
        and not (missing(row["efficiency_own"]) and missing(row["efficiency_single"]))
    ]
    columns = [
        "strategy",
        "workload",
        "devices",
        "scaling",
        "precision",
        "against itself on one device",
        "against the plain process",
    ]
    told = [
        [
            named(row),
            str(row["workload"]),
            plain(row["devices"]),
            str(row["regime"]),
            str(row["precision"]),
            *_efficiencies(row),
        ]
        for row in rows
    ]
    said = "Throughput over so many times that of one device: 100 % is ideal."
    return [said, table(columns, [columns[2], *columns[5:]], told)] if rows else []


def _efficiencies(row: Row) -> list[str]:
    return [percent(row[name]) for name in ("efficiency_own", "efficiency_single")]


def _links(one: RunReport) -> list[str]:
    lines = []
    for chapter in links.chapters(one.cells, one.trials, one.results.explained):
        columns = [
            "strategy",
            *(f"{link.words} ({link.rate}, {link.latency} measured)" for link in chapter.links),
        ]
        rows = [
            [
                str(row.row["label"]),
                *(
                    "".join(part.text for part in cell.parts)
                    for cell in row.cells[: len(chapter.links)]
                ),
            ]
            for row in chapter.grid.rows
        ]
        lines += [
            f"### {escaped(chapter.title)}",
            f"Throughput ({chapter.unit}) over {links.EMULATED}.",
            table(columns, columns[1:], rows),
        ]
        lines.append(
            "\n".join(
                f"- {escaped(said)}" for said in (*chapter.crossovers, chapter.by_bytes) if said
            )
        )
    return [line for line in lines if line]


def _parity(one: RunReport) -> list[str]:
    judged = [row for row in one.cells if not missing(row.get("parity_loss_tolerance"))]
    columns = [
        "cell",
        "parity",
        "loss deviation",
        "allowed",
        "parameter deviation",
        "allowed there",
    ]
    rows = [
        [
            str(row["cell_name"]),
            str(row["parity_verdict"]),
            deviation(row["parity_max_loss_deviation"]),
            deviation(row["parity_loss_tolerance"]),
            deviation(row["parity_max_update_deviation"]),
            deviation(row["parity_update_tolerance"]),
        ]
        for row in judged
    ]
    return (
        ["Largest relative deviations from the reference.", table(columns, columns[2:], rows)]
        if rows
        else []
    )


def _failures(one: RunReport) -> list[str]:
    lines = []
    for failure in facts.failures(one.cells, one.trials):
        expected = ", as expected" if failure.row["expected"] else ""
        reason = escaped(str(failure.row["reason"] or "no reason was recorded"))
        lines.append(
            f"- **{failure.what}{expected}** {escaped(str(failure.row['cell_name']))}"
            f" ({failure.trials}): {reason}"
        )
    found = systems.all_systems(
        one.cells, [] if largest(one.results) else facts.unreached(one.run, one.cells)
    )
    for missed in systems.not_run(found):
        lines += [
            f"- **{escaped(missed.system)}**, {reason.what}: {escaped(reason.reason)}"
            for reason in missed.reasons
        ]
    return ["\n".join(lines)] if lines else []


def _facts(rows: Sequence[tuple[str, str]]) -> list[str]:
    return ["\n".join(f"- {escaped(name)}: {escaped(said)}" for name, said in rows)] if rows else []


SECTIONS: dict[str, Callable[[RunReport], list[str]]] = {
    "verdict": _verdict,
    "ranking": _ranking,
    "scaling": _scaling,
    "links": _links,
    "parity": _parity,
    "failures": _failures,
    "environment": lambda one: _facts(facts.environment(one.run)),
    "method": lambda one: _facts(facts.measured(one.cells)),
}
TITLES = {
    "verdict": "Verdict",
    "ranking": "Throughput",
    "scaling": "Scaling",
    "links": "Links",
    "parity": "Parity",
    "failures": "What failed, diverged or did not run",
    "environment": "Environment",
    "method": "How it was measured",
}
