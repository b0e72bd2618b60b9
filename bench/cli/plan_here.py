"""bench plan --here: which strategy to use on this machine, from its own measurements."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from harness.planner.local.local_plan import LocalCandidate, LocalPlan, LocalVariant
    from harness.planner.local.plan_request import PlanRequest

MAX_REASONS = 6
"""Reasons for left-out strategies printed on a terminal."""


@dataclass(frozen=True)
class LocalPlanOptions:
    folders: tuple[Path, ...]
    top: int = 10
    """Rows of the printed table."""
    matrix: Path | None = None
    """New file for the cells that would settle which strategy is best."""
    export: Path | None = None
    """New folder for an export of the choice."""
    html: Path | None = None


def answer(request: PlanRequest, options: LocalPlanOptions, json_output: bool) -> None:
    """Raises UsageError if the request cannot be answered."""
    from rich.markup import escape

    from bench.cli import terminal
    from harness.planner.local.local_plan import explanation
    from harness.planner.local.measurements import read_measurements
    from harness.planner.local.plan_request import calibrated, plan_setting, sweep_settings

    request.check()
    measured = read_measurements(options.folders, request.workload)
    setting = request.setting(measured)
    calibration = calibrated(measured, setting.workload if request.unseen else "")
    plan, variants = plan_setting(setting, request, measured, calibration)
    sentences = explanation(plan)
    written = _written(plan, variants, options)
    if options.html:
        from reports import write_whole
        from reports.prediction_page import local_page

        swept = sweep_settings(setting, request, measured, calibration)
        write_whole(local_page(plan, sentences, measured.machine, swept), options.html, "--html")
        written.append(f"page: {options.html}")
    if json_output:
        document = dataclasses.asdict(plan) | {
            "explanation": sentences,
            "machine": measured.machine,
            "written": written,
        }
        print(json.dumps(document))
        return
    console = terminal.console()
    console.print(_table(plan, options.top))
    for sentence in sentences:
        console.print(escape(sentence))
    for reason, count in list(plan.refused.items())[:MAX_REASONS]:
        console.print(escape(f"left out, {count}: {reason}"))
    if len(plan.refused) > MAX_REASONS:
        console.print(f"left out for {len(plan.refused) - MAX_REASONS} other reasons, see --json")
    for sentence in (f"measured on: {measured.machine}", *written):
        console.print(escape(sentence))


def _written(
    plan: LocalPlan, variants: Sequence[LocalVariant], options: LocalPlanOptions
) -> list[str]:
    """Writes the requested files; returns a sentence for each."""
    from bench.cli.terminal import measure_command
    from harness.planner.follow_up import export_first, write_matrix
    from harness.planner.local.local_plan import open_questions

    written = []
    candidates = plan.candidates or plan.inexact
    cells = {variant.cell.id: variant.cell for variant in variants}
    if options.matrix:
        chosen = (candidates[0], *open_questions(candidates))
        ordered = [cells[candidate.cell_id] for candidate in chosen]
        sentence = write_matrix(options.matrix, ordered, "Cells that a prediction ties.")
        written.append(f"{sentence}; {measure_command(options.matrix)}")
    if options.export:
        ranked = ((cells[candidate.cell_id], candidate.seconds) for candidate in candidates)
        written.append(export_first(ranked, options.export))
    return written


def _table(plan: LocalPlan, top: int) -> Table:
    """Lists cells with identical training first, best first."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=f"{escape(plan.setting)}; 80 % intervals", title_justify="left")
    table.add_column("strategy", overflow="fold", min_width=20)
    for column in ("step (ms)", "samples/s", "fullest rank (MB)", "known by"):
        table.add_column(column, justify="right")
    for row in plan.candidates[:top]:
        table.add_row(*map(escape, _row(row)))
    if plan.inexact:
        table.add_section()
        for row in plan.inexact[: max(1, top // 3)]:
            table.add_row(*map(escape, _row(row, "other training")))
    return table


def _row(row: LocalCandidate, remark: str = "") -> tuple[str, ...]:
    low, high = row.seconds_low * 1e3, row.seconds_high * 1e3
    return (
        f"{row.label} ({remark})" if remark else row.label,
        f"{row.seconds * 1e3:.0f} ({low:.0f} to {high:.0f})",
        f"{row.samples_per_second:.1f}",
        f"{row.peak_bytes / 1e6:.0f} ({row.peak_low / 1e6:.0f} to {row.peak_high / 1e6:.0f})",
        "measurement" if row.measured else "prediction",
    )
