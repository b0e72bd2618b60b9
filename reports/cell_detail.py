"""One cell of a run in full: its trials and steps, its place, its memory against the formula, where
its time goes, its parity."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from harness.analysis.summary import compared
from harness.record.profile import COMPONENTS
from reports import facts
from reports.export_records import known
from reports.export_records import records as cell_records
from reports.groups import Group, Row
from reports.profile import known as explained
from reports.run_report import RunReport, ran
from reports.table import flags

if TYPE_CHECKING:
    import pandas as pd

    from harness.record.store import Results

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
KINDS = ("parameter", "gradient", "optimizer", "library")


def in_full(results: Results, steps: pd.DataFrame, cell_id: str) -> dict[str, Any]:
    """Everything recorded of a cell, fit for JSON.

    `results`: of its run; `steps`: table `steps` of the cell. Unknown is None.
    """
    one = ran(results)
    (row,) = [row for row in one.cells if row["cell_id"] == cell_id]
    (record,) = [record for record in cell_records(one) if record["cell_id"] == cell_id]
    own = results.trials[results.trials["cell_id"] == cell_id].sort_values(["trial", "attempt"])
    found = {
        "started_at": known(one.run["started_at"]),
        "hardware": facts.hardware(one.run),
        "cell": record,
        "cautions": [{"word": flag.word, "meaning": flag.meaning} for flag in flags(row)],
        "trials": [_trial(trial, steps) for trial in own.to_dict("records")],
        "ranking": _ranking(one, cell_id),
        "memory": _memory(record, own),
        "ranks": _ranks(record, steps, own),
        "time": _time(one, row),
    }
    log = next((str(text) for text in reversed(own["log_tail"].tolist()) if text), "")
    return found | {"log_tail": log}


def _trial(trial: Mapping[Any, Any], steps: pd.DataFrame) -> dict[str, Any]:
    mine = steps[(steps["trial"] == trial["trial"]) & (steps["attempt"] == trial["attempt"])]
    slowest = mine.groupby("step")["step_seconds"].max()
    phases = mine.groupby("step")["phase"].first()
    told = {name: known(trial[name]) for name in TRIAL}
    return told | {
        "slowest_rank_step_seconds": known(slowest.tolist()),
        "phases": [str(phase) for phase in phases.tolist()],
    }


def _ranking(one: RunReport, cell_id: str) -> dict[str, Any] | None:
    """Place within cells that differ in nothing but the strategy, and the ratio to the fastest of
    them; None where it is not ranked."""
    for group in one.groups:
        for row in group.rows:
            if row["cell_id"] == cell_id:
                return _place(group, row)
    return None


def _place(group: Group, row: Row) -> dict[str, Any]:
    fastest = group.rows[0]
    ratio = None if row is fastest else compared(row, fastest)
    return {
        "place": row["place"],
        "of": len(group.rows),
        "same_as_above": row["same_as_above"],
        "setting": f"{group.workload} · {group.title}",
        "fastest": fastest["label"],
        "ratio_to_fastest": ratio and ratio.ratio,
        "ratio_low": ratio and known(ratio.low),
        "ratio_high": ratio and known(ratio.high),
        "verdict": ratio and ratio.verdict,
    }


def _memory(record: dict[str, Any], own: pd.DataFrame) -> dict[str, Any] | None:
    """What the fullest rank keeps between steps by kind, each with the formula's; None where it was
    not measured."""
    if record["state_bytes"] is None:
        return None
    good = own[own["status"] == "ok"]
    formula = {
        kind: known(good[f"formula_{kind}_bytes"].iloc[-1]) if len(good) else None for kind in KINDS
    }
    kinds = [
        {"kind": kind, "bytes": record[f"{kind}_bytes"], "formula_bytes": formula[kind]}
        for kind in KINDS
    ]
    return {"kinds": kinds, **{name: record[name] for name in KEPT}}


def _ranks(record: dict[str, Any], steps: pd.DataFrame, own: pd.DataFrame) -> list[dict[str, Any]]:
    """Per rank: its peak in the trial with the largest, and the median of its timed steps over all
    finished trials."""
    good = own[own["status"] == "ok"][["trial", "attempt"]]
    timed = steps[steps["phase"] == "timed"].merge(good, on=["trial", "attempt"])
    medians = timed.groupby("rank")["step_seconds"].median()
    peaks = record["peak_memory_bytes_by_rank"] or []
    count = max(len(peaks), int(medians.index.max()) + 1 if len(medians) else 0)
    return [
        {
            "rank": rank,
            "step_seconds_p50": known(medians.get(rank)),
            "peak_memory_bytes": peaks[rank] if rank < len(peaks) else None,
        }
        for rank in range(count)
    ]


def _time(one: RunReport, row: Row) -> dict[str, Any] | None:
    """Parts of a profiled step, mean of the ranks; None where the cell was not explained."""
    told = explained([row], one.results.explained)
    if not told:
        return None
    parts = {
        f"{name}_seconds": known(told[0][f"{name}_ms"] / 1e3)
        for name in COMPONENTS
        if told[0][f"{name}_ms"] is not None
    }
    return {
        **parts,
        "profiled_step_seconds": known(told[0]["profiled_ms"] / 1e3),
        "plain_step_seconds": known(told[0]["plain_ms"] / 1e3),
        "straggler_rank": told[0]["straggler"],
    }
