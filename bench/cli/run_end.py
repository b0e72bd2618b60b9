"""The end of bench run: ranking, answer, report and conclusion."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape

from bench.cli import terminal
from harness.analysis.answer import Answer, answer, what_more_would_buy
from harness.analysis.baseline import Choice
from harness.analysis.precision import Precision, precision, too_wide
from harness.analysis.setting import timed
from harness.analysis.summary import cell_results
from harness.record.conclusion import ConclusionRecord
from harness.record.plan import Plan
from harness.record.run import RunRecord
from harness.record.schema import VERSION
from harness.record.status import NOT_LAUNCHED
from harness.record.store import Store
from reports import write_report
from reports.groups import find_groups, headline

if TYPE_CHECKING:
    from rich.console import Console

    from harness.analysis.cell_result import CellResult
    from harness.record.store import Results


@dataclass(frozen=True)
class Ended:
    finished: bool
    """False if it was interrupted."""
    wall_seconds: float
    all_recorded: bool
    """Whether every share of the run is complete."""


@dataclass(frozen=True)
class EndOptions:
    report: bool
    """Whether to write the HTML report."""
    json_output: bool


def conclude(
    store: Store, plan: Plan, ended: Ended, baseline: Choice | None, options: EndOptions
) -> int:
    """Prints the ranking, the answer and the paths; writes the report. Returns the exit code."""
    console = terminal.console(quiet=options.json_output)
    store.gather(plan.run_id)
    loaded = store.load([plan.run_id], steps=False)
    if loaded.trials.empty:
        console.print("nothing was recorded")
        return 0 if ended.finished else 130
    results = cell_results(loaded.trials, baseline)
    terminal.ranking(console, results)
    if ended.finished:
        _say_what_is_too_wide(console, plan, loaded, results)
    measured = timed(results, plan.once)
    leading = headline(find_groups(results), plan.once) if plan.search is None else None
    advised = answer(leading.rows) if leading else None
    if leading and advised:
        terminal.advice(console, advised, leading.full_title)
    if plan.until_answered and (more := what_more_would_buy(measured)):
        console.print(f"{more} (--time-budget)", highlight=False)
    known = precision(measured)
    if known:
        console.print(known.sentence, highlight=False)
    if ended.all_recorded:
        store.write_conclusion(_conclusion(plan, ended, len(loaded.trials), known, advised))
    page = None
    if options.report and ended.all_recorded:
        path = Path("reports") / "html" / f"{plan.run_id}.html"
        page = write_report(loaded, path, "python -m bench report --out FILE", baseline)
    terminal.paths(console, store, plan, page, ended.finished)
    if options.json_output:
        recorded = RunRecord.from_frame(loaded.runs)
        whole = {"gpus_unused": recorded[0].gpus_unused if recorded else None}
        print(json.dumps(_as_json(store, plan, page, results, known, advised) | whole))
    if not ended.finished:
        return 130
    fine = all(c.status in NOT_LAUNCHED or c.ranked or c.expected for c in results)
    return 0 if fine else 1


def _say_what_is_too_wide(
    console: Console, plan: Plan, loaded: Results, results: list[CellResult]
) -> None:
    if plan.precision is None:
        return
    wide = too_wide(loaded.trials, plan.precision)
    names = {cell.cell_id: cell.cell.name for cell in results}
    shares = [f"{names[cell]} ({wide[cell]:.1%})" for cell in wide if cell not in plan.once]
    if shares:
        console.print(
            f"[yellow]interval wider than {plan.precision:.2%}[/yellow]:"
            f" {escape(', '.join(shares))}; the time budget is spent",
            highlight=False,
        )


def _conclusion(
    plan: Plan, ended: Ended, trials: int, known: Precision | None, advised: Answer | None
) -> ConclusionRecord:
    use = advised.advice[0] if advised else None
    return ConclusionRecord(
        schema_version=VERSION,
        run_id=plan.run_id,
        concluded_at=datetime.now(timezone.utc),
        wall_seconds=ended.wall_seconds,
        trials=trials,
        compared_cells=known.cells if known else 0,
        half_width_median=known.median if known else None,
        half_width_nine_in_ten=known.nine_in_ten if known else None,
        advised_cell_id=use.cell.cell_id if use else None,
        advice=use.sentence if use else None,
    )


def _as_json(
    store: Store,
    plan: Plan,
    page: Path | None,
    results: list[CellResult],
    known: Precision | None,
    advised: Answer | None,
) -> dict[str, object]:
    columns = (
        "cell_id",
        "cell_name",
        "status",
        "reason",
        "samples_per_second",
        "peak_memory_bytes",
        "parity_verdict",
    )
    return {
        "run_id": plan.run_id,
        "results": str(store.folder),
        "report": page and str(page),
        "precision": known and dataclasses.asdict(known),
        "answer": [
            {"role": a.role, "cell_id": a.cell.cell_id, "sentence": a.sentence}
            for a in (advised.advice if advised else ())
        ],
        "cells": [{name: cell.column(name) for name in columns} for cell in results],
    }
