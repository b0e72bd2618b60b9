"""One cell of a run in full: its trials and steps, its place, its memory against the formula, where
its time goes, its parity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from harness.analysis.cell_result import CellResult
from harness.analysis.ranking import compared
from harness.record.profile import COMPONENTS
from harness.record.trial import TrialRecord
from reports import facts
from reports.cautions import flags
from reports.export_records import for_json
from reports.export_records import records as cell_records
from reports.groups import RankedGroup
from reports.ranked import RankedCell
from reports.run_report import RunReport, ran
from reports.stacks import KINDS

if TYPE_CHECKING:
    import pandas as pd

    from harness.record.store import Results

Record = dict[str, Any]
"""Fit for JSON; unknown is None."""
TRIAL = (
    "trial",
    "attempt",
    "status",
    "reason",
    "samples_per_second",
    "step_seconds_p50",
    "step_seconds_p95",
    "peak_memory_bytes",
    "wall_seconds",
)
KEPT = (
    "state_bytes",
    "formula_bytes",
    "formula_deviation",
    "formula_transient_bytes",
    "peak_memory_bytes",
    "peak_memory_bytes_low",
    "memory_method",
)


def in_full(results: Results, steps: pd.DataFrame, cell_id: str) -> Record:
    """Everything recorded of a cell, fit for JSON.

    `results`: of its run; `steps`: table `steps` of the cell. Unknown is None.
    """
    report = ran(results)
    (cell,) = [cell for cell in report.cells if cell.cell_id == cell_id]
    (record,) = [record for record in cell_records(report) if record["cell_id"] == cell_id]
    every = TrialRecord.from_frame(results.trials[results.trials["cell_id"] == cell_id])
    trials = sorted(every, key=lambda trial: (trial.trial, trial.attempt))
    return {
        "started_at": report.run.started_at.isoformat(),
        "hardware": facts.hardware(report.run),
        "cell": record,
        "cautions": [{"word": flag.word, "meaning": flag.meaning} for flag in flags(cell)],
        "trials": [_trial(trial, steps) for trial in trials],
        "ranking": _ranking(report, cell_id),
        "memory": _memory(cell, trials),
        "ranks": _ranks(cell, steps, trials),
        "time": _time(report, cell_id),
        "log_tail": next((trial.log_tail for trial in reversed(trials) if trial.log_tail), ""),
    }


def _trial(trial: TrialRecord, steps: pd.DataFrame) -> Record:
    own = steps[(steps["trial"] == trial.trial) & (steps["attempt"] == trial.attempt)]
    by_step = own.groupby("step")
    return {name: for_json(getattr(trial, name)) for name in TRIAL} | {
        "slowest_rank_step_seconds": for_json(by_step["step_seconds"].max().tolist()),
        "phases": [str(phase) for phase in by_step["phase"].first().tolist()],
    }


def _ranking(report: RunReport, cell_id: str) -> Record | None:
    """Place within cells that differ in nothing but the strategy, and the ratio to the fastest of
    them; None where it is not ranked."""
    for group in report.groups:
        for cell in group.rows:
            if cell.cell_id == cell_id:
                return _place(group, cell)
    return None


def _place(group: RankedGroup, cell: RankedCell) -> Record:
    fastest = group.rows[0]
    ratio = None if cell is fastest else compared(cell, fastest)
    return {
        "place": cell.place,
        "of": len(group.rows),
        "same_as_above": cell.same_as_above,
        "setting": group.full_title,
        "fastest": fastest.label,
        "ratio_to_fastest": ratio and ratio.ratio,
        "ratio_low": ratio and for_json(ratio.low),
        "ratio_high": ratio and for_json(ratio.high),
        "verdict": ratio and ratio.verdict,
    }


def _memory(cell: CellResult, trials: Sequence[TrialRecord]) -> Record | None:
    """What the fullest rank keeps between steps by kind, each with the formula's; None where it was
    not measured."""
    if cell.state_bytes is None:
        return None
    good = [trial for trial in trials if trial.status == "ok"]
    kinds = [
        {
            "kind": field.removesuffix("_bytes"),
            "bytes": getattr(cell, field),
            "formula_bytes": for_json(getattr(good[-1], f"formula_{field}")) if good else None,
        }
        for field in KINDS.values()
    ]
    return {"kinds": kinds, **{name: for_json(getattr(cell, name)) for name in KEPT}}


def _ranks(cell: CellResult, steps: pd.DataFrame, trials: Sequence[TrialRecord]) -> list[Record]:
    """Per rank: its peak in the trial with the largest, and the median of its timed steps over all
    finished trials."""
    good = {(trial.trial, trial.attempt) for trial in trials if trial.status == "ok"}
    timed = steps[steps["phase"] == "timed"]
    of_good = [key in good for key in zip(timed["trial"], timed["attempt"], strict=True)]
    by_rank = timed.loc[of_good].groupby("rank")["step_seconds"].median()
    medians = dict(zip(by_rank.index.tolist(), by_rank.tolist(), strict=True))
    peaks = cell.peak_memory_bytes_by_rank
    count = max(len(peaks), max(medians, default=-1) + 1)
    return [
        {
            "rank": rank,
            "step_seconds_p50": for_json(medians.get(rank)),
            "peak_memory_bytes": peaks[rank] if rank < len(peaks) else None,
        }
        for rank in range(count)
    ]


def _time(report: RunReport, cell_id: str) -> Record | None:
    """Parts of a profiled step, mean of the ranks, in seconds; None where the cell was not
    profiled."""
    for cell in report.profiled:
        if cell.cell_id == cell_id:
            return {
                **{
                    f"{name}_seconds": s
                    for name in COMPONENTS
                    if (s := cell.parts[name]) is not None
                },
                "profiled_step_seconds": cell.profiled_step,
                "plain_step_seconds": cell.plain_step,
                "straggler_rank": cell.straggler,
            }
    return None
