"""Charts and section of a mixture's tokens per expert."""

from __future__ import annotations

import json
from collections.abc import Sequence

from harness.analysis.cell_result import CellResult
from reports import lines
from reports.data import MOST_ROWS, Bar, Bars, first_few, main_workload, notes_for, rest, where
from reports.markdown import table
from reports.names import marks
from reports.panels import Panel, Panels
from reports.run_report import RunReport
from reports.sections import Paragraphs
from reports.text import number


def routed(cells: Sequence[CellResult]) -> list[CellResult]:
    """Returns the cells with recorded expert tokens, most balanced first."""
    known = [cell for cell in cells if cell.traffic.expert_imbalance is not None]
    return sorted(known, key=lambda cell: (cell.cell.workload, cell.traffic.expert_imbalance))


def imbalance_bars(cells: Sequence[CellResult]) -> Bars | None:
    """Returns the busiest expert's tokens over the mean, by cell."""
    known = routed(cells)
    if not known:
        return None
    main = main_workload(known)
    bars = [
        Bar(where(cell, main), value, number(value), marks=marks(cell), target=1.0)
        for cell in known[:MOST_ROWS]
        if (value := cell.traffic.expert_imbalance) is not None
    ]
    return Bars(
        "expert-imbalance",
        "Imbalance of experts",
        "tokens of the busiest expert over the mean of its block",
        tuple(bars),
        "Tokens of the busiest expert over the mean of its block: " + first_few(bars, 8),
        notes_for(known) + rest(len(known)),
        target="all experts alike",
    )


def token_bars(cells: Sequence[CellResult]) -> list[Bars]:
    """Returns tokens by expert, a chart per workload. Shows the first cell only: the same training
    routes the same way."""
    first: dict[str, CellResult] = {}
    for cell in cells:
        if cell.traffic.expert_tokens:
            first.setdefault(cell.cell.workload, cell)
    return [_tokens_of(cell) for cell in first.values()]


def _tokens_of(cell: CellResult) -> Bars:
    blocks: list[list[int]] = json.loads(cell.traffic.expert_tokens or "[]")
    bars = [
        Bar(
            f"block {block}, expert {expert}",
            tokens,
            str(tokens),
            target=sum(experts) / len(experts),
        )
        for block, experts in enumerate(blocks)
        for expert, tokens in enumerate(experts)
    ]
    return Bars(
        f"expert-tokens-{cell.cell_id}",
        f"Tokens of each expert: {cell.cell.workload}, {cell.cell.label}",
        "tokens in the last warm-up step",
        tuple(bars[:MOST_ROWS]),
        f"Tokens of each expert of {cell.cell.workload}: " + first_few(bars, 8),
        rest(len(bars)),
        target="mean of the block",
    )


def experts_part(report: RunReport, panels: Panels) -> list[Panel]:
    imbalance = imbalance_bars(report.cells)
    every = [imbalance, *token_bars(report.cells)] if imbalance else []
    return [panels.written(bars, lines.bars) for bars in every]


def experts_text(report: RunReport) -> Paragraphs:
    columns = ["cell", "workload", "busiest expert / mean", "tokens of each expert by block"]
    rows = [
        [
            cell.cell.name,
            cell.cell.workload,
            number(cell.traffic.expert_imbalance),
            cell.traffic.expert_tokens or "",
        ]
        for cell in routed(report.cells)
    ]
    return [table(columns, columns[2:3], rows)] if rows else []
