from __future__ import annotations

from collections.abc import Callable

from harness.analysis.cell_result import CellResult
from reports import blocks as ui
from reports.blocks import prose
from reports.columns import ReportColumn, cell_table, figure, mebibytes, milliseconds, words
from reports.run_report import RunReport
from reports.text import plain


def has_checkpoints(report: RunReport) -> bool:
    return any(cell.cell.checkpoint != "none" for cell in report.cells)


def checkpoint_blocks(report: RunReport) -> ui.Blocks:
    rows = [cell for cell in report.cells if cell.checkpoint.checkpoint_bytes is not None]
    columns = [
        _word("Restart", lambda cell: cell.outcome),
        _word("Parity", lambda cell: cell.parity.verdict or ""),
        milliseconds("Save", "checkpoint_save_seconds", "slowest rank"),
        milliseconds("Blocked", "checkpoint_blocked_seconds", "time in which it could not train"),
        milliseconds("Load", "checkpoint_load_seconds", "slowest rank; unknown if within set-up"),
        mebibytes("On disk", "checkpoint_bytes", "size of its files"),
        figure("Files", "checkpoint_files", plain),
        _word("Bit by bit", lambda cell: _answer(cell.checkpoint.checkpoint_restores_bits)),
        _word("Random state", lambda cell: _answer(cell.checkpoint.checkpoint_restores_random)),
    ]
    if not rows:
        return []
    table = cell_table("checkpoint-table", "Checkpoints", rows, columns)
    return [ui.Part("", [table], prose("checkpoints"))]


def _answer(restored: bool | None) -> str:
    return {True: "restored", False: "not restored", None: ""}[restored]


def _word(title: str, text: Callable[[CellResult], str]) -> ReportColumn[CellResult]:
    return ReportColumn(title, lambda cell: words(text(cell)))
