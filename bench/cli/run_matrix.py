"""Runs a planned matrix; prints its ranking, answer and report."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape

from bench.cli import terminal
from bench.cli.run_progress import (
    RunProgress,
    headline_as_json,
    show_cells,
    show_headline,
    show_summary,
)
from bench.execution import Ended, Prepared, conclude, execute, prepare
from bench.run_options import CommandOptions
from harness.analysis.answer import what_more_would_buy, why_no_advice, why_no_more_trials
from harness.analysis.ranking import Choice
from harness.analysis.scripts import script_sentences
from harness.analysis.setting import timed
from harness.host.process import why_not_alone
from harness.record.plan import Plan
from harness.record.store import Store
from harness.record.trial import NOT_LAUNCHED
from harness.run.allocation import planned_headline
from reports import write_report
from reports.claims import claims
from reports.run_report import RunReport
from reports.verdict_sections import export_command

if TYPE_CHECKING:
    from rich.console import Console


def run_matrix(options: CommandOptions) -> int:
    if options.with_parent:
        from harness.host.process import die_with_parent

        die_with_parent()
    console = terminal.console(quiet=options.json_output)
    prepared = prepare(options)
    gpus_unused = None if options.host else terminal.say_unused_gpus(console)
    if options.dry_run:
        show_cells(console, prepared)
    if not (options.dry_run or options.rendezvous) and (why := why_not_alone()):
        console.print(f"note: {why}", highlight=False, soft_wrap=True)
    show_summary(console, prepared, options.dry_run)
    if options.dry_run:
        _show_dry_run(console, prepared, gpus_unused, options.json_output)
        return 0
    ended = execute(
        prepared,
        options,
        lambda plan, cells: RunProgress(
            console, plan, prepared.seconds, cells, is_share=prepared.part[1] > 1
        ),
        console.print,
    )
    return show_end(prepared.store, ended, prepared.baseline, options)


def _show_dry_run(
    console: Console, prepared: Prepared, gpus_unused: str | None, json_output: bool
) -> None:
    plan, host = prepared.plan, prepared.host
    planned = planned_headline(plan, host.cores, prepared.baseline)
    if planned:
        show_headline(console, plan, *planned)
    if json_output:
        from harness.run.expected import CPU, GPU

        expected = {
            "expected_seconds": prepared.seconds,
            "predicted_from": dataclasses.asdict(GPU if host.device == "cuda" else CPU),
            "references": dataclasses.asdict(prepared.references),
            "headline": planned and headline_as_json(*planned),
            "gpus_unused": gpus_unused,
        }
        print(json.dumps(json.loads(plan.to_json()) | expected))


def show_end(store: Store, ended: Ended, baseline: Choice | None, options: CommandOptions) -> int:
    """Prints the results; writes the report; returns the exit code."""
    console = terminal.console(quiet=options.json_output)
    plan, report = ended.plan, conclude(store, ended, baseline)
    if report is None:
        console.print("nothing was recorded")
        return 0 if ended.finished else 130
    terminal.ranking(console, report.cells)
    _say_answer(console, plan, report)
    page = None
    if options.report and ended.all_recorded:
        path = Path("reports") / "html" / f"{plan.run_id}.html"
        page = write_report(report.results, path, "python -m bench report --out FILE", baseline)
    terminal.paths(console, store, plan, page, ended.finished)
    if options.json_output:
        print(json.dumps(_as_json(store, page, report)))
    if not ended.finished:
        return 130
    fine = all(c.status in NOT_LAUNCHED or c.ranked or c.expected for c in report.cells)
    return 0 if fine else 1


def _say_answer(console: Console, plan: Plan, report: RunReport) -> None:
    if report.leading and report.advised:
        terminal.advice(console, report.advised, report.leading.full_title, report.between_runs)
    elif sentences := script_sentences(report.cells):
        for sentence in sentences:
            console.print(escape(sentence), highlight=False)
    elif report.leading:
        console.print(f"no advice: {why_no_advice(report.leading.rows)}", markup=False)
    measured = timed(report.cells, plan.not_compared)
    if plan.until_answered and (more := what_more_would_buy(measured)):
        console.print(f"{more} (--time-budget)", highlight=False, markup=False)
    if coarse := why_no_more_trials(measured):
        console.print(coarse, highlight=False, markup=False)
    if report.advised and report.advised.known_to:
        console.print(report.advised.known_to, highlight=False, markup=False)


def _as_json(store: Store, page: Path | None, report: RunReport) -> dict[str, object]:
    columns = (
        "cell_id",
        "cell_name",
        "status",
        "reason",
        "samples_per_second",
        "peak_memory_bytes",
        "parity_verdict",
        "verified_steps",
    )
    return {
        "run_id": report.run_id,
        "results": str(store.folder),
        "report": page and str(page),
        "precision": report.advised and report.advised.precision,
        "between_runs": report.between_runs,
        "answer": [
            {"role": a.role, "cell_id": a.cell.cell_id, "sentence": a.sentence}
            for a in (report.advised.advice if report.advised else ())
        ],
        "claims": claims(report),
        "scripts": script_sentences(report.cells),
        "command": report.advised and export_command(report.advised),
        "cells": [{name: cell.column(name) for name in columns} for cell in report.cells],
        "gpus_unused": report.run.gpus_unused,
    }
