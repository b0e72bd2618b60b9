"""Advice and throughputs of every workload and setting."""

from __future__ import annotations

from harness.analysis.answer import Answer, answer, why_no_advice
from harness.analysis.cell_result import CellResult
from harness.spec.text import plural
from reports import blocks as ui
from reports.blocks import BREAK, data, prose, small
from reports.columns import gained, interval, over_baseline
from reports.groups import RankedGroup, biggest
from reports.names import OVERSUBSCRIBED, cell_name
from reports.run_report import RunReport
from reports.speed_sections import comparable, throughput_bars
from reports.text import DASH
from reports.verdict_sections import verdict


def compared(report: RunReport) -> list[RankedGroup]:
    return [group for group in biggest(report.groups) if len(group.rows) > 1]


def settings_blocks(report: RunReport) -> ui.Blocks:
    groups = compared(report)
    if len(groups) < 2:
        return []
    columns = ui.heads(
        "Use: prose",
        "Throughput (95 % interval)",
        "Over baseline (95 % interval)",
        "Least memory: prose",
    )
    label = "Advice by workload and setting"
    rows = [_row(group) for group in groups]
    charts = [
        ui.Chart(throughput_bars(group, f"speed-{index}"), title)
        for index, group, title in comparable(report)
    ]
    return [
        ui.Table("", label, "Workload and setting", columns, rows, "verdicts"),
        ui.Paragraph(prose("verdicts"), "small"),
        ui.Charts(charts, prose("ranking")),
    ]


def _gain(cell: CellResult, advised: Answer | None) -> ui.Td:
    """Returns the advice's gain, else this pair's."""
    if advised and (gain := advised.gain):
        return gained(gain.ratio, gain.low, gain.high)
    return over_baseline(cell)


def _row(group: RankedGroup) -> ui.Row:
    advised, best = answer(group.rows), verdict(group)
    cell = advised.advice[0].cell if advised else best.fastest.row
    use = cell_name(cell, place=False)
    if advised is None:
        why = why_no_advice(group.rows)
        use = ["fastest: ", *use, BREAK, small(f"no advice: {why}")]
    elif others := len(advised.may_be_fastest) - 1:
        use += [BREAK, small(f"{plural(others, 'other')} may be as fast")]
    frugal: ui.Words = DASH
    if best.frugal:
        frugal = [*cell_name(best.frugal.row, place=False), BREAK, best.frugal.value]
    real = "" if group.real else f" {OVERSUBSCRIBED}"
    about = small(f"{group.title}, {len(group.rows)} compared")
    return ui.Row(
        [data(group.workload), real, BREAK, about],
        [
            ui.Td(use, "prose"),
            interval(cell, group.throughput, with_unit=True),
            _gain(cell, advised),
            ui.Td(frugal, "prose"),
        ],
    )
