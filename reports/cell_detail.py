from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from harness.analysis.cell_result import CellResult
from harness.analysis.ranking import compare
from harness.analysis.stats import Comparison
from harness.record.profile_record import COMPONENTS
from harness.record.trial import TrialRecord
from reports import run_facts
from reports.export_records import for_json, record_of
from reports.groups import RankedCell, RankedGroup
from reports.memory_sections import KINDS
from reports.names import Flag, flags
from reports.run_facts import StepProfile
from reports.run_report import ran

if TYPE_CHECKING:
    import pandas as pd

    from harness.record.store import Results

_TRIAL = (
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
_MEMORY = (
    "state_bytes",
    "formula_bytes",
    "formula_deviation",
    "formula_transient_bytes",
    "peak_memory_bytes",
    "peak_memory_bytes_low",
    "memory_method",
)


@dataclass(frozen=True)
class TrialDetail:
    trial: TrialRecord
    slowest_rank_step_seconds: tuple[float, ...]
    phases: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return {name: for_json(getattr(self.trial, name)) for name in _TRIAL} | {
            "slowest_rank_step_seconds": for_json(self.slowest_rank_step_seconds),
            "phases": list(self.phases),
        }


@dataclass(frozen=True)
class Place:
    """Place among cells that differ only in strategy."""

    place: int
    of: int
    same_as_above: bool
    setting: str
    fastest: str
    ratio: Comparison | None
    """Throughput over the fastest cell's; None for the fastest."""

    def as_json(self) -> dict[str, Any]:
        ratio = self.ratio
        return {
            "place": self.place,
            "of": self.of,
            "same_as_above": self.same_as_above,
            "setting": self.setting,
            "fastest": self.fastest,
            "ratio_to_fastest": ratio and ratio.ratio,
            "ratio_low": ratio and for_json(ratio.low),
            "ratio_high": ratio and for_json(ratio.high),
            "verdict": ratio and ratio.verdict,
        }


@dataclass(frozen=True)
class KindOfState:
    kind: str
    """parameter, gradient, optimizer or library."""
    bytes: float | None
    formula_bytes: float | None


@dataclass(frozen=True)
class RankDetail:
    rank: int
    step_seconds_p50: float | None
    peak_memory_bytes: int | None


@dataclass(frozen=True)
class CellDetail:
    started_at: datetime
    hardware: str
    cell: CellResult
    cautions: tuple[Flag, ...]
    trials: tuple[TrialDetail, ...]
    place: Place | None
    kinds: tuple[KindOfState, ...] | None
    ranks: tuple[RankDetail, ...]
    profiled: StepProfile | None
    log_tail: str

    def as_json(self) -> dict[str, Any]:
        memory = {name: for_json(self.cell.column(name)) for name in _MEMORY}
        return {
            "started_at": self.started_at.isoformat(),
            "hardware": self.hardware,
            "cell": record_of(self.cell),
            "cautions": [dataclasses.asdict(caution) for caution in self.cautions],
            "trials": [trial.as_json() for trial in self.trials],
            "ranking": self.place and self.place.as_json(),
            "memory": None
            if self.kinds is None
            else {"kinds": [dataclasses.asdict(kind) for kind in self.kinds], **memory},
            "ranks": [dataclasses.asdict(rank) for rank in self.ranks],
            "time": self.profiled and _time(self.profiled),
            "log_tail": self.log_tail,
        }


def in_full(results: Results, steps: pd.DataFrame, cell_id: str) -> CellDetail:
    """Returns a cell's records. `results`: its run, without steps; `steps`: its steps."""
    report = ran(results)
    (cell,) = [cell for cell in report.cells if cell.cell_id == cell_id]
    ranked = [
        (group, row) for group in report.groups for row in group.rows if row.cell_id == cell_id
    ]
    every = TrialRecord.from_frame(results.trials[results.trials["cell_id"] == cell_id])
    trials = sorted(every, key=lambda trial: (trial.trial, trial.attempt))
    return CellDetail(
        started_at=report.run.started_at,
        hardware=run_facts.hardware(report.run),
        cell=ranked[0][1] if ranked else cell,
        cautions=flags(cell),
        trials=tuple(_trial(trial, steps) for trial in trials),
        place=_place(*ranked[0]) if ranked else None,
        kinds=_kinds(cell, trials),
        ranks=_ranks(cell, steps, trials),
        profiled=next((cell for cell in report.profiled if cell.result.cell_id == cell_id), None),
        log_tail=next((trial.log_tail for trial in reversed(trials) if trial.log_tail), ""),
    )


def _trial(trial: TrialRecord, steps: pd.DataFrame) -> TrialDetail:
    own = steps[(steps["trial"] == trial.trial) & (steps["attempt"] == trial.attempt)]
    by_step = own.groupby("step")
    return TrialDetail(
        trial,
        tuple(by_step["step_seconds"].max().tolist()),
        tuple(str(phase) for phase in by_step["phase"].first().tolist()),
    )


def _place(group: RankedGroup, cell: RankedCell) -> Place:
    fastest = group.rows[0]
    return Place(
        cell.place,
        len(group.rows),
        cell.same_as_above,
        group.full_title,
        fastest.cell.label,
        None if cell is fastest else compare(cell, fastest),
    )


def _kinds(cell: CellResult, trials: Sequence[TrialRecord]) -> tuple[KindOfState, ...] | None:
    if cell.states.state_bytes is None:
        return None
    finished = [trial for trial in trials if trial.status == "ok"]
    return tuple(
        KindOfState(
            field.removesuffix("_bytes"),
            cell.column(field),
            getattr(finished[-1], f"formula_{field}") if finished else None,
        )
        for field in KINDS.values()
    )


def _ranks(
    cell: CellResult, steps: pd.DataFrame, trials: Sequence[TrialRecord]
) -> tuple[RankDetail, ...]:
    finished = {(trial.trial, trial.attempt) for trial in trials if trial.status == "ok"}
    timed = steps[steps["phase"] == "timed"]
    counts = [key in finished for key in zip(timed["trial"], timed["attempt"], strict=True)]
    by_rank = timed.loc[counts].groupby("rank")["step_seconds"].median()
    medians: dict[int, float] = dict(zip(by_rank.index.tolist(), by_rank.tolist(), strict=True))
    peaks = cell.memory.peak_memory_bytes_by_rank
    count = max(len(peaks), max(medians, default=-1) + 1)
    return tuple(
        RankDetail(rank, medians.get(rank), peaks[rank] if rank < len(peaks) else None)
        for rank in range(count)
    )


def _time(cell: StepProfile) -> dict[str, Any]:
    parts = {name: seconds for name in COMPONENTS if (seconds := cell.parts[name]) is not None}
    return {
        **{f"{name}_seconds": seconds for name, seconds in parts.items()},
        "profiled_step_seconds": cell.profiled_step,
        "plain_step_seconds": cell.plain_step,
        "straggler_rank": cell.straggler,
        "gpu_seconds": cell.gpu and dict(cell.gpu.seconds),
    }
