from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from bench.cli.options import (
    Devices,
    ExportFolder,
    Goal,
    Html,
    Json,
    LocalResults,
    MaybeBatch,
    MaybePerNode,
    MaybeSeq,
    MaybeWorkload,
    NodeLink,
    Precision,
    Top,
    WrittenMatrix,
)
from bench.cli.plan import Files, write_all

if TYPE_CHECKING:
    from rich.table import Table

    from harness.planner.follow_up import FollowUp
    from harness.planner.local.local_plan import LocalCandidate, LocalPlan, LocalVariant

MAX_REASONS = 6

Unseen: TypeAlias = Annotated[
    bool, typer.Option("--unseen", help="Predict as if no cell of the model had been measured.")
]


def predict(
    workload: MaybeWorkload = None,
    devices: Devices = 2,
    per_node: MaybePerNode = None,
    link: NodeLink = "",
    seq: MaybeSeq = None,
    batch: MaybeBatch = None,
    precision: Precision = "fp32",
    results: LocalResults = None,
    unseen: Unseen = False,
    goal: Goal = "throughput",
    top: Top = 10,
    matrix: WrittenMatrix = None,
    export: ExportFolder = None,
    html: Html = None,
    json_output: Json = False,
) -> None:
    """Predict the best strategy on this machine's CPU cores.

    Predicts from cells measured on it. Workload, sequence length and batch default to the
    most-measured ones.

    Example: [bold]python -m bench predict --workload gpt2-mini --batch 16[/bold]
    """
    from harness.planner.local.local_plan import explanation
    from harness.planner.local.measurements import read_measurements
    from harness.planner.local.plan_request import (
        PlanRequest,
        calibrated,
        plan_setting,
        sweep_settings,
    )

    request = PlanRequest(workload, devices, per_node, link, seq, batch, precision, goal, unseen)
    request.check()
    measured = read_measurements(tuple(results or (Path("results"),)), request.workload)
    setting = request.setting(measured)
    calibration = calibrated(measured, setting.workload if request.unseen else "")
    answer, variants = plan_setting(setting, request, measured, calibration)
    sentences = explanation(answer)
    page = ""
    if html:
        from reports.prediction_page import local_page

        swept = sweep_settings(setting, request, measured, calibration)
        page = local_page(answer, sentences, measured.machine, swept)
    written = _written(answer, variants, Files(matrix, export, html), page)
    if json_output:
        document = dataclasses.asdict(answer) | {
            "explanation": sentences,
            "machine": measured.machine,
            "written": written,
        }
        print(json.dumps(document))
        return
    _show(answer, top, sentences, (f"measured on: {measured.machine}", *written))


def _show(answer: LocalPlan, top: int, sentences: Sequence[str], last_lines: Sequence[str]) -> None:
    from rich.markup import escape

    from bench.cli import terminal

    console = terminal.console()
    console.print(_table(answer, top))
    for sentence in sentences:
        console.print(escape(sentence))
    for reason, count in list(answer.refused.items())[:MAX_REASONS]:
        console.print(escape(f"left out, {count}: {reason}"))
    if len(answer.refused) > MAX_REASONS:
        console.print(f"left out for {len(answer.refused) - MAX_REASONS} other reasons, see --json")
    for sentence in last_lines:
        console.print(escape(sentence))


def _written(
    answer: LocalPlan, variants: Sequence[LocalVariant], files: Files, page: str
) -> list[str]:
    from bench.cli.terminal import measure_command
    from harness.planner.follow_up import first_export, matrix_file
    from harness.planner.local.local_plan import open_questions

    prepared: list[FollowUp] = []
    written = []
    candidates = answer.candidates or answer.inexact
    cells = {variant.cell.id: variant.cell for variant in variants}
    if files.matrix:
        chosen = (candidates[0], *open_questions(candidates, answer.goal))
        ordered = [cells[candidate.cell_id] for candidate in chosen]
        matrix = matrix_file(files.matrix, ordered, "Cells whose predictions are tied.")
        prepared.append(matrix)
        written.append(f"{matrix.message}; {measure_command(files.matrix)}")
    if files.export:
        ranked = ((cells[candidate.cell_id], candidate.seconds) for candidate in candidates)
        export = first_export(ranked, files.export)
        prepared.append(export)
        written.append(export.message)
    if files.html:
        written.append(f"page: {files.html}")
    write_all(prepared, page, files.html)
    return written


def _table(plan: LocalPlan, top: int) -> Table:
    from rich.markup import escape

    from bench.cli import terminal

    columns = ("strategy", "step (ms)", "samples/s", "fullest rank (MB)", "known by")
    table = terminal.table(f"{escape(plan.setting)}; 80 % intervals", *columns)
    table.columns[0].min_width = 20
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
