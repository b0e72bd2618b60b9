"""The verdict: what to use, its figures, and whether it is the same training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from harness.analysis.answer import Answer, why_no_advice, why_no_more_trials
from harness.analysis.cell_result import CellResult
from harness.spec.text import plural
from reports import blocks as ui
from reports.blocks import data, phrase, prose, strong
from reports.columns import ReportColumn, cell_table, mebibytes, throughput_column, word, words
from reports.groups import RankedCell, RankedGroup, fairly_timed, of_real_things, tied_with_fastest
from reports.names import cell_name, disturbance, gpu_findings
from reports.run_report import RunReport
from reports.text import MIB, number, plain


@dataclass(frozen=True)
class Pick:
    """The best cell in one respect, as text."""

    row: RankedCell
    value: str
    interval: str
    tied: tuple[RankedCell, ...] = ()


@dataclass(frozen=True)
class GroupVerdict:
    group: RankedGroup
    fastest: Pick
    frugal: Pick | None


def verdict(group: RankedGroup) -> GroupVerdict:
    timed = fairly_timed(group)
    tied = tuple(tied_with_fastest(timed))
    return GroupVerdict(group, fast(group, timed[0], tied), _frugal(of_real_things(group)))


def fast(group: RankedGroup, cell: RankedCell, tied: tuple[RankedCell, ...]) -> Pick:
    rate = group.rate(cell)
    interval = "1 trial: no interval"
    if rate.low is not None:
        trials = plural(cell.trials, "trial")
        interval = f"95 % interval {number(rate.low)} to {number(rate.high)}, {trials}"
    return Pick(cell, f"{number(rate.value)} {group.unit}", interval, tied)


def _peak(cell: RankedCell) -> int:
    assert cell.memory.peak_memory_bytes is not None
    return cell.memory.peak_memory_bytes


def _frugal(genuine: Sequence[RankedCell]) -> Pick | None:
    cells = [cell for cell in genuine if cell.memory.peak_memory_bytes is not None]
    if not cells:
        return None
    cell = min(cells, key=lambda c: (_peak(c), -(c.speed.samples_per_second or 0.0)))
    peak, low = _peak(cell), cell.memory.peak_memory_bytes_low
    interval = "1 trial: no range"
    if cell.trials > 1 and low is not None:
        interval = f"largest of {plural(cell.trials, 'trial')}, smallest {number(low / MIB)} MiB"
    return Pick(cell, f"{number(peak / MIB)} MiB", interval)


@dataclass(frozen=True)
class ParityCounts:
    """How many cells trained the same as the reference."""

    passed: int
    judged: int
    steps: str
    unexpected: int
    rewound: int
    """Cells rewound between timed steps and verified again."""

    @classmethod
    def of(cls, cells: Iterable[CellResult]) -> ParityCounts | None:
        """Returns None if no cell was verified."""
        verdicts = ("exact", "within tolerance", "diverged")
        judged = [cell for cell in cells if cell.parity.verdict in verdicts]
        if not judged:
            return None
        steps = sorted({cell.cell.parity_steps for cell in judged})
        away = [cell for cell in judged if cell.parity.verdict == "diverged"]
        return cls(
            len(judged) - len(away),
            len(judged),
            " or ".join(map(str, steps)),
            sum(not cell.expected for cell in away),
            sum(bool(cell.parity.rewinds) for cell in judged),
        )


def verdict_blocks(report: RunReport) -> ui.Blocks:
    if report.largest:
        return _largest_verdict(report)
    if report.leading is None:
        nothing = "nothing ranked" if report.cells else "nothing recorded"
        return [ui.Paragraph(prose(nothing), "lead")]
    best, group, advised = verdict(report.leading), report.leading, report.advised
    blocks = _lead(best, advised)
    if len(group.rows) == 1:
        blocks.append(ui.Paragraph(prose("nothing to compare"), "caution"))
    elif group.real and (why := why_no_advice(group.rows)):
        blocks.append(ui.Paragraph(data(f"No advice: {why}."), "caution"))
    if not group.real:
        blocks.append(ui.Paragraph(prose("oversubscribed"), "caution"))
    roles = _roles(best, advised)
    blocks += _disturbed([row for row, _ in roles])
    blocks.append(_figures(group, roles))
    if coarse := why_no_more_trials(group.rows):
        blocks.append(ui.Paragraph(data(f"{coarse}."), "small"))
    return [*blocks, *_same_training(ParityCounts.of(report.cells))]


Roles = list[tuple[CellResult, str]]
"""Cells of the verdict, each once, with their roles."""


def _roles(best: GroupVerdict, advised: Answer | None) -> Roles:
    picks = [(best.fastest.row, "Fastest")]
    picks += [(best.frugal.row, "Least memory")] if best.frugal else []
    cells: list[tuple[CellResult, str]] = [*picks]
    if advised:
        cells = [(advice.cell, advice.role) for advice in advised.advice]
        cells += [(advised.baseline, "Baseline")] if advised.baseline else []
    by_id = {cell.cell_id: cell for cell, _ in cells}
    words = {
        cell_id: [role for cell, role in cells if cell.cell_id == cell_id] for cell_id in by_id
    }
    return [(cell, ", ".join(words[cell_id])) for cell_id, cell in by_id.items()]


def _figures(group: RankedGroup, roles: Roles) -> ui.Table:
    text = {cell.cell_id: role for cell, role in roles}
    cells = [cell for cell, _ in roles]
    columns = [
        ReportColumn("Role", lambda cell: words(text[cell.cell_id])),
        throughput_column(cells),
        mebibytes("Peak memory", "peak_memory_bytes", "fullest device, largest of the trials"),
        word("Parity", "parity_verdict"),
    ]
    label = f"Figures of the verdict, {group.title}"
    table = cell_table("", label, cells, columns, head=lambda cell: cell_name(cell, place=False))
    return replace(table, kind="compact")


def _largest_verdict(report: RunReport) -> ui.Blocks:
    largest = report.largest
    assert largest is not None
    best = largest.winner
    if best is None:
        link = ui.Span("The search so far", link="#largest")
        nothing = prose("nothing fits", budget=largest.budget)
        return [ui.Paragraph(nothing, "lead"), ui.Only("page", [ui.Paragraph(link)])]
    words = prose(
        "largest fits",
        budget=largest.budget,
        what=largest.what,
        size=f"{plain(best.result.parameters)} {largest.unit}",
        strategy=ui.Span(best.label, "data strong", f"#cell-{best.cell_id}"),
    )
    more = ui.Span("All strategies, and the formula's figures", link="#largest")
    order: list[ui.Block] = [ui.Paragraph(data(sentence)) for sentence in largest.order]
    return [
        ui.Paragraph(words, "lead"),
        ui.Only("page", [ui.Paragraph(more)]),
        ui.Only("text", order),
    ]


def _lead(best: GroupVerdict, advised: Answer | None) -> ui.Blocks:
    group = best.group
    workload = data(group.workload, "strong")
    title = prose("training", workload=workload, details=group.details)
    if advised is None:
        tied = best.fastest.tied
        frugal = best.frugal
        words = prose(
            "passed",
            count=plural(len(group.rows), "strategy variant"),
            fastest=cell_name(best.fastest.row, place=False),
            tied=f", tied with {plural(len(tied), 'other')}" if tied else "",
            more=phrase("; least memory, ", *cell_name(frugal.row, place=False)) if frugal else "",
        )
        return [ui.Paragraph(phrase(title, words), "lead")]
    items = []
    for place, advice in enumerate(advised.advice):
        item = [strong(advice.role), " ", *cell_name(advice.cell, place=False), ": "]
        item.append(data(advice.words))
        others = len(advised.may_be_fastest) - 1
        if place == 0 and others > 0:
            item.append(f"; {plural(others, 'other')} may be as fast")
        item.append(".")
        if place == 0 and advised.reason:
            item.append(f" Why: {advised.reason}.")
        if place == 0 and advised.caveat:
            item.append(ui.Span(f" Caveat: {advised.caveat}.", "small"))
        items.append(item)
    equals: list[ui.Block] = []
    for advice in advised.advice:
        if advice.as_good:
            ties = advice.as_good[0].upper() + advice.as_good[1:]
            equals.append(ui.Paragraph([data(ties), "."], "small"))
    return [ui.Paragraph([*title, ":"], "lead"), ui.Bullets(items, "answer"), *equals]


def _disturbed(rows: Iterable[CellResult]) -> ui.Blocks:
    return [
        ui.Paragraph(
            prose(
                "disturbed",
                label=data(row.cell.label),
                what=disturbance(row),
                trials=plural(row.trials, "trial"),
                gpus=gpu_findings(row),
            ),
            "caution",
        )
        for row in rows
        if disturbance(row)
    ]


def _same_training(parity: ParityCounts | None) -> ui.Blocks:
    if parity is None:
        return []
    away = parity.judged - parity.passed
    expected = away - parity.unexpected
    diverged = f" {plural(away, 'cell')} diverged{', as expected,' if expected == away else ''}"
    diverged += f" and {'is' if away == 1 else 'are'} not ranked"
    if 0 < expected < away:
        diverged += f", {expected} of them as expected"
    words = prose(
        "same training",
        passed=parity.passed,
        judged=plural(parity.judged, "cell"),
        steps=parity.steps,
        rewound=prose("rewound", count=parity.rewound) if parity.rewound else "",
        diverged=f".{diverged}" if away else "",
    )
    return [ui.Paragraph(words, "small")]
