"""Largest trainable model, or longest sequence, of each strategy within a memory budget, against
the formula."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.analysis.cell_result import CellResult, KeptStates, Memory, Parity
from harness.analysis.maxsize import MaxsizeResult, limits, maxsize_results, order_notes
from harness.record.plan import Plan
from harness.record.run import RunRecord
from harness.record.search import MATRIX
from harness.record.trial import TrialRecord
from harness.spec.cell import Cell
from reports.data import Bar, Bars
from reports.grid import Column, Grid, figure, full_grid, mebibytes, word
from reports.text import number, plain, size

if TYPE_CHECKING:
    from harness.record.store import Results

MILLION = 1e6


@dataclass(frozen=True)
class LargestModel(CellResult):
    """Largest size (parameters or tokens) of a strategy, as a cell; without an id if there is
    none."""

    reached: int | None = None
    next: int | None = None
    """Smallest size that does not train."""
    predicted: int | None = None
    ratio: float | None = None
    step: int | None = None
    setup_peak_memory_bytes: int | None = None
    failed_in: str | None = None


@dataclass(frozen=True)
class Largest:
    budget: str
    winner: LargestModel | None
    bars: Bars
    grid: Grid[LargestModel]
    order: tuple[str, ...]
    """A sentence per chain of strategies that theory orders."""
    limits: tuple[tuple[str, str], ...]
    """(strategy, what it ran out of memory with, or why it has no size)."""
    probes: int
    tokens: bool = False
    """Whether sizes are tokens of growing sequences, rather than parameters."""

    @property
    def unit(self) -> str:
        return "tokens" if self.tokens else "parameters"

    @property
    def what(self) -> str:
        return "longest sequence" if self.tokens else "largest model"


def is_search(run: RunRecord) -> bool:
    """Returns whether the run's trials are probes."""
    return run.matrix == MATRIX


def verified(trial: TrialRecord) -> bool:
    """Returns whether a trial is more than a probe of fit; probes that failed otherwise count
    too."""
    return trial.trial == 1 or trial.status not in ("ok", "out_of_memory")


def largest(results: Results) -> Largest | None:
    """Returns the section of a search; None for other runs, or if another version wrote the
    plan."""
    try:
        plan = Plan.from_row(results.runs.iloc[0].to_dict())
        rows = maxsize_results(results) if plan.search else []
    except (KeyError, TypeError, ValueError):
        return None
    if not rows or plan.search is None:
        return None
    every = (*(left.cell for left in plan.left_out), *plan.cells)
    cells = {cell.label: cell for cell in every}
    tokens = int(plan.search.get("tokens", 0))
    lines = [_line(row, cells[row.label]) for row in rows]
    reasons = [
        (row.label, f"{row.status}: {row.reason}" if row.reason else limits(row)) for row in rows
    ]
    chains = [
        sentence for chain in plan.search["order"] if (sentence := order_sentence(rows, chain))
    ]
    reached = [line for line in lines if line.reached]
    return Largest(
        size(plan.search["budget"]),
        max(reached, key=lambda line: line.reached or 0, default=None),
        _bars(lines, bool(tokens)),
        _table(lines, bool(tokens)),
        (*chains, *order_notes(rows, plan.search["order"])),
        tuple((label, text) for label, text in reasons if text),
        sum(row.probes for row in rows),
        bool(tokens),
    )


def _line(row: MaxsizeResult, cell: Cell) -> LargestModel:
    size = {"sequence_length": row.parameters} if row.tokens and row.parameters else {}
    reached = cell.model_copy(update={"workload": row.workload, **size})
    return LargestModel(
        run_id="",
        cell=reached,
        cell_id=reached.id if row.parameters else "",
        status=row.status,
        reason=row.reason,
        reached=row.parameters,
        next=row.next_parameters,
        predicted=row.predicted,
        ratio=row.ratio,
        step=row.step,
        setup_peak_memory_bytes=row.setup_peak_memory_bytes,
        failed_in=row.failed_in,
        memory=Memory(peak_memory_bytes=row.peak_memory_bytes),
        states=KeptStates(state_bytes=sum(row.kept.values()) if row.kept else None),
        parity=Parity(verdict=row.parity),
    )


def order_sentence(rows: Sequence[MaxsizeResult], chain: Sequence[str]) -> str:
    """Returns `As theory has it: a 10.0M < b 20.0M`; empty below two strategies with a size."""
    by_label = {row.label: row for row in rows if row.parameters}
    present = [by_label[label] for label in chain if label in by_label]
    if len(present) < 2:
        return ""
    kept = all(
        (more.parameters or 0) > (less.parameters or 0)
        for less, more in itertools.pairwise(present)
    )
    measured = sorted(present, key=lambda row: row.parameters or 0)
    words = f"{measured[0].label} {measured[0].largest_model}"
    for less, more in itertools.pairwise(measured):
        sign = "<" if less.parameters != more.parameters else "="
        words += f" {sign} {more.label} {more.largest_model}"
    if kept:
        return f"Measured, and in the order of theory: {words}"
    return f"Measured: {words}; theory has {' < '.join(row.label for row in present)}"


def _bars(lines: Sequence[LargestModel], tokens: bool) -> Bars:
    """Returns millions of parameters, or tokens, most first, marking the formula's."""
    ordered = sorted(lines, key=lambda line: -(line.reached or 0))
    bars = [_bar(line, ordered[0].reached, tokens) for line in ordered]
    words = "; ".join(f"{bar.label} {bar.text}" for bar in bars)
    what = "Longest sequence in" if tokens else "Largest trainable model in millions of"
    unit = "tokens" if tokens else "parameters"
    return Bars(
        "largest",
        "Reached, and by the formula",
        f"{'' if tokens else 'millions of '}{unit}; in brackets: over the formula's",
        tuple(bars),
        f"{what} {unit}, in brackets over the formula's: {words}",
        target="formula",
    )


def _bar(line: LargestModel, best: int | None, tokens: bool) -> Bar:
    scale, suffix = (1, "") if tokens else (MILLION, "M")
    value, target = (n / scale if n else None for n in (line.reached, line.predicted))
    ratio = "" if line.ratio is None else f" ({number(line.ratio)})"
    return Bar(
        f"{line.cell.label} x{line.cell.devices}" if line.step else line.cell.label,
        value,
        f"{number(value)}{suffix}{ratio}" if value else line.status,
        strong=bool(value) and line.reached == best,
        target=target,
        failed=not value and line.status != "unfinished",
    )


def _table(lines: Sequence[LargestModel], tokens: bool) -> Grid[LargestModel]:
    unit, what = ("tokens", "sequence") if tokens else ("parameters", "model")
    most, least = ("longest", "shortest") if tokens else ("largest", "smallest")
    columns: list[Column[LargestModel]] = [
        Column("Ranks", "", "", figure("devices", lambda ranks: plain(ranks or None))),
        Column("Reached", unit, f"the {most} {what} that trains", figure("reached", plain)),
        Column("Too large", unit, f"the {least} {what} that does not", figure("next", plain)),
        Column("Search step", unit, "" if tokens else "of one block", figure("step", plain)),
        Column(
            "Formula",
            unit,
            "what states, and what a step needs beside them, allow",
            figure("predicted", plain),
        ),
        Column("Reached / formula", "", "", figure("ratio", number)),
        Column("Peak", "MiB", "fullest rank", mebibytes("peak_memory_bytes")),
        Column("Set-up peak", "MiB", "before the first step", mebibytes("setup_peak_memory_bytes")),
        Column("States", "MiB", "fullest rank, between steps", mebibytes("state_bytes")),
        Column("Runs out in", "", "", word("failed_in")),
        Column("Parity", "", "", word("parity_verdict")),
        Column("Search", "", "", word("status")),
    ]
    label = f"{most.title()} trainable {what}, {len(lines)} strategies"
    return full_grid("largest-table", label, lines, columns)
