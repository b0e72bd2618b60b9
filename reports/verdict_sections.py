"""Verdict, overview of systems, and what did not run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from harness.analysis.answer import Answer, answer
from harness.analysis.cell_result import CellResult
from reports import blocks as ui
from reports.blocks import BREAK, data, phrase, plain_text, prose, small, strong
from reports.groups import (
    RankedCell,
    RankedGroup,
    biggest,
    fairly_timed,
    of_real_things,
    tied_with_fastest,
)
from reports.names import (
    OVERSUBSCRIBED,
    cell_name,
    cell_names,
    disturbance,
    gpu_findings,
    winner_name,
)
from reports.run_report import RunReport
from reports.text import DASH, MIB, number, percent, plain, plural


@dataclass(frozen=True)
class Pick:
    """The best cell in one respect, as text."""

    row: RankedCell
    value: str
    interval: str
    tied: tuple[RankedCell, ...]
    then: str = ""
    """Consequence for the other respect."""


@dataclass(frozen=True)
class GroupVerdict:
    group: RankedGroup
    fastest: Pick
    frugal: Pick | None
    balanced: Pick | None
    """Most throughput for its peak memory."""
    faster: Pick | None
    """A faster stand-in or oversubscribed cell, whose times do not hold for the real thing."""


def verdict(group: RankedGroup) -> GroupVerdict:
    """Returns the fastest and most frugal cells, preferring real ones.

    Oversubscription changes a cell's times, but not its memory.
    """
    timed, first = fairly_timed(group), group.rows[0]
    fastest = timed[0]
    return GroupVerdict(
        group,
        fast(group, fastest, tuple(tied_with_fastest(timed))),
        _frugal(of_real_things(group), fastest),
        _balanced(group, timed, fastest),
        fast(group, first, ()) if fastest is not first else None,
    )


def fast(group: RankedGroup, cell: RankedCell, tied: tuple[RankedCell, ...]) -> Pick:
    """Describes a cell's throughput. `tied`: cells that may be as fast."""
    rate = group.rate(cell)
    interval = "1 trial: no interval"
    if rate.low is not None:
        trials = plural(cell.trials, "trial")
        interval = f"95 % interval {number(rate.low)} to {number(rate.high)}, {trials}"
    return Pick(cell, f"{number(rate.value)} {group.unit}", interval, tied)


def _peak(cell: RankedCell) -> int:
    assert cell.memory.peak_memory_bytes is not None
    return cell.memory.peak_memory_bytes


def _frugal(genuine: Sequence[RankedCell], fastest: RankedCell) -> Pick | None:
    cells = [cell for cell in genuine if cell.memory.peak_memory_bytes is not None]
    if not cells:
        return None
    cell = min(cells, key=lambda c: (_peak(c), -(c.speed.samples_per_second or 0.0)))
    peak, low = _peak(cell), cell.memory.peak_memory_bytes_low
    interval = "1 trial: no range"
    if cell.trials > 1 and low is not None:
        interval = f"largest of {plural(cell.trials, 'trial')}, smallest {number(low / MIB)} MiB"
    tied = tuple(
        c for c in cells if c is not cell and (c.memory.peak_memory_bytes_low or 0) <= peak
    )
    then = ""
    if cell is not fastest and fastest.memory.peak_memory_bytes is not None:
        then = f"{percent(1 - peak / fastest.memory.peak_memory_bytes)} less than the fastest needs"
        if cell.placement.oversubscribed == fastest.placement.oversubscribed:
            speed = (cell.speed.samples_per_second or 0.0) / (
                fastest.speed.samples_per_second or 1.0
            )
            then += f", at {percent(speed)} of its throughput"
    return Pick(cell, f"{number(peak / MIB)} MiB", interval, tied, then)


def _balanced(group: RankedGroup, timed: Sequence[RankedCell], fastest: RankedCell) -> Pick | None:
    """Returns the cell with most throughput per peak memory, and any whose interval reaches it."""
    cells = [cell for cell in timed if cell.memory.peak_memory_bytes is not None]
    if not cells:
        return None

    def worth(cell: RankedCell, end: str = "") -> float:
        rate = group.rate(cell)
        figure = {"": rate.value, "low": rate.low, "high": rate.high}[end]
        return (rate.value if figure is None else figure) * MIB / _peak(cell)

    cell = max(cells, key=worth)
    interval = "1 trial: no interval"
    if cell.trials > 1:
        ends = f"{number(worth(cell, 'low'))} to {number(worth(cell, 'high'))}"
        interval = f"95 % interval {ends}"
    tied = tuple(
        c
        for c in cells
        if c is not cell and cell.trials > 1 and worth(c, "high") >= worth(cell, "low")
    )
    then = ""
    if cell is not fastest and fastest.memory.peak_memory_bytes is not None:
        speed = percent(group.rate(cell).value / group.rate(fastest).value)
        memory = percent(_peak(cell) / fastest.memory.peak_memory_bytes)
        then = f"{speed} of the fastest's throughput in {memory} of its memory"
    return Pick(cell, f"{number(worth(cell))} {group.unit} per MiB", interval, tied, then)


@dataclass(frozen=True)
class Parity:
    """How many cells trained the same as the reference."""

    passed: int
    judged: int
    steps: str
    unexpected: int
    """Unexpected divergences."""
    rewound: int
    """Cells rewound between timed steps and verified again."""

    @classmethod
    def of(cls, cells: Iterable[CellResult]) -> Parity | None:
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
    """Returns what to use, key figures, and each setting's verdict."""
    if report.largest:
        return _largest_verdict(report)
    if report.leading is None:
        nothing = "nothing ranked" if report.cells else "nothing recorded"
        return [ui.Paragraph(prose(nothing), "lead")]
    best, group = verdict(report.leading), report.leading
    blocks = _lead(best, answer(group.rows))
    if len(group.rows) == 1:
        blocks.append(ui.Paragraph(prose("nothing to compare"), "caution"))
    if not group.real:
        blocks.append(ui.Paragraph(prose("oversubscribed"), "caution"))
    blocks += _disturbed(best)
    return [*blocks, ui.Cards(_cards(best, Parity.of(report.cells))), *_by_setting(report.groups)]


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
        picks = ((best.frugal, "; least memory, "), (best.balanced, "; best trade-off, "))
        parts = [(what, *cell_name(pick.row, place=False)) for pick, what in picks if pick]
        words = prose(
            "passed",
            count=plural(len(group.rows), "strategy variant"),
            fastest=cell_name(best.fastest.row, place=False),
            tied=f", tied with {plural(len(tied), 'other')}" if tied else "",
            more=phrase(*parts),
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
        if place == 0 and advised.caveat:
            item.append(ui.Span(f" Caveat: {advised.caveat}.", "small"))
        items.append(item)
    equals: list[ui.Block] = []
    for advice in advised.advice:
        if advice.as_good:
            name = plain_text(cell_name(advice.cell, place=False))
            words = [strong(f"May be as fast as {name}"), " ", data(advice.as_good), "."]
            equals.append(ui.Paragraph(words, "small"))
    return [ui.Paragraph([*title, ":"], "lead"), ui.Bullets(items, "answer"), *equals]


def _disturbed(best: GroupVerdict) -> ui.Blocks:
    picks = [pick.row for pick in (best.fastest, best.frugal, best.balanced) if pick]
    rows = {row.cell_id: row for row in picks}.values()
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


def _cards(best: GroupVerdict, parity: Parity | None) -> list[ui.Card]:
    group, fastest = best.group, best.fastest
    same_exists = any(row.parity.same_training for row in group.rows)
    another = "" if fastest.row.parity.same_training or not same_exists else ", trained another way"
    cards = [_card(f"Fastest{another}", fastest, _fastest_notes(best))]
    if frugal := best.frugal:
        card = _card("Least memory", frugal, _notes(frugal, "ranges overlap with"))
        value = phrase(frugal.value, " ", small("on its fullest device"))
        cards.append(replace(card, value=value))
    if balanced := best.balanced:
        notes = _notes(balanced, "intervals overlap with")
        cards.append(_card("Most throughput for its memory", balanced, notes))
    return [*cards, _parity_card(parity)] if parity else cards


def _card(title: str, pick: Pick, notes: Sequence[ui.Paragraph]) -> ui.Card:
    row = pick.row
    parity: list[ui.Inline] = [f"parity: {row.parity.verdict}"]
    if row.parity.verdict != "exact" and row.parity.reason:
        parity += [", ", data(row.parity.reason)]
    more = [ui.Paragraph(pick.interval, "small"), ui.Paragraph(parity, "small")]
    if row.placement.stand_in is not None:
        more.append(
            ui.Paragraph([strong("† stand-in:"), " ", data(row.placement.stand_in)], "small")
        )
    return ui.Card(title, winner_name(row), pick.value, [*more, *notes])


def _fastest_notes(best: GroupVerdict) -> list[ui.Paragraph]:
    fastest, notes = best.fastest, []
    if faster := best.faster:
        what = "A cell with more ranks than cores"
        if faster.row.placement.stand_in is not None:
            what = "A stand-in"
        words = f"{what} was faster, which says nothing about the real thing: "
        name = cell_name(faster.row, place=False)
        notes.append(ui.Paragraph([words, *name, f", {faster.value}"], "small"))
    if fastest.tied:
        ties = cell_names(fastest.tied, place=False)
        notes.append(ui.Paragraph(["≈ tied with ", *ties], "tied"))
    elif not best.faster and len(best.group.rows) > 1 and fastest.interval.startswith("95 %"):
        notes.append(ui.Paragraph("faster than all others beyond the intervals", "tied"))
    return notes


def _notes(pick: Pick, relation: str) -> list[ui.Paragraph]:
    notes = [ui.Paragraph(pick.then, "tied")] if pick.then else []
    if pick.tied:
        ties = cell_names(pick.tied, place=False)
        notes.append(ui.Paragraph([f"≈ {relation} ", *ties], "tied"))
    return notes


def _parity_card(parity: Parity) -> ui.Card:
    rewound = prose("rewound", count=parity.rewound) if parity.rewound else ""
    words = plain_text(prose("same training", steps=parity.steps, rewound=rewound))
    away, notes = parity.judged - parity.passed, []
    if away:
        text = f"{plural(away, 'cell')} diverged and {'is' if away == 1 else 'are'} not ranked"
        if parity.unexpected < away:
            text += f"; {away - parity.unexpected} of them as expected"
        notes.append(ui.Paragraph(text, "tied"))
    return ui.Card(
        "The same training?", f"{parity.passed} of {parity.judged} cells", small(words), notes
    )


def _by_setting(groups: Sequence[RankedGroup]) -> ui.Blocks:
    verdicts = [verdict(group) for group in biggest(groups) if len(group.rows) > 1]
    if len(verdicts) < 2:
        return []
    columns = ui.heads("Fastest, 95 % interval: prose", "Least memory: prose")
    rows = []
    for one in verdicts:
        group, tied = one.group, one.fastest.tied
        real = "" if group.real else f" {OVERSUBSCRIBED}"
        about = small(f"{group.title}, {len(group.rows)} compared")
        fastest = _best(one.fastest)
        if tied:
            fastest += [BREAK, small("≈ "), *cell_names(tied, place=False)]
        frugal = ui.Td(_best(one.frugal), "prose") if one.frugal else ui.Td(DASH, "prose")
        rows.append(
            ui.Row([data(group.workload), real, BREAK, about], [ui.Td(fastest, "prose"), frugal])
        )
    label = "Verdicts by workload and setting"
    return [
        ui.Heading("Every workload and setting"),
        ui.Table("", label, "Workload and setting", columns, rows, "verdicts"),
        ui.Paragraph(prose("verdicts"), "small"),
    ]


def _best(pick: Pick) -> list[ui.Inline]:
    name = cell_name(pick.row, place=False)
    return [*name, BREAK, f"{pick.value} ", small(pick.interval)]
