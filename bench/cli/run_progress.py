from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from bench.cli.terminal import duration, table
from harness.analysis.maxsize import millions
from harness.analysis.scripts import rate_unit
from harness.cell.errors import plural
from harness.record.plan import Growth, steps_of
from harness.record.trial import NOT_AGAIN
from harness.run.allocation import may_be_advised
from harness.run.runner import ProgressListener

if TYPE_CHECKING:
    from bench.execution import Prepared
    from harness.cell.cell import Cell
    from harness.record.plan import Plan
    from harness.record.trial import TrialRecord

AS_EXPECTED = 0.1
"""Weight of the initial estimate, as a share of the run's expected seconds: a first trial that
builds a library predicts little."""


class RunProgress(ProgressListener):
    """A progress bar on a terminal, else a line per trial."""

    def __init__(
        self,
        out: Console,
        planned: Plan,
        seconds: dict[str, float],
        cells: Sequence[Cell],
        is_share: bool = False,
    ) -> None:
        """`cells`: cell of each open trial. `is_share`: whether other processes run the rest of the
        plan. A share runs all its trials and never races."""
        self.out, self.seconds, self.total, self.done = out, seconds, len(cells), 0
        self.open = Counter(cell.id for cell in cells)
        """Number of trials still to run, by cell id."""
        self.planned = len(planned.schedule())
        self.further, self.further_done = 0, 0
        """Number of the added round's trials, and of those that ended."""
        self.expected_done = self.launches_took = AS_EXPECTED * self.expected_left
        self.began = self.last_end = time.monotonic()
        self.budget = planned.time_budget_seconds or math.inf
        limited = planned.time_budget_seconds is not None and not is_share
        self.races = planned.until_answered and limited
        """Whether further trials fill the time budget."""
        self.spare = 0 if is_share else self.planned - planned.spare_from
        self.seconds_left = max(self.expected_left, self.budget if self.races else 0.0)
        self.current: Cell | None = None
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
        )
        self.bar = (
            Progress(*columns, console=out, auto_refresh=False)
            if out.is_terminal and not out.quiet
            else None
        )
        self.task = self.bar.add_task("starting", total=self.total, note="") if self.bar else None

    @property
    def expected_left(self) -> float:
        return sum(self.seconds.get(cell_id, 0.0) * self.open[cell_id] for cell_id in self.open)

    def __enter__(self) -> RunProgress:
        if self.bar:
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar:
            self.bar.stop()

    def _draw(self, description: str | None = None, note: str = "") -> None:
        if self.bar and self.task is not None:
            escaped = None if description is None else escape(description)
            self.bar.update(self.task, completed=self.done, description=escaped, note=note)
            self.bar.refresh()

    def preparing(self, what: str) -> None:
        self._draw(what)
        if not self.bar:
            self.out.print(escape(what))

    def round_added(self, cells: Sequence[Cell], among: str) -> None:
        self.further, self.further_done = len(cells), 0
        self.open += Counter(cell.id for cell in cells)
        self.preparing(f"one more round: {plural(len(cells), 'trial')} of {among}")

    def time_is_spent(self, left_out: int) -> None:
        self.open.clear()  # Left-out trials are among the last planned ones.
        self.total -= left_out
        self.spare -= left_out
        if self.bar and self.task is not None:
            self.bar.update(self.task, total=self.total)
        self.preparing(
            f"the time budget of {duration(self.budget)} is spent: skipping"
            f" {plural(left_out, 'trial')}, which bench run --resume runs"
        )

    def trial_started(self, cell: Cell, trial: int, position: int) -> None:
        self.current = cell
        if not self.done:
            self.last_end = time.monotonic()  # reference runs took the time until now
        self._draw(cell.name, f"{duration(self.seconds_left)} left")

    def step(self, step: int, seconds: float) -> None:
        if self.current:
            of = f"/{total}" if step < (total := self.current.total_steps) else ""
            note = f"step {step + 1}{of} {seconds * 1e3:.0f} ms, {duration(self.seconds_left)} left"
            self._draw(None, note)

    def trial_finished(self, cell: Cell, trial: TrialRecord) -> None:
        further = trial.position >= self.planned
        self.done, self.further_done = self.done + (not further), self.further_done + further
        added = f"further {self.further_done}/{self.further}" if further else ""
        self.open[cell.id] = 0 if trial.status in NOT_AGAIN else self.open[cell.id] - 1
        self._predict(self.seconds.get(cell.id, 0.0))
        good = trial.status == "ok" or trial.expected
        if not good:
            self.out.print(f"[red]{trial.status}[/red] {escape(cell.name)}: {escape(trial.reason)}")
        elif not self.bar:
            rate = (
                f"{trial.samples_per_second:.1f} {rate_unit(cell)}"
                if trial.samples_per_second
                else trial.status
            )
            steps = f" ({plural(trial.verified_steps, 'step')})" if trial.verified_steps else ""
            text = f"{cell.name}: {rate}, parity {trial.parity_verdict}{steps}"
            self.out.print(
                escape(
                    f"[{added or f'{self.done}/{self.total}'}] {text},"
                    f" {duration(self.seconds_left)} left"
                )
            )
        self._draw(None, f"{added} {duration(self.seconds_left)} left")

    def _predict(self, expected: float) -> None:
        now = time.monotonic()
        self.launches_took += now - self.last_end
        self.last_end = now
        self.expected_done += expected
        slower = self.launches_took / self.expected_done if self.expected_done else 1.0
        seconds, launches = slower * self.expected_left, self.open.total()
        least_seconds = seconds * max(0, launches - self.spare) / max(1, launches)
        left_of_budget = self.budget - (now - self.began)
        most_seconds = left_of_budget if self.races else min(seconds, left_of_budget)
        self.seconds_left = max(least_seconds, most_seconds)


class SearchProgress(ProgressListener):
    def __init__(self, out: Console, plan: Plan) -> None:
        self.out, self.plan = out, plan
        self.place = {cell.label: number for number, cell in enumerate(plan.cells)}
        self.began = time.monotonic()

    def preparing(self, what: str) -> None:
        self.out.print(what)

    def trial_finished(self, cell: Cell, trial: TrialRecord) -> None:
        number, total = self.place[cell.label], len(self.plan.cells)
        # On average, half of a strategy's probes are done.
        share = (number + (0.9 if trial.trial else 0.5)) / total
        left = (time.monotonic() - self.began) * (1 - share) / share
        if trial.status == "ok":
            result = f"trains, parity {trial.parity_verdict}" if trial.trial else "fits"
        elif trial.status == "out_of_memory":
            result = f"out of memory in {trial.failed_in}" if trial.failed_in else "out of memory"
        else:
            result = f"{trial.status}: {trial.reason}"
        assert trial.parameters is not None
        assert trial.wall_seconds is not None
        blocks = f"{cell.workload.rpartition('x')[2]} blocks"
        size = f"{blocks}, {millions(trial.parameters)} parameters"
        if self.plan.search and (growth := Growth.of(self.plan.search)).step:
            size = f"{steps_of(cell, growth) * growth.step} {growth.unit}"
        text = (
            f"{cell.label}: {size}{'' if cell.memory_limit_bytes else ' without the limit'}:"
            f" {result} ({trial.wall_seconds:.1f} s)"
        )
        self.out.print(escape(f"[{number + 1}/{total}] {text}, about {duration(left)} left"))


def show_summary(out: Console, prepared: Prepared, is_dry: bool) -> None:
    """Prints in five lines what a run will do."""
    from harness.cell.cell import without_folder
    from harness.workloads import make_workload

    planned, references = prepared.plan, prepared.references
    out.print(_title(planned))
    trials = plural(prepared.trials_to_run, "trial")
    out.print(f"{trials} to run, about {duration(prepared.total_seconds)}")
    runs = plural(references.number, "reference run")
    disk = f"{references.kept_bytes / 2**30:.1f} GiB of disk"
    out.print(f"{runs}, if none are cached: {duration(references.seconds)}, {disk}")
    seconds, budget = prepared.total_seconds + references.seconds, planned.time_budget_seconds
    total, then = f"about {duration(seconds)} in total", ""
    if planned.until_answered and budget and prepared.part[1] == 1:
        then = f", then further trials of cells that may be the best, until {duration(budget)}"
        if seconds > budget:
            then = f"; after {duration(budget)}, planned rounds from the third on are skipped"
    out.print(total + then)
    for name in dict.fromkeys(cell.workload for cell in planned.cells):
        for note in make_workload(name).notes:
            out.print(f"{escape(without_folder(name))}: {escape(note)}", highlight=False)
    if planned.left_out:
        statuses = Counter(absent.status for absent in planned.left_out).most_common()
        counts = ", ".join(f"{count} {status}" for status, count in statuses)
        left_out = plural(len(planned.left_out), "cell")
        where = "" if is_dry else "; --dry-run shows the reasons"
        out.print(f"left out: {left_out} ({counts}){where}")


def show_cells(out: Console, prepared: Prepared) -> None:
    """Prints every planned cell, and why others are left out."""
    from harness.cell.cell import over
    from harness.host.cores import oversubscribed

    planned, host, seconds = prepared.plan, prepared.host, prepared.seconds
    columns = ("strategy", "workload", "devices", "precision", "batch", "expected")
    rows = table(None, *columns, left=("workload", "precision"))
    for cell in planned.cells:
        crowded = oversubscribed(cell, host.cores and cell.nodes * host.cores)
        devices = f"{cell.devices}{' (more than cores)' if crowded else ''}"
        devices += f" on {cell.nodes} nodes" if cell.nodes > 1 else ""
        devices += f" {over(cell.links)}" if cell.links else ""
        batch = f"{cell.global_batch}{' weak' if cell.regime == 'weak' else ''}"
        per_trial = f"{seconds[cell.id]:.1f} s" if cell.id in seconds else "unknown"
        duration_text = f"{planned.trials_of(cell)} x {per_trial}"
        rows.add_row(
            escape(cell.label),
            escape(cell.workload_name),
            devices,
            cell.precision,
            batch,
            duration_text,
        )
    out.print(rows)
    for absent in planned.left_out:
        out.print(
            f"[yellow]left out[/yellow] {escape(absent.cell.name)}: {absent.status}:"
            f" {escape(absent.reason)}"
        )


def show_headline(
    out: Console, planned: Plan, cells: Sequence[Cell], baseline: Cell | None
) -> None:
    cell, candidates = cells[0], sum(map(may_be_advised, cells))
    against = "no baseline"
    if baseline is not None:
        against = f"baseline {baseline.label}, {plural(planned.trials_of(baseline), 'trial')}"
    out.print(
        f"headline: {cell.workload_name} · {cell.device} x{cell.devices} · {cell.precision} · batch"
        f" {cell.global_batch}: {candidates} of {len(cells)} cells may be"
        f" advised; {against}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def headline_as_json(cells: Sequence[Cell], baseline: Cell | None) -> dict[str, object]:
    fields = ("workload", "device", "devices", "nodes", "precision", "global_batch")
    return {
        **{name: getattr(cells[0], name) for name in fields},
        "cells": len(cells),
        "baseline_cell_id": baseline and baseline.id,
        "candidate_cell_ids": [cell.id for cell in filter(may_be_advised, cells)],
    }


def _title(planned: Plan) -> str:
    once = len(planned.not_compared)
    timed = (
        f"matrix {escape(planned.matrix)}: {plural(len(planned.cells) - once, 'cell')}"
        f" x {plural(planned.trials, 'trial')}"
    )
    return timed + (f", and {once} once, for parity" if once else "")
