from __future__ import annotations

import functools
import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from harness.analysis.answer import with_verdicts
from harness.analysis.cell_result import (
    CAUSES,
    VERIFIED,
    WORST_VERDICT_FIRST,
    CellResult,
    Checkpoint,
    Disturbance,
    KeptStates,
    Memory,
    Parity,
    Placement,
    Speed,
    Summary,
    Times,
    Traffic,
    Work,
    causes_of,
    disturbance_in_words,
    ended,
    gpus_of,
    reason_of,
    worst_of,
)
from harness.analysis.estimates import Adjustment, RunEstimates, estimates_of
from harness.analysis.ranking import (
    Choice,
    fastest_first,
    with_baselines,
    with_efficiencies,
)
from harness.analysis.setting import grouped, with_same_training
from harness.analysis.stats import Estimate
from harness.cell.cell import Cell
from harness.cell.errors import DamagedRun
from harness.record.profile_record import GPU_PARTS, ProfileRecord
from harness.record.trial import TrialRecord

if TYPE_CHECKING:
    import pandas as pd

    from harness.record.trial import TrialRecord

STATE_KINDS = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "library_bytes")
Group = TypeVar("Group", Placement, Work, Times, Memory, Traffic, Checkpoint, Parity)


def cells(trials: pd.DataFrame, baseline: Choice | None = None) -> pd.DataFrame:
    """Returns cell results as a frame for notebooks."""
    import pandas as pd

    return pd.DataFrame([result.columns() for result in cell_results(trials, baseline)])


def cell_results(trials: pd.DataFrame, baseline: Choice | None = None) -> list[CellResult]:
    return summarised(TrialRecord.from_frame(trials), baseline)


def summarised(trials: Iterable[TrialRecord], baseline: Choice | None = None) -> list[CellResult]:
    """Returns one result per run and cell, in the order of `fastest_first`."""
    results = with_same_training(with_efficiencies(in_recorded_order(trials)))
    return fastest_first(with_verdicts(with_baselines(results, baseline)))


def in_recorded_order(trials: Iterable[TrialRecord]) -> list[CellResult]:
    """Returns one result per run and cell, in recorded order, without baselines."""
    attempts = grouped(trials, lambda trial: (trial.run_id, trial.cell_id))
    by_cell = {key: last_attempts(of_cell) for key, of_cell in attempts.items()}
    finished: dict[str, list[TrialRecord]] = {}
    for (run_id, _), last in by_cell.items():
        finished.setdefault(run_id, []).extend(finished_of(last))
    estimates = {run_id: estimates_of(of_run) for run_id, of_run in finished.items()}
    return [result_of(last, estimates[run_id]) for (run_id, _), last in by_cell.items()]


def adjustment_of(trials: Iterable[TrialRecord]) -> Adjustment:
    attempts = grouped(trials, lambda trial: trial.cell_id)
    last = [trial for of_cell in attempts.values() for trial in last_attempts(of_cell)]
    return estimates_of(finished_of(last)).adjustment


def last_attempts(attempts: Sequence[TrialRecord]) -> Sequence[TrialRecord]:
    """Returns the last attempt of each trial. Omits interrupted attempts unless all were
    interrupted."""
    last = {trial.trial: trial for trial in sorted(attempts, key=lambda trial: trial.attempt)}
    return ended([last[number] for number in sorted(last)])


def finished_of(trials: Sequence[TrialRecord]) -> list[TrialRecord]:
    return [trial for trial in trials if trial.samples_per_second is not None]


@functools.lru_cache(maxsize=4096)
def _cell(text: str) -> Cell:
    try:
        return Cell.model_validate_json(text)
    except ValueError as error:
        raise DamagedRun(f"a trial's cell cannot be read: {error}") from None


def result_of(trials: Sequence[TrialRecord], estimates: RunEstimates) -> CellResult:
    finished = finished_of(trials)
    well = [trial for trial in trials if trial.status == "ok"]
    status = worst_of(trials).status
    verified = bool(well) and all(trial.parity_verdict in VERIFIED for trial in well)
    judged = [trial for trial in trials if trial.parity_verdict is not None]
    fill = _Fill(trials, finished, min(judged, key=_worst_first, default=None))
    cell = _cell(trials[0].cell)
    return CellResult(
        run_id=trials[0].run_id,
        cell=cell,
        cell_id=trials[0].cell_id,
        status=status,
        reason=reason_of(trials),
        expected=worst_of(trials).expected,
        verified=verified,
        ranked=status == "ok" and verified and bool(finished),
        recorded_trials=len(trials),
        trials=len(finished),
        placement=_placement(fill, cell),
        work=_work(fill),
        speed=_speed(finished, estimates),
        times=fill(Times),
        memory=_memory(fill, well),
        traffic=_traffic(fill),
        checkpoint=fill(Checkpoint),
        states=_states(finished),
        parity=_parity(fill, judged),
        disturbance=_disturbance(finished),
    )


@dataclass(frozen=True)
class _Fill:
    """Fills the fields of a group as their metadata declares."""

    trials: Sequence[TrialRecord]
    finished: Sequence[TrialRecord]
    most_deviating: TrialRecord | None

    def __call__(self, group: type[Group], **others: Any) -> Group:
        values = {
            field.name: self._value(summary, field.metadata.get("column", field.name))
            for field in fields(group)
            if (summary := field.metadata.get("summary"))
        }
        recorded = {name: value for name, value in values.items() if value is not None}
        return group(**recorded, **others)

    def _value(self, summary: Summary, column: str) -> Any:
        match summary:
            case "shared":
                trials = (self.trials[0], *self.finished)
                return next((v for t in trials if (v := getattr(t, column)) is not None), None)
            case "median":
                values = _values(self.finished, column)
                return statistics.median(values) if values else None
            case "largest":
                return max(_values(self.finished, column), default=None)
            case "worst":
                return self.most_deviating and getattr(self.most_deviating, column)
            case "all":
                values = _values(self.trials, column)
                return all(values) if values else None


def _values(trials: Sequence[TrialRecord], name: str) -> list[float]:
    return [value for trial in trials if (value := getattr(trial, name)) is not None]


def _by_round(trials: Sequence[TrialRecord], name: str) -> dict[int, float]:
    return {t.trial: value for t in trials if (value := getattr(t, name)) is not None}


def _placement(fill: _Fill, cell: Cell) -> Placement:
    placement = fill(Placement)
    unnamed = tuple(f"{name}={json.dumps(value)}" for name, value in cell.set_unnamed.items())
    return replace(placement, differences=placement.differences or unnamed)


def _work(fill: _Fill) -> Work:
    if not fill.finished:
        return fill(Work)
    first = fill.finished[0]
    return fill(
        Work,
        peak_flops_per_second=device_rate(first, first.mfu),
        matmul_flops_per_second=device_rate(first, first.matmul_utilization),
    )


def _speed(finished: Sequence[TrialRecord], estimates: RunEstimates) -> Speed:
    if not finished:
        return Speed()
    log_throughput = estimates.cells[finished[0].cell_id]
    samples = log_throughput.estimate()
    raw_samples = statistics.median(_values(finished, "samples_per_second"))
    of_tokens = _values(finished, "tokens_per_second")
    raw_tokens = statistics.median(of_tokens) if of_tokens else None
    trends = _values(finished, "trend")
    tokens = None if raw_tokens is None else _scaled(samples, raw_tokens / raw_samples)
    return Speed(
        samples_per_second=samples.value,
        samples_per_second_low=samples.low,
        samples_per_second_high=samples.high,
        tokens_per_second=tokens.value if tokens else None,
        tokens_per_second_low=tokens.low if tokens else None,
        tokens_per_second_high=tokens.high if tokens else None,
        log_throughput=log_throughput,
        raw_samples_per_second=raw_samples,
        raw_tokens_per_second=raw_tokens,
        by_round={t.trial: estimates.by_trial[t.cell_id, t.trial] for t in finished},
        trend=statistics.median(map(abs, trends)) if trends else None,
    )


def _scaled(rate: Estimate, factor: float) -> Estimate:
    low, high = (None if end is None else end * factor for end in (rate.low, rate.high))
    return Estimate(rate.value * factor, low, high, rate.trials)


def _memory(fill: _Fill, well: Sequence[TrialRecord]) -> Memory:
    peaks = [ranks for trial in fill.finished if (ranks := trial.peak_memory_bytes_by_rank)]
    return fill(
        Memory,
        peak_memory_bytes_low=min(_values(fill.finished, "peak_memory_bytes"), default=None),
        peak_memory_bytes_by_rank=tuple(max(peaks, key=max, default=())),
        peak_by_round=_by_round(well, "peak_memory_bytes"),
    )


def _traffic(fill: _Fill) -> Traffic:
    counted = [[x for x in t.sent_bytes_per_step if math.isfinite(x)] for t in fill.finished]
    sent = [max(ranks) for ranks in counted if ranks]
    return fill(
        Traffic,
        sent_bytes_per_step=statistics.median(sent) if sent else None,
        expert_tokens=next((t.expert_tokens for t in fill.finished if t.expert_tokens), None),
    )


def _disturbance(trials: Sequence[TrialRecord]) -> Disturbance:
    by_trial = [(trial, causes) for trial in trials if (causes := causes_of(trial))]
    counts = Counter(cause for _, causes in by_trial for cause in causes)
    descriptions = tuple(disturbance_in_words(trial, causes) for trial, causes in by_trial)
    records = [gpus_of(trial) for trial in trials]
    findings = [finding.sentence for record in records for finding in record.findings()]
    unanswered = [reason for record in records for reason in record.unanswered]
    return Disturbance(
        trials=len(descriptions),
        by_cause={cause: counts[cause] for cause in CAUSES if counts[cause]},
        descriptions=descriptions,
        gpu_findings=tuple(dict.fromkeys([*findings, *unanswered])),
    )


def _states(trials: Sequence[TrialRecord]) -> KeptStates:
    complete = [
        (sum(sizes), sizes, trial)
        for trial in trials
        for sizes in zip(*(getattr(trial, name) for name in STATE_KINDS), strict=True)
    ]
    if not complete:
        return KeptStates()
    total, sizes, trial = max(complete, key=lambda rank: rank[0])
    states = KeptStates(
        **dict(zip(STATE_KINDS, sizes, strict=True)),
        state_bytes=total,
        library_buffers=trial.library_buffers,
        host_state_bytes=max(trial.host_state_bytes, default=None),
    )
    by_kind = [getattr(trial, f"formula_{name}") for name in STATE_KINDS]
    if None in by_kind:  # the strategy has no formula
        return states
    formula = sum(by_kind)
    return replace(
        states,
        formula_bytes=formula,
        formula_transient_bytes=trial.formula_transient_bytes,
        formula_deviation=total / formula - 1 if formula else None,
    )


def _worst_first(trial: TrialRecord) -> tuple[int, float]:
    deviation = trial.parity_max_loss_deviation
    order = WORST_VERDICT_FIRST.index(trial.parity_verdict or "unknown")
    return order, -math.inf if deviation is None else -deviation


def _parity(fill: _Fill, judged: Sequence[TrialRecord]) -> Parity:
    counts = [trial.rewinds for trial in judged if trial.rewinds is not None]
    reasons = (t.rewind_skipped_reason for t in judged if t.rewind_skipped_reason)
    return fill(
        Parity,
        rewinds=sum(counts) if counts else None,
        rewind_skipped_reason=next(reasons, None),
        rewind_loss_deviation=max(_values(judged, "rewind_loss_deviation"), default=None),
        rewind_update_deviation=max(_values(judged, "rewind_update_deviation"), default=None),
    )


FORMULA = (
    "matrix-multiply, convolution and attention FLOPs of one forward and backward of the unsplit"
    " model, 2 per multiply-add, attention over the full square, counted by"
    " torch.utils.flop_counter; recomputation is not counted (hardware FLOPs include it); MFU ="
    " FLOPs x steps/s / (devices x peak of the device in the precision)"
)


def mfu(
    flops_per_step: float | None, step_seconds: float, devices: int, peak: float | None
) -> float | None:
    """Returns model FLOPs utilisation, a fraction (PaLM, arXiv 2204.02311, appendix B); None if the
    peak is unknown."""
    if flops_per_step is None or peak is None or step_seconds <= 0:
        return None
    return flops_per_step / step_seconds / (devices * peak)


def device_rate(trial: TrialRecord, utilization: float | None) -> float | None:
    """Returns the FLOP/s of a device at utilisation 1."""
    if not (utilization and trial.flops_per_step and trial.samples_per_second):
        return None
    steps_per_second = trial.samples_per_second / trial.global_batch
    return trial.flops_per_step * steps_per_second / trial.devices / utilization


AT_RATE, BELOW_RATE = "matmul_at_measured_rate", "matmul_below_measured_rate"
PARTS = {
    AT_RATE: "arithmetic at the measured rate",
    BELOW_RATE: "slower matrix products",
    "matmul": "matrix products",
    "attention": "attention",
    "kernels": "other kernels",
    "optimizer": "optimizer",
    "communication": "exposed communication",
    "copy": "copies between host and device",
    "idle": "idle, waiting for the host",
}
"""Display names. `matmul` replaces the first two if the measured rate is unknown."""
_LEAST_SHARE = 0.005


@dataclass(frozen=True)
class GpuTime:
    step_seconds: float
    seconds: Mapping[str, float]
    """Seconds by part; they sum to the step."""

    @property
    def shares(self) -> dict[str, float]:
        return {name: seconds / self.step_seconds for name, seconds in self.seconds.items()}

    @property
    def sentence(self) -> str:
        shares = self.shares
        first = AT_RATE if AT_RATE in shares else "matmul"
        gap = sorted((name for name in shares if name != first), key=lambda name: -shares[name])
        told = [f"{shares[n] * 100:.0f}% {PARTS[n]}" for n in gap if shares[n] >= _LEAST_SHARE]
        start = f"{shares[first] * 100:.0f}% of the step is {PARTS[first]}"
        return f"{start}; the rest: {', '.join(told)}" if told else start


def gpu_time(
    profile: ProfileRecord, flops_per_device: float | None, matmul_rate: float | None
) -> GpuTime | None:
    """Breaks down a profiled step; None if no GPU was profiled. `flops_per_device`: model FLOPs per
    step, with attention. `matmul_rate`: measured FLOP/s. Idle time excludes the profiler's
    overhead."""
    by_part = {part: getattr(profile, f"gpu_{part}_seconds") for part in GPU_PARTS}
    if not all(by_part.values()):
        return None
    seconds = {part: statistics.fmean(ranks) for part, ranks in by_part.items()}
    if profile.plain_step_seconds and profile.profiled_step_seconds:
        added = max(0.0, profile.profiled_step_seconds - profile.plain_step_seconds)
        seconds["idle"] -= min(added, seconds["idle"])
    if flops_per_device and matmul_rate:
        matmul = seconds.pop("matmul")
        ideal = min(flops_per_device / matmul_rate, matmul)
        seconds = {AT_RATE: ideal, BELOW_RATE: matmul - ideal, **seconds}
    return GpuTime(sum(seconds.values()), seconds)
