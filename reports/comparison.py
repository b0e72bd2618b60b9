"""Comparison of runs as text, Markdown for a pull request, and a page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from harness.spec.text import plural
from reports import blocks as ui
from reports.blocks import data, joined, phrase, prose, small, strong
from reports.html_writer import PageHead, PageSection, html_page
from reports.markdown_writer import markdown_text
from reports.runs import verdict_td
from reports.text import DASH, exact, number, size

if TYPE_CHECKING:
    from harness.analysis.compare import ComparedCell, RunComparison
    from harness.analysis.selection import MeasuredCell

FOLDED = ("added", "no difference seen", "not compared")


def titles(confidence: float) -> tuple[str, ...]:
    return (
        "cell",
        "A samples/s",
        "B samples/s",
        "B / A",
        f"{confidence * 100:.4g} % interval",
        "verdict",
        "peak memory, A to B",
    )


def words(line: ComparedCell) -> list[str]:
    speed = line.throughput
    interval = (
        f"{speed.low:.3f} to {speed.high:.3f}"
        if speed and speed.low is not None and speed.high is not None
        else DASH
    )
    speeds = [number(cell.speed if cell else None) for cell in (line.first, line.second)]
    return [
        line.cell_name,
        *speeds,
        f"{speed.ratio:.3f}" if speed else DASH,
        interval,
        line.verdict,
        memory(line),
    ]


def memory(line: ComparedCell) -> str:
    """Returns `96.1 MiB to 98.0 MiB, x 1.02`; a dash if unknown or if methods differ."""
    if line.first is None or line.second is None or line.memory is None:
        return DASH
    return f"{size(line.first.peak)} to {size(line.second.peak)}, x {line.memory.ratio:.2f}"


def disturbed(compared: RunComparison, *, changed: bool = False) -> list[tuple[str, str]]:
    """Returns disturbed cells and causes; `changed`: only those with a difference."""
    return [
        (line.cell_name, "; ".join(line.disturbed))
        for line in compared.lines
        if line.disturbed and not (changed and line.verdict == "no difference seen")
    ]


def trials(cell: MeasuredCell | None) -> str:
    return "" if cell is None else f" ({plural(cell.result.recorded_trials, 'trial')})"


def _table(lines: Sequence[ComparedCell], confidence: float) -> ui.Table:
    first, *others = titles(confidence)
    columns = [
        ui.ColumnHead(title, kind="word" if title == "verdict" else "number") for title in others
    ]
    label = "Throughput and memory of B over A"
    return ui.Table("", label, first, columns, [_row(line) for line in lines])


def _row(line: ComparedCell) -> ui.Row:
    name, first, second, ratio, interval, _, memory = words(line)
    value = exact(line.throughput.ratio if line.throughput else None)
    change = exact(line.memory.ratio if line.memory else None)
    return ui.Row(
        data(name),
        [
            ui.Td([first, small(trials(line.first))]),
            ui.Td([second, small(trials(line.second))]),
            ui.Td(ui.Span(ratio, field="ratio", value=value)),
            ui.Td(interval),
            verdict_td(line),
            ui.Td(ui.Span(memory, field="memory_ratio", value=change)),
        ],
        {"data-kind": line.kind},
    )


def markdown(compared: RunComparison) -> str:
    """Returns a pull request's comment: findings first, the rest folded."""
    shown = [line for line in compared.lines if line.regression or line.kind not in FOLDED]
    folded = [line for line in compared.lines if line not in shown]
    title = ui.Heading([compared.first, " → ", compared.second])
    blocks: ui.Blocks = [title, ui.Paragraph(strong(compared.headline))]
    if compared.differences:
        blocks.append(ui.Paragraph(f"Not the same software: {', '.join(compared.differences)}"))
    blocks += _line_blocks(compared, shown)
    for kind in FOLDED:
        if some := [line for line in folded if line.kind == kind]:
            blocks.append(ui.Details(f"{kind}: {len(some)}", _line_blocks(compared, some)))
    if cells := disturbed(compared):
        blocks.append(ui.Details(f"disturbed trials of cells: {len(cells)}", [ui.Facts(cells)]))
    method = ui.Facts(list(compared.method.items()))
    return markdown_text([*blocks, ui.Details("how it was decided", [method])])


def _line_blocks(compared: RunComparison, lines: Sequence[ComparedCell]) -> ui.Blocks:
    measured = [line for line in lines if line.throughput]
    others = [line for line in lines if not line.throughput]
    blocks: ui.Blocks = [_table(measured, compared.confidence)] if measured else []
    items = [phrase(strong(line.kind), f" {line.cell_name}: {line.reason}") for line in others]
    return [*blocks, ui.Bullets(items)] if items else blocks


def page(compared: RunComparison) -> str:
    first, second = compared.first, compared.second
    head = PageHead(
        f"{first} compared with {second}",
        "What changed?",
        [
            ["A ", data(first, "strong")],
            ["B ", data(second, "strong")],
            plural(compared.comparisons, "comparison"),
        ],
        prose("compare footer"),
        navigation=False,
    )
    measured = [line for line in compared.lines if line.throughput]
    others = [line for line in compared.lines if not line.throughput]
    cells = disturbed(compared)
    sections = [PageSection("verdict", "Verdict", _verdict(compared, len(cells)))]
    if measured:
        table = _table(measured, compared.confidence)
        sections.append(PageSection("throughput", "Throughput and memory", [table]))
    if others:
        sections.append(PageSection("others", "Without a comparison", [_others(others)]))
    if cells:
        sections.append(PageSection("disturbed", "Disturbed trials", [ui.Facts(cells)]))
    method = ui.Facts(list(compared.method.items()))
    return html_page(head, [*sections, PageSection("method", "How it was decided", [method])])


def _verdict(compared: RunComparison, cells: int) -> ui.Blocks:
    blocks: ui.Blocks = [ui.Paragraph(compared.headline, "lead")]
    if compared.differences:
        names = joined([data(one) for one in compared.differences])
        blocks.append(ui.Paragraph(prose("compare software", names=names), "caution"))
    if cells:
        words = prose("compare disturbed", cells=plural(cells, "cell"))
        blocks.append(ui.Paragraph(words, "caution"))
    return blocks


def _others(lines: Sequence[ComparedCell]) -> ui.Table:
    columns = ui.heads("what: word", "why: prose")
    rows = [
        ui.Row(
            data(line.cell_name),
            [verdict_td(line), ui.Td(data(line.reason), "prose")],
            {"data-kind": line.kind},
        )
        for line in lines
    ]
    return ui.Table("", "Cells without a comparison, with the reason", "cell", columns, rows)
