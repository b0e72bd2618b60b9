"""The verdict: what to use, its figures, and whether it is the same training."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import replace

from harness.analysis.answer import Answer, why_no_advice, why_no_more_trials
from harness.analysis.cell_result import CellResult
from harness.analysis.ranking import of_real_things
from harness.analysis.scripts import script_sentences
from harness.cell.errors import plural
from reports import blocks as ui
from reports.blocks import BREAK, data, phrase, plain_text, prose, small, strong
from reports.columns import (
    ReportColumn,
    baseline_columns,
    cell_table,
    interval,
    mfu_column,
    over_baseline,
    per_gpu_column,
    size_column,
    text_cell,
    throughput_column,
    word,
)
from reports.groups import Group, biggest
from reports.names import OVERSUBSCRIBED, cell_name, disturbance, gpu_findings
from reports.run_report import RunReport
from reports.speed_sections import comparable, throughput_bars
from reports.text import DASH, number, plain, size


def fastest(group: Group) -> tuple[CellResult, list[CellResult]]:
    """Returns the advised cell, or else the fastest fairly timed one, and the others that may be as
    fast."""
    use = group.advised.advice[0].cell if group.advised else group.rows[0]
    return use, [row for row in group.rows if row.relative.may_be_fastest and row is not use]


def frugal(group: Group) -> CellResult | None:
    """Returns the cell with the lowest peak memory, without stand-ins."""

    def order(cell: CellResult) -> tuple[int, float]:
        return cell.memory.peak_memory_bytes or 0, -(cell.speed.samples_per_second or 0.0)

    genuine = of_real_things(group.rows)
    measured = [cell for cell in genuine if cell.memory.peak_memory_bytes is not None]
    return min(measured, key=order, default=None)


def rate_text(group: Group, cell: CellResult) -> str:
    """Returns `3,200 tokens/s, 95% interval 3,100 to 3,300, 3 trials`."""
    rate = group.rate(cell)
    interval = "1 trial: no interval"
    if rate.low is not None:
        trials = plural(cell.trials, "trial")
        interval = f"95% interval {number(rate.low)} to {number(rate.high)}, {trials}"
    return f"{number(rate.value)} {group.unit}, {interval}"


def judged(cells: Iterable[CellResult]) -> list[CellResult]:
    """Returns the cells that a parity verdict says something about."""
    verdicts = ("exact", "within tolerance", "diverged")
    return [cell for cell in cells if cell.parity.verdict in verdicts]


def parity_steps(cells: Iterable[CellResult]) -> str:
    """Returns `20`, or `10 or 20`."""
    return " or ".join(map(str, sorted({cell.cell.parity_steps for cell in cells})))


def verdict_blocks(report: RunReport) -> ui.Blocks:
    if report.largest:
        return _largest_verdict(report)
    if report.leading is None:
        if sentences := script_sentences(report.cells):
            return [ui.Bullets(list(map(data, sentences))), _commands(report)]
        nothing = "nothing ranked" if report.cells else "nothing recorded"
        return [ui.Paragraph(prose(nothing), "lead")]
    group = report.leading
    blocks = _lead(group, report.between_runs)
    if len(group.rows) == 1:
        blocks.append(ui.Paragraph(prose("nothing to compare"), "caution"))
    elif group.real and (why := why_no_advice(group.rows)):
        blocks.append(ui.Paragraph(data(f"No advice: {why}."), "caution"))
    if not group.real:
        blocks.append(ui.Paragraph(prose("oversubscribed"), "caution"))
    roles = _roles(group)
    blocks += _disturbed([row for row, _ in roles])
    blocks += [_figures(group, roles), _commands(report)]
    if coarse := why_no_more_trials(group.rows):
        blocks.append(ui.Paragraph(data(f"{coarse}."), "small"))
    return [*blocks, *_same_training(judged(report.cells))]


def _commands(report: RunReport) -> ui.Facts:
    """Returns the command that repeats the run, to copy."""
    again = plain_text(prose("command run", matrix=shlex.quote(report.run.matrix)))
    command = _one_command(report.run.command) or again
    return ui.Facts([("Run the matrix again", data(command, "command"))])


def export_command(advised: Answer) -> str:
    """Returns the command that writes the advised cell's script and launch command."""
    return plain_text(prose("command export", cell=shlex.quote(advised.advice[0].cell.cell_id)))


def _one_command(text: str | None) -> str | None:
    """Returns a recorded command line if a shell would run only that command; it may come from
    another person's results."""
    try:
        arguments = shlex.split(text or "")
    except ValueError:  # an open quotation
        return None
    is_run = arguments[:4] == ["python", "-m", "bench", "run"]
    return text if is_run and shlex.join(arguments) == text else None


Roles = list[tuple[CellResult, str]]
"""Cells of the verdict, each once, with their roles."""


def _roles(group: Group) -> Roles:
    cells: list[tuple[CellResult, str]] = [(fastest(group)[0], "Fastest")]
    cells += [(least, "Least memory")] if (least := frugal(group)) else []
    if advised := group.advised:
        cells = [(advice.cell, advice.role) for advice in advised.advice]
        cells += [(advised.baseline, "Baseline")] if advised.baseline else []
    by_id = {cell.cell_id: cell for cell, _ in cells}
    meanings = {
        cell_id: [role for cell, role in cells if cell.cell_id == cell_id] for cell_id in by_id
    }
    return [(cell, ", ".join(meanings[cell_id])) for cell_id, cell in by_id.items()]


def _figures(group: Group, roles: Roles) -> ui.Table:
    text = {cell.cell_id: role for cell, role in roles}
    cells = [cell for cell, _ in roles]
    speeds = [throughput_column(cells)]
    if cells[0].cell.device == "cuda":
        speeds = [per_gpu_column(cells), mfu_column(), *(speeds if group.devices > 1 else [])]
    columns: list[ReportColumn[CellResult]] = [
        ReportColumn("Role", lambda cell: text_cell(text[cell.cell_id])),
        *speeds,
        *baseline_columns(cells),
        size_column("Peak memory", "peak_memory_bytes", "fullest device, largest of the trials"),
        word("Parity", "parity_and_steps"),
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
    text = prose(
        "largest fits",
        budget=largest.budget,
        what=largest.growth.what,
        size=f"{plain(best.result.parameters)} {largest.growth.unit}",
        strategy=ui.Span(best.label, "data strong", f"#cell-{best.cell_id}"),
    )
    more = ui.Span("All strategies, and the formula's figures", link="#largest")
    order: list[ui.Block] = [ui.Paragraph(data(sentence)) for sentence in largest.order]
    return [
        ui.Paragraph(text, "lead"),
        ui.Only("page", [ui.Paragraph(more)]),
        ui.Only("text", order),
    ]


def _lead(group: Group, between_runs: str) -> ui.Blocks:
    workload = data(group.workload, "strong")
    title = prose("training", workload=workload, details=group.details)
    advised = group.advised
    if advised is None:
        (best, tied), least = fastest(group), frugal(group)
        text = prose(
            "passed both" if least is best else "passed",
            count=plural(len(group.rows), "strategy variant"),
            fastest=cell_name(best, place=False),
            tied=f", tied with {plural(len(tied), 'other')}" if tied else "",
            more=phrase("; least memory, ", *cell_name(least, place=False)) if least else "",
        )
        return [ui.Paragraph(phrase(title, text), "lead")]
    items = []
    for advice in advised.advice:
        name = cell_name(advice.cell, place=False)
        items.append([strong(advice.role), " ", *name, ". ", data(advice.explanation)])
    more = {"Between runs": between_runs, "Why": advised.reason, "Caveat": advised.caveat}
    texts = {what: data(f"{text}.") for what, text in more.items() if text}
    texts = {"Run it": data(export_command(advised), "command"), **texts}
    items[1:1] = [[strong(f"{what}:"), " ", text] for what, text in texts.items()]
    return [ui.Paragraph([*title, ":"], "lead"), ui.Bullets(items, "answer")]


def _disturbed(rows: Iterable[CellResult]) -> ui.Blocks:
    labels: dict[str, list[str]] = {}
    for row in rows:
        if what := disturbance(row):
            labels.setdefault(what + gpu_findings(row), []).append(row.cell.label)
    return [
        ui.Paragraph(prose("disturbed", labels=data(", ".join(same)), what=what), "caution")
        for what, same in labels.items()
    ]


def _same_training(cells: Sequence[CellResult]) -> ui.Blocks:
    if not cells:
        return []
    away = [cell for cell in cells if cell.parity.verdict == "diverged"]
    expected = sum(cell.expected for cell in away)
    rewound = sum(bool(cell.parity.rewinds) for cell in cells)
    as_expected = ", as expected," if expected == len(away) else ""
    diverged = f" {plural(len(away), 'cell')} diverged{as_expected}"
    diverged += f" and {'is' if len(away) == 1 else 'are'} not ranked"
    if 0 < expected < len(away):
        diverged += f", {expected} of them as expected"
    text = prose(
        "same training",
        passed=len(cells) - len(away),
        judged=plural(len(cells), "cell"),
        steps=parity_steps(cells),
        rewound=prose("rewound", count=rewound) if rewound else "",
        diverged=f"{diverged}." if away else "",
    )
    return [ui.Paragraph(text, "small")]


def compared(report: RunReport) -> list[Group]:
    return [group for group in biggest(report.groups) if len(group.rows) > 1]


def settings_line(report: RunReport) -> str:
    count = plural(len(compared(report)), "setting")
    return f"what to use in each of {count}, with charts of throughput"


def settings_blocks(report: RunReport) -> ui.Blocks:
    """Returns advice and throughputs of every workload and setting."""
    groups = compared(report)
    if len(groups) < 2:
        return []
    columns = ui.heads(
        "Use: prose",
        "Throughput (95% interval)",
        "Over baseline (95% interval)",
        "Least memory: prose",
    )
    label = "Advice by workload and setting"
    rows = list(map(_setting_row, groups))
    charts = [
        ui.Chart(throughput_bars(group, f"speed-{index}"), title)
        for index, group, title in comparable(report)
    ]
    return [
        ui.Table("", label, "Workload and setting", columns, rows, "verdicts"),
        ui.Paragraph(prose("verdicts"), "small"),
        ui.Charts(charts, prose("ranking")),
    ]


def _setting_row(group: Group) -> ui.Row:
    advised, (cell, tied), least = group.advised, fastest(group), frugal(group)
    use = cell_name(cell, place=False)
    if advised is None:
        use = ["fastest: ", *use, BREAK, small(f"no advice: {why_no_advice(group.rows)}")]
    elif tied:
        use += [BREAK, small(f"{plural(len(tied), 'other')} may be as fast")]
    memory: ui.Text = DASH
    if least:
        peak = size(least.memory.peak_memory_bytes)
        memory = [*cell_name(least, place=False), BREAK, peak]
    real = "" if group.real else f" {OVERSUBSCRIBED}"
    about = small(f"{group.title}, {len(group.rows)} compared")
    return ui.Row(
        [data(group.workload), real, BREAK, about],
        [
            ui.Td(use, "prose"),
            interval(cell, group.throughput, with_unit=True),
            over_baseline(cell),
            ui.Td(memory, "prose"),
        ],
    )
