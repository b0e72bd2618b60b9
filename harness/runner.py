"""Order of trials, references, progress, resume, stop."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import random
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, Protocol

from harness.cell import Cell
from harness.environment import environment, gpus, version_of
from harness.errors import Mistake
from harness.launch import Launcher, Outcome
from harness.measure.bubble import bubble_fraction
from harness.measure.flops import peak_flops_per_second
from harness.parity import HALF_BATCH_NORM, PRECISION, SPLIT_BATCH_NORM, VERSION, Reference, Verdict, judge, loss_deviations, widest
from harness.record import left_out_row, mean_losses, step_rows, trial_row
from harness.schema import VERSION as SCHEMA_VERSION
from harness.store import Store, TrialKey
from harness.strategy import EXACT, Deviation, Layout, Strategy, admit, batch_norm_is_split, make_strategy
from harness.workloads import Workload, make_workload, prepare_data
from harness.workloads.data import cache_folder
from harness.workloads.facts import model_facts


@dataclass(frozen=True)
class LeftOut:
    """A cell that will not be launched, and why."""

    cell: Cell
    status: str
    reason: str


@dataclass(frozen=True)
class Plan:
    """One execution of a matrix: everything that is needed to go on with it elsewhere."""

    run_id: str
    matrix: str
    cells: tuple[Cell, ...]
    trials: int
    left_out: tuple[LeftOut, ...] = ()
    order_seed: int = 0
    search: dict[str, Any] | None = None
    """What a search knew before it began (see harness/maxsize.py); its cells are then families, not what is launched."""

    @classmethod
    def new(cls, matrix: str, cells: Sequence[Cell], trials: int, left_out: Sequence[LeftOut]) -> Plan:
        run_id = f"{datetime.now(timezone.utc):%Y%m%dT%H%M%S}-{secrets.token_hex(2)}"
        return cls(run_id, matrix, tuple(cells), trials, tuple(left_out), secrets.randbelow(2**31))

    def schedule(self) -> list[tuple[Cell, int]]:
        """(cell, trial) in order: rounds over all cells, each shuffled anew, so that drift hits all cells alike."""
        order = []
        for trial in range(self.trials):
            cells = list(self.cells)
            random.Random(self.order_seed + trial).shuffle(cells)
            order += [(cell, trial) for cell in cells]
        return order

    def to_json(self) -> str:
        return json.dumps(
            {
                "cells": [c.model_dump(mode="json") for c in self.cells],
                "trials": self.trials,
                "order_seed": self.order_seed,
                "left_out": [{"cell": x.cell.model_dump(mode="json"), "status": x.status, "reason": x.reason} for x in self.left_out],
                **({"search": self.search} if self.search else {}),
            }
        )

    @classmethod
    def from_row(cls, row: Any) -> Plan:
        """The plan of a run that is in the store."""
        plan = json.loads(row["plan"])
        left_out = tuple(LeftOut(Cell(**x["cell"]), x["status"], x["reason"]) for x in plan["left_out"])
        cells = tuple(Cell(**c) for c in plan["cells"])
        return cls(row["run_id"], row["matrix"], cells, plan["trials"], left_out, plan["order_seed"], plan.get("search"))


class Watcher(Protocol):
    """What a runner tells while it works; the command line draws it."""

    def preparing(self, what: str) -> None: ...
    def trial_started(self, cell: Cell, trial: int, position: int) -> None: ...
    def step(self, step: int, seconds: float) -> None: ...
    def trial_finished(self, cell: Cell, row: dict[str, Any]) -> None: ...


def resumable(store: Store, matrix: str | None) -> Plan:
    """The newest run (of this matrix), also where only its report is missing; raises Mistake where there is none."""
    for run_id in reversed(store.run_ids()):
        plan = Plan.from_row(store.load([run_id], steps=False).runs.iloc[0])
        if matrix == plan.matrix or (matrix is None and plan.search is None):
            return plan
    of = f" of matrix {matrix!r}" if matrix else ""
    raise Mistake(f"nothing to resume in {str(store.folder)!r}: no run{of}; leave --resume out to start one")


def expected_seconds(store: Store, cells: Sequence[Cell], cores: int) -> dict[str, float]:
    """Seconds a trial of each cell will take, by cell id: as long as it took before, else by its FLOPs."""
    before: dict[str, float] = {}
    if store.run_ids():
        trials = store.load(steps=False).trials
        done = trials[trials["wall_seconds"].notna()]
        before = {str(k): float(v) for k, v in done.groupby("cell_id")["wall_seconds"].median().items()}
    result = {}
    for cell in cells:
        if cell.id in before:
            result[cell.id] = before[cell.id]
            continue
        flops = model_facts(make_workload(cell.workload), cell.sequence_length).flops_per_sample * cell.global_batch * cell.total_steps
        # 40 GFLOP/s a core in fp32 and 100 TFLOP/s a GPU are cautious guesses, replaced by the first measurement.
        rate = 1e14 if cell.device == "cuda" else 4e10 * min(cores, cell.devices * cell.threads_per_device)
        result[cell.id] = (4.0 if cell.launcher == "spawn" else 0.5) + flops / rate
    return result


# What a cell did once it would do again: its other trials are not launched.
_NOT_AGAIN = ("out_of_memory", "timeout")


@dataclass
class Runner:
    """Runs what is open of a plan, in order, recording each trial as it ends."""

    store: Store
    plan: Plan
    launcher: Callable[[Sequence[str]], Launcher] = Launcher
    _given_up: dict[str, str] = field(default_factory=dict)
    _no_reference: dict[str, str] = field(default_factory=dict)

    def open_trials(self) -> list[tuple[int, Cell, TrialKey]]:
        """(position, cell, key) of the trials that have no final record yet."""
        import pyarrow.parquet as pq

        folder = self.store.folder / "trials" / self.plan.run_id
        attempts: dict[tuple[str, int], int] = {}
        finished = set()
        for key in self.store.recorded(self.plan.run_id):
            attempts[key.cell_id, key.trial] = max(key.attempt, attempts.get((key.cell_id, key.trial), 0))
            status = pq.ParquetFile(folder / f"{key.stem}.parquet").read(columns=["status"]).column(0)[0].as_py()
            if status != "interrupted":
                finished.add((key.cell_id, key.trial))
            if status in _NOT_AGAIN:
                self._given_up[key.cell_id] = status
        todo = []
        for position, (cell, trial) in enumerate(self.plan.schedule()):
            if (cell.id, trial) not in finished and not (trial > 0 and cell.id in self._given_up):
                todo.append((position, cell, TrialKey(cell.id, trial, attempts.get((cell.id, trial), 0) + 1)))
        return todo

    def begin(self) -> None:
        """Writes the run's row."""
        row = {
            "schema_version": SCHEMA_VERSION,
            "run_id": self.plan.run_id,
            "started_at": datetime.now(timezone.utc),
            "matrix": self.plan.matrix,
            "plan": self.plan.to_json(),
            **environment(),
        }
        self.store.write_run(row)

    def run(self, watcher: Watcher) -> bool:
        """Runs all open trials; False if it was interrupted (what was running is then recorded as such)."""
        recorded = self.store.recorded(self.plan.run_id)
        for left in self.plan.left_out:
            if TrialKey(left.cell.id, 0) not in recorded:
                self.store.write_trial(left_out_row(self.plan.run_id, left.cell, left.status, left.reason), [])
        todo = self.open_trials()
        if not todo:
            return True
        launcher = self.start([cell for _, cell, _ in todo])
        references = self._references(launcher, [cell for _, cell, _ in todo], watcher)
        for position, cell, key in todo:
            if cell.id in self._given_up and key.trial > 0:
                continue
            if key.trial == 0 and (reason := self._needs_more_memory(cell)):  # later ones have a trial that says it fits
                self._given_up[cell.id] = "out_of_memory"
                row = left_out_row(self.plan.run_id, cell, "out_of_memory", reason) | {"attempt": key.attempt, "position": position}
                self.store.write_trial(row, [])
                watcher.trial_finished(cell, row)
                continue
            watcher.trial_started(cell, key.trial, position)
            row = self.one(launcher, cell, key, position, references[_reference_key(cell)], watcher.step)
            watcher.trial_finished(cell, row)
            if row["status"] in _NOT_AGAIN:
                self._given_up[cell.id] = row["status"]
            if row["status"] == "interrupted":
                return False
        return True

    def start(self, cells: Sequence[Cell]) -> Launcher:
        """A launcher whose fork server holds what these cells need."""
        return self.launcher(_packages(cells))

    def one(
        self, launcher: Launcher, cell: Cell, key: TrialKey, position: int, reference: Reference | None, heard: Callable[[int, float], None]
    ) -> dict[str, Any]:
        """Launches, judges and records one trial; returns its row. Without a reference its parity stays unknown."""
        workload = make_workload(cell.workload)
        strategy, layout = admit(cell, workload)
        data = prepare_data(cell.data, workload, cell.sequence_length)
        facts = model_facts(workload, cell.sequence_length)
        known = reference if reference and reference.exists else None
        outcome = launcher.run(
            cell,
            data,
            layout.processes,
            reference=known.folder if known else None,
            max_restarts=strategy.max_restarts,
            command=functools.partial(strategy.command, cell),
            on_progress=heard,
        )
        reference_losses = known.facts["losses"][: cell.parity_steps] if known else []
        verdict = None
        if outcome.status == "ok":
            allowed = allowed_deviation(cell, workload, strategy, layout)
            why_not = self._no_reference.get(reference.folder, "") if reference else "a probe is not compared with a reference run"
            verdict = _verdict(cell, workload, allowed, outcome, reference_losses, why_not)
        gpu = gpus()[0][0] if cell.device == "cuda" and gpus() else None
        peak = peak_flops_per_second(gpu, workload.arithmetic or cell.precision)
        busy = [a["busy_fraction"] for a in outcome.answers if a.get("busy_fraction") is not None]
        row = trial_row(
            self.plan.run_id,
            cell,
            key,
            position,
            layout,
            strategy.stand_in(cell),
            outcome,
            facts,
            data.fingerprint,
            verdict,
            reference_losses,
            peak,
            bubble_fraction(busy) if busy else None,
            formula=strategy.states(cell, layout, facts),
            wraps_ddp=strategy.same_as_ddp(cell),
            fp32_loss_deviation=_distance_to_fp32(cell, outcome),
        )
        self.store.write_trial(row, step_rows(self.plan.run_id, key, outcome.answers))
        return row

    def _references(self, launcher: Launcher, cells: Sequence[Cell], watcher: Watcher) -> dict[str, Reference]:
        """The reference of every cell; runs those that are not kept from before."""
        found: dict[str, Reference] = {}
        for cell in [*cells, *(twin for cell in cells if (twin := _in_fp32(cell)))]:
            key = _reference_key(cell)
            if key in found:
                continue
            found[key] = reference = _reference_of(cell)
            if not reference.exists:
                watcher.preparing(f"reference run of {cell.workload}, batch {cell.global_batch}, {cell.optimizer}")
                workload = make_workload(cell.workload)
                data = prepare_data(cell.data, workload, cell.sequence_length)
                outcome = launcher.run(cell.reference(), data, 1, reference_output=reference.folder)
                if outcome.status == "interrupted":
                    raise KeyboardInterrupt
                if outcome.status != "ok":
                    self._no_reference[reference.folder] = f"the reference run ended {outcome.status}: {outcome.reason}"
        return found

    def _needs_more_memory(self, cell: Cell) -> str | None:
        """The reason not to try a cell: one that differs only by needing no more of anything ran out of memory."""
        for other in self.plan.cells:
            if self._given_up.get(other.id) != "out_of_memory" or other.id == cell.id:
                continue
            if _more_of_the_same(cell, other):
                return f"left out: {other.name} ran out of memory and this needs more"
        return None


def _more_of_the_same(cell: Cell, other: Cell) -> bool:
    """Whether `cell` is `other` with a larger model, batch or sequence, or fewer devices to spread it over."""
    sizes = {"workload", "global_batch", "sequence_length", "devices"}
    if cell.model_dump(exclude=sizes) != other.model_dump(exclude=sizes):
        return False
    one, two = make_workload(cell.workload), make_workload(other.workload)
    same_kind = one.family is two.family is not None and one.suffixes == two.suffixes
    if cell.workload != other.workload and not same_kind:
        return False

    def needs(one: Cell) -> tuple[int, ...]:
        parameters = model_facts(make_workload(one.workload), one.sequence_length).parameters
        return parameters, one.global_batch, one.sequence_length, -one.devices

    return all(a >= b for a, b in zip(needs(cell), needs(other), strict=True))


def _packages(cells: Sequence[Cell]) -> list[str]:
    """The packages that these cells' strategies and workloads require, and modules of theirs."""
    strategies = [make_strategy(cell) for cell in cells]
    needed = [p for strategy in strategies for p in (*strategy.requires, *strategy.preload)]
    needed += [p for cell in cells for p in make_workload(cell.workload).requires]
    return list(dict.fromkeys(needed))


def _reference_key(cell: Cell) -> str:
    """Name of the reference run's folder: what it trains, on which data, with which versions."""
    workload = make_workload(cell.workload)
    data = prepare_data(cell.data, workload, cell.sequence_length)
    versions = [version_of(package) for package in ("torch", "transformers", *workload.requires)]
    said = (VERSION, cell.reference().id, data.fingerprint, workload.version, *versions)
    return f"{cell.workload.replace('/', '_').replace(':', '_')[-40:]}-{hashlib.blake2s(repr(said).encode(), digest_size=8).hexdigest()}"


def _reference_of(cell: Cell) -> Reference:
    return Reference(str(cache_folder() / "references" / _reference_key(cell)))


def _in_fp32(cell: Cell) -> Cell | None:
    """The cell with the same workload's weights in fp32; None where they are."""
    name = make_workload(cell.workload).in_fp32
    return cell.model_copy(update={"workload": name}) if name else None


def _distance_to_fp32(cell: Cell, outcome: Outcome) -> float | None:
    """Largest relative deviation of the losses from the fp32 reference's; None where weights are fp32 or a loss is not finite."""
    twin = _in_fp32(cell)
    if outcome.status != "ok" or twin is None or not (reference := _reference_of(twin)).exists:
        return None
    farthest = max(loss_deviations(mean_losses(outcome.answers), reference.facts["losses"][: cell.parity_steps]))
    return farthest if math.isfinite(farthest) else None


def allowed_deviation(cell: Cell, workload: Workload, strategy: Strategy, layout: Layout) -> Deviation:
    """What the strategy and the workload declare, and what the precision and a split BatchNorm add."""
    reasons = [strategy.deviation(cell, workload), workload.deviation(cell) or EXACT]
    if cell.precision in PRECISION:
        reasons += [PRECISION[cell.precision], *([HALF_BATCH_NORM] if workload.batch_norm else [])]
    if batch_norm_is_split(strategy, cell, workload, layout):
        reasons.append(SPLIT_BATCH_NORM)
    return widest(*reasons)


def _verdict(
    cell: Cell, workload: Workload, allowed: Deviation, outcome: Outcome, reference_losses: Sequence[float], why_not: str
) -> Verdict:
    if not reference_losses:
        return Verdict("unknown", why_not, None, None, None, allowed.loss, allowed.update)
    return judge(
        mean_losses(outcome.answers),
        reference_losses,
        [a["update_deviations"] for a in outcome.answers],
        model_facts(workload, cell.sequence_length).trainable,
        allowed,
        workload.split.tied if workload.split else None,
    )
