"""Table of a search for the largest model or longest sequence."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.analysis.maxsize import Holding, MaxsizeResult
from harness.record.plan import Plan
from harness.record.search import COLUMNS, KINDS, MATRIX, NOT_A_SIZE_LIMIT, base_cell, steps_of
from harness.record.store import Results
from harness.record.trial import TrialRecord
from harness.spec.cell import Cell


def maxsize_results(results: Results) -> list[MaxsizeResult]:
    """Returns results in the order of each search's cells."""
    rows: list[MaxsizeResult] = []
    for run in results.runs[results.runs["matrix"] == MATRIX].to_dict("records"):
        plan = Plan.from_row(run)
        if plan.search is None:
            continue
        search = Search.of(results, plan)
        rows += [search.result(cell) for cell in plan.cells]
        rows += [
            MaxsizeResult(
                left.cell.label, left.status, left.reason, left.cell.workload, search.budget
            )
            for left in plan.left_out
        ]
    return rows


@dataclass(frozen=True)
class Search:
    """A search: its predictions and its trials."""

    budget: int
    predicted: Mapping[str, Mapping[str, Any]]
    """Predictions by cell id: step and size, activations of the first and each further step."""
    trials: Mapping[str, Sequence[TrialRecord]]
    """Last attempts by cell id, in order."""
    unlimited: Sequence[TrialRecord]
    """Trials without a memory limit, after probes failed for another reason than memory."""
    tokens: int = 0
    """Tokens added per step; 0 if a step adds a block to the model."""

    @classmethod
    def of(cls, results: Results, plan: Plan) -> Search:
        assert plan.search is not None
        run = results.trials[results.trials["run_id"] == plan.run_id]
        trials = sorted(TrialRecord.from_frame(run), key=lambda trial: trial.attempt)
        tokens = plan.search.get("tokens", 0)
        last = {(trial.cell_id, trial.trial): trial for trial in trials}
        by_cell: dict[str, list[TrialRecord]] = {}
        for trial in last.values():
            cell = base_cell(Cell(**json.loads(trial.cell)), tokens)
            by_cell.setdefault(cell.id, []).append(trial)
        unlimited = [trial for trial in trials if trial.memory_limit_bytes is None]
        return cls(plan.search["budget"], plan.search["predicted"], by_cell, unlimited, tokens)

    def size(self, trial: TrialRecord) -> int:
        """Returns parameters, or tokens of a sequence."""
        return trial.sequence_length if self.tokens else trial.parameters or 0

    def result(self, cell: Cell) -> MaxsizeResult:
        """Returns the result of one strategy. `cell`: after one step."""
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
        elif smallest is not None and self._first(smallest):
            status, reason = "none fits", smallest.reason
        else:
            status, reason = "unfinished", "the search has not been finished"
        best = max(verified or fits, key=self.size, default=None)
        return self._result(cell, status, reason, best, smallest)

    def _first(self, trial: TrialRecord) -> bool:
        return steps_of(Cell(**json.loads(trial.cell)), self.tokens) == 1

    def _result(
        self,
        cell: Cell,
        status: str,
        reason: str,
        best: TrialRecord | None,
        smallest: TrialRecord | None,
    ) -> MaxsizeResult:
        """Builds a row from the largest trial that fits and the smallest that does not."""
        predicted, trials = self.predicted[cell.id], self.trials.get(cell.id, ())
        buffers = json.loads(best.library_buffers or "{}") if best else {}
        return MaxsizeResult(
            label=cell.label,
            status=status,
            reason=reason,
            workload=best.workload if best else cell.workload,
            budget=self.budget,
            step=predicted["step"],
            tokens=bool(self.tokens),
            parameters=self.size(best) if best else None,
            next_parameters=self.size(smallest) if smallest else None,
            predicted=predicted["parameters"],
            peak_memory_bytes=best.peak_memory_bytes if best else None,
            setup_peak_memory_bytes=best.setup_peak_memory_bytes if best else None,
            parity=best.parity_verdict if best else None,
            kept=_kept(best) if best else {},
            buffers=buffers,
            failed_in=smallest.failed_in if smallest else None,
            failure=smallest.reason if smallest and smallest.status != "out_of_memory" else "",
            holding=_holding(smallest.failed_holding) if smallest else None,
            formula=self._formula(smallest, predicted["activations"]) if smallest else {},
            probes=len(trials),
            seconds=sum(trial.wall_seconds or 0.0 for trial in trials),
        )

    def _formula(self, trial: TrialRecord, activations: Sequence[int]) -> dict[str, float]:
        """Returns formula bytes by kind; empty without a formula."""
        columns = {**COLUMNS, "transient": "transient"}
        sizes = {kind: getattr(trial, f"formula_{name}_bytes") for kind, name in columns.items()}
        if None in sizes.values():
            return {}
        steps = steps_of(Cell(**json.loads(trial.cell)), self.tokens)
        first, further = activations
        return sizes | {"activations": float(first + (steps - 1) * further)}


def _kept(trial: TrialRecord) -> dict[str, int]:
    """Returns bytes of the fullest rank between steps, by kind."""
    return {
        kind: max(getattr(trial, f"{column}_bytes"), default=0) for kind, column in COLUMNS.items()
    }


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
