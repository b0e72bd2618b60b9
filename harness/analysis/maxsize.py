from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from harness.cell.cell import Cell
from harness.record.plan import (
    BLOCKS,
    COLUMNS,
    KINDS,
    MATRIX,
    NOT_A_SIZE_LIMIT,
    Growth,
    Plan,
    SearchPlan,
    cell_at_size,
    steps_of,
)
from harness.record.store import Results
from harness.record.trial import TrialRecord


@dataclass(frozen=True)
class Holding:
    """Bytes that a rank held when it ran out of memory (see harness/measure/memory_kinds.py)."""

    in_use: float
    kinds: Mapping[str, float]
    other: float = 0.0
    stacks: float = 0.0
    buffers: Mapping[str, float] = field(default_factory=dict)
    largest: tuple[str, ...] = ()


@dataclass(frozen=True)
class MaxsizeResult:
    label: str
    status: str
    """found, none fits, all fit, unfinished, stopped (a probe failed, but not for lack of memory),
    unavailable, refused."""
    reason: str
    workload: str
    budget: int
    unit: str = BLOCKS.unit
    step: int | None = None
    """Size that each search step adds."""
    parameters: int | None = None
    """Maximum size that trains, in `unit`."""
    next_parameters: int | None = None
    """Minimum size that does not train, in `unit`."""
    predicted: int | None = None
    """Maximum size that fits according to the formula."""
    peak_memory_bytes: int | None = None
    setup_peak_memory_bytes: int | None = None
    parity: str | None = None
    kept_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes that the fullest rank keeps between steps, by kind."""
    buffers: Mapping[str, int] = field(default_factory=dict)
    failed_in: str | None = None
    """Operation in which the next larger model ran out of memory."""
    failure: str = ""
    """Failure of the next larger model; empty if it only ran out of memory."""
    holding: Holding | None = None
    formula: Mapping[str, float] = field(default_factory=dict)
    probes: int = 0
    seconds: float = 0.0

    @property
    def largest_model(self) -> str:
        """Largest size that trains, such as `50.1M` or `4096 tokens`; the status if there is
        none."""
        return self.text(self.parameters) if self.parameters else self.status

    def text(self, size: int) -> str:
        return millions(size) if self.unit == BLOCKS.unit else f"{size} {self.unit}"

    def amount(self, size: int) -> str:
        return self.text(size) + (f" {self.unit}" if self.unit == BLOCKS.unit else "")

    @property
    def too_large(self) -> str:
        return self.amount(self.next_parameters or 0)

    @property
    def ratio(self) -> float | None:
        return self.parameters / self.predicted if self.parameters and self.predicted else None

    @property
    def fill(self) -> dict[str, float]:
        """Bytes that filled the budget, by kind; empty if memory did not run out.

        `temporaries` are the failed operation's, `rest` is saved activations, C++ buffers, Python.
        """
        if self.holding is None:
            return {}
        sizes = dict(self.holding.kinds)
        remaining = max(0.0, self.holding.in_use - sum(sizes.values()))
        # Stacks may be in use again, and tensors may be views of a library's buffers.
        sizes["stacks of threads"] = min(self.holding.stacks, remaining)
        sizes["other tensors"] = min(self.holding.other, remaining - sizes["stacks of threads"])
        sizes["rest"] = max(0.0, self.holding.in_use - sum(sizes.values()))
        sizes["temporaries"] = max(0.0, self.budget - self.holding.in_use)
        return sizes

    @property
    def responsible(self) -> list[tuple[str, float]]:
        """Names and bytes of memory beyond ZeRO's model states, largest first, from 1% of the
        budget."""
        if self.holding is None:
            return []
        fill = self.fill
        largest = ", ".join(self.holding.largest)
        names = {
            "other tensors": f"other tensors ({largest})" if largest else "other tensors",
            "temporaries": f"temporaries of {self.failed_in}",
            "rest": "activations, C++ buffers and Python's heap",
        }
        beyond = {names.get(name, name): n for name, n in fill.items() if name not in KINDS}
        beyond |= self.holding.buffers
        if self.formula:
            for kind in KINDS[:3]:
                beyond[f"{kind} beyond the formula's"] = fill[kind] - self._expected(kind)
        large = [(name, size) for name, size in beyond.items() if size >= self.budget / 100]
        return sorted(large, key=lambda part: -part[1])

    def _expected(self, kind: str) -> float:
        if kind != "gradients":
            return self.formula[kind]
        held = self.holding.kinds["library"] if self.holding else 0.0
        missing = max(0.0, self.formula["library"] - held)
        return self.formula[kind] + self.formula["transient"] + missing


def millions(parameters: int) -> str:
    return f"{parameters / 1e6:.1f}M"


def mebibytes(size: float) -> str:
    return f"{size / 2**20:.0f} MiB"


def limits(row: MaxsizeResult) -> str:
    sentences = []
    if row.failed_in:
        beyond = ", ".join(f"{name} {mebibytes(size)}" for name, size in row.responsible)
        sentences.append(
            f"{row.too_large} run out of memory in {row.failed_in};"
            f" in addition to ZeRO's model states: {beyond}"
        )
    elif row.failure:
        sentences.append(f"{row.too_large} fail, but only under the limit: {row.failure}")
    setup, steps = row.setup_peak_memory_bytes or 0, row.peak_memory_bytes or 0
    if row.parameters and setup > steps and row.unit == BLOCKS.unit:
        whole = f"every rank first builds the whole model, {mebibytes(4 * row.parameters)}"
        sentences.append(
            f"at {row.largest_model}, setup takes {mebibytes(setup)}, more than the steps'"
            f" {mebibytes(steps)}: {whole}"
        )
    return "; ".join(sentences)


def order_notes(rows: Sequence[MaxsizeResult], order: Sequence[Sequence[str]]) -> list[str]:
    by_label = {row.label: row for row in rows if row.parameters}
    notes = []
    for chain in order:
        present = [by_label[label] for label in chain if label in by_label]
        for less, more in itertools.pairwise(present):
            if (more.parameters or 0) <= (less.parameters or 0):
                notes.append(
                    f"contrary to theory, {more.label} reaches {more.largest_model}, no more"
                    f" than {less.label} with {less.largest_model}. {more.label}: {limits(more)}."
                    f" {less.label}: {limits(less)}"
                )
    return notes


def maxsize_results(results: Results) -> list[MaxsizeResult]:
    rows: list[MaxsizeResult] = []
    for run in results.runs[results.runs["matrix"] == MATRIX].to_dict("records"):
        plan = Plan.from_row(run)
        if plan.search is None:
            continue
        search = FinishedSearch.of(results, plan)
        rows += [search.result(cell) for cell in plan.cells]
        rows += [
            MaxsizeResult(
                left.cell.label, left.status, left.reason, left.cell.workload, search.budget
            )
            for left in plan.left_out
        ]
    return rows


@dataclass(frozen=True)
class FinishedSearch:
    budget: int
    predicted: Mapping[str, SearchPlan]
    """Predictions by cell id: search step, size, and activations of the first step and of each
    further step."""
    trials: Mapping[str, Sequence[TrialRecord]]
    unlimited: Sequence[TrialRecord]
    """Trials repeated without a memory limit, after failures not due to memory."""
    growth: Growth = BLOCKS

    @classmethod
    def of(cls, results: Results, plan: Plan) -> FinishedSearch:
        assert plan.search is not None
        run = results.trials[results.trials["run_id"] == plan.run_id]
        trials = sorted(TrialRecord.from_frame(run), key=lambda trial: trial.attempt)
        growth = Growth.of(plan.search)
        last = {(trial.cell_id, trial.trial): trial for trial in trials}
        by_cell: dict[str, list[TrialRecord]] = {}
        for trial in last.values():
            cell = cell_at_size(Cell(**json.loads(trial.cell)), 1, growth)
            by_cell.setdefault(cell.id, []).append(trial)
        unlimited = [trial for trial in trials if trial.memory_limit_bytes is None]
        return cls(plan.search["budget"], plan.search["predicted"], by_cell, unlimited, growth)

    def size(self, trial: TrialRecord) -> int:
        if not self.growth.step:
            return trial.parameters or 0
        return self.growth.step * self.steps(trial)

    def steps(self, trial: TrialRecord) -> int:
        return steps_of(Cell(**json.loads(trial.cell)), self.growth)

    def result(self, cell: Cell) -> MaxsizeResult:
        trials = self.trials.get(cell.id, ())
        trains = {
            self.size(trial)
            for trial in self.unlimited
            if trial.label == cell.label and trial.status == "ok"
        }
        odd = [trial for trial in trials if trial.status in NOT_A_SIZE_LIMIT]
        stopped = next((trial for trial in odd if self.size(trial) not in trains), None)
        short = [trial for trial in odd if self.size(trial) in trains]
        short += [trial for trial in trials if trial.status == "out_of_memory"]
        smallest = min(short, key=self.size, default=None)
        fits = [trial for trial in trials if trial.status == "ok" and trial.trial == 0]
        verified = [trial for trial in trials if trial.status == "ok" and trial.trial == 1]
        if stopped is not None:
            status, reason = "stopped", f"{stopped.cell_name}: {stopped.status}: {stopped.reason}"
        elif verified:
            status, reason = ("found" if smallest else "all fit"), ""
        elif smallest and self.steps(smallest) == 1:
            status, reason = "none fits", smallest.reason
        else:
            status, reason = "unfinished", "the search is not finished"
        best = max(verified or fits, key=self.size, default=None)
        return self._result(cell, status, reason, best, smallest)

    def _result(
        self,
        cell: Cell,
        status: str,
        reason: str,
        best: TrialRecord | None,
        smallest: TrialRecord | None,
    ) -> MaxsizeResult:
        predicted, trials = self.predicted[cell.id], self.trials.get(cell.id, ())
        buffers, kept_bytes = {}, {}
        if best:
            buffers = json.loads(best.library_buffers or "{}")
            kept_bytes = {
                kind: max(getattr(best, f"{column}_bytes"), default=0)
                for kind, column in COLUMNS.items()
            }
        return MaxsizeResult(
            label=cell.label,
            status=status,
            reason=reason,
            workload=best.workload if best else cell.workload,
            budget=self.budget,
            step=predicted["step"],
            unit=self.growth.unit,
            parameters=self.size(best) if best else None,
            next_parameters=self.size(smallest) if smallest else None,
            predicted=predicted["parameters"],
            peak_memory_bytes=best.peak_memory_bytes if best else None,
            setup_peak_memory_bytes=best.setup_peak_memory_bytes if best else None,
            parity=best.parity_verdict if best else None,
            kept_bytes=kept_bytes,
            buffers=buffers,
            failed_in=smallest.failed_in if smallest else None,
            failure=smallest.reason if smallest and smallest.status != "out_of_memory" else "",
            holding=_holding(smallest.failed_holding) if smallest else None,
            formula=self._formula(smallest, predicted["activations"]) if smallest else {},
            probes=len(trials),
            seconds=sum(trial.wall_seconds or 0.0 for trial in trials),
        )

    def _formula(self, trial: TrialRecord, activations: Sequence[int]) -> dict[str, float]:
        columns = {**COLUMNS, "transient": "transient"}
        sizes = {kind: getattr(trial, f"formula_{name}_bytes") for kind, name in columns.items()}
        if None in sizes.values():
            return {}
        first, further = activations
        return sizes | {"activations": float(first + (self.steps(trial) - 1) * further)}


def _holding(text: str | None) -> Holding | None:
    held = json.loads(text or "{}")
    if not held:
        return None
    return Holding(
        in_use=held["in_use"],
        kinds={kind: float(held.get(kind, 0)) for kind in KINDS},
        other=float(held.get("other", 0)),
        stacks=float(held.get("stacks", 0)),
        buffers={name: float(size) for name, size in (held.get("buffers") or {}).items()},
        largest=tuple(held.get("largest") or ()),
    )
