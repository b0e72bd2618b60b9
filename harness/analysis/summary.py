"""Summary of trials as one result per cell."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from harness.analysis.baseline import Choice, with_baselines
from harness.analysis.cell_result import VERIFIED, CellResult
from harness.analysis.control import Adjustment
from harness.analysis.disturbance import CAUSES
from harness.analysis.estimates import RunEstimates, estimates_of
from harness.analysis.flops import device_rate
from harness.analysis.same_training import with_same_training
from harness.analysis.scaling import with_efficiencies
from harness.analysis.stats import Estimate, LogEstimate, estimate
from harness.analysis.trials import (
    causes_of,
    disturbance_in_words,
    ended,
    gpus_of,
    reason_of,
    turns_of,
    worst_of,
)
from harness.record.trial import TrialRecord

if TYPE_CHECKING:
    import pandas as pd

Figures = dict[str, Any]
"""Fields of a CellResult, by name."""
_SHARED = [
    "run_id",
    "cell_id",
    "cell_name",
    "label",
    "cell",
    "system",
    "strategy",
    "options",
    "workload",
    "data",
    "sequence_length",
    "links",
    "device",
    "devices",
    "processes",
    "data_parallel",
    "pipeline_parallel",
    "tensor_parallel",
    "sequence_parallel",
    "precision",
    "regime",
    "global_batch",
    "micro_batches",
    "recompute",
    "compile",
    "optimizer",
    "launcher",
    "packages",
    "wraps_ddp",
    "threads_per_device",
    "stand_in",
    "oversubscribed",
    "parameters",
    "trained_parameters",
    "flops_per_step",
    "hardware_flops_per_step",
    "memory_method",
    "parity_steps",
]
"""Columns that all trials of a cell share."""
_MEDIANS = [
    "step_seconds_p50",
    "step_seconds_p95",
    "data_seconds_p50",
    "setup_seconds",
    "startup_seconds",
    "first_step_seconds",
    "compile_seconds",
    "mfu",
    "matmul_utilization",
    "bubble_fraction",
    "expert_imbalance",
    "memory_imbalance",
    "wall_seconds",
    "energy_joules_per_sample",
    "offload_read_bytes_per_step",
    "offload_written_bytes_per_step",
]
_LARGEST = ("peak_memory_bytes", "offload_kept_bytes", "fp32_loss_deviation")
_PARITY = [
    "parity_verdict",
    "parity_reason",
    "parity_max_loss_deviation",
    "parity_max_update_deviation",
    "parity_worst_tensor",
    "parity_loss_tolerance",
    "parity_update_tolerance",
]
_WORST_VERDICT_FIRST = ("diverged", "unknown", "within tolerance", "exact")
_KEPT = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "library_bytes")


def cells(trials: pd.DataFrame) -> pd.DataFrame:
    """Returns a frame for notebooks, with fields of CellResult as columns, ordered like
    `cell_results`."""
    import pandas as pd

    return pd.DataFrame([vars(result) for result in cell_results(trials)])


def cell_results(trials: pd.DataFrame, baseline: Choice | None = None) -> list[CellResult]:
    """Returns the results of table `trials`, see `summarised`."""
    return summarised(TrialRecord.from_frame(trials), baseline)


def summarised(trials: Iterable[TrialRecord], baseline: Choice | None = None) -> list[CellResult]:
    """Returns one result per run and cell: ranked first, then fastest first.

    `baseline`: selects each setting's baseline; default: `baseline_of`.
    """
    results = with_same_training(with_efficiencies(in_recorded_order(trials)))
    results = with_baselines(results, baseline)
    return sorted(results, key=lambda cell: (not cell.ranked, -(cell.samples_per_second or 0.0)))


def in_recorded_order(trials: Iterable[TrialRecord]) -> list[CellResult]:
    """Returns one result per run and cell, by first trial, without scaling efficiencies."""
    attempts: dict[tuple[str, str], list[TrialRecord]] = {}
    for trial in trials:
        attempts.setdefault((trial.run_id, trial.cell_id), []).append(trial)
    by_cell = {key: last_attempts(of_cell) for key, of_cell in attempts.items()}
    finished: dict[str, list[TrialRecord]] = {}
    for (run_id, _), last in by_cell.items():
        finished.setdefault(run_id, []).extend(finished_of(last))
    estimates = {run_id: estimates_of(of_run) for run_id, of_run in finished.items()}
    return [result_of(last, estimates[run_id]) for (run_id, _), last in by_cell.items()]


def adjustment_of(trials: Iterable[TrialRecord]) -> Adjustment:
    """Returns the control's adjustment for one run."""
    attempts: dict[str, list[TrialRecord]] = {}
    for trial in trials:
        attempts.setdefault(trial.cell_id, []).append(trial)
    last = [trial for of_cell in attempts.values() for trial in last_attempts(of_cell)]
    return estimates_of(finished_of(last)).adjustment


def last_attempts(attempts: Sequence[TrialRecord]) -> Sequence[TrialRecord]:
    """Returns a cell's trials that count, from records in any order."""
    last = {trial.trial: trial for trial in sorted(attempts, key=lambda trial: trial.attempt)}
    return ended([last[number] for number in sorted(last)])


def finished_of(trials: Sequence[TrialRecord]) -> list[TrialRecord]:
    return [trial for trial in trials if trial.samples_per_second is not None]


def result_of(trials: Sequence[TrialRecord], estimates: RunEstimates) -> CellResult:
    """Returns one cell's result from the last attempts, with estimates of its run."""
    finished = finished_of(trials)
    well = [trial for trial in trials if trial.status == "ok"]
    status = worst_of(trials).status
    verified = bool(well) and all(trial.parity_verdict in VERIFIED for trial in well)
    figures: Figures = {name: getattr(trials[0], name) for name in _SHARED}
    # Before version 4 there was always one node, and it was not recorded.
    figures |= {"nodes": trials[0].nodes or 1}
    for name in ("samples_per_second", "tokens_per_second"):
        figures |= _interval(name, _values(finished, name))
    by_round = _by_round(finished, "samples_per_second")
    if estimate := estimates.cells.get(trials[0].cell_id):
        figures |= _estimated(figures, estimate)
        by_round = {
            number: estimates.by_trial[cell_id, number]
            for cell_id, number in ((t.cell_id, t.trial) for t in finished)
        }
    for name in _MEDIANS:
        values = _values(finished, name)
        figures[name] = statistics.median(values) if values else None
    for name in _LARGEST:
        figures[name] = max(_values(finished, name), default=None)
    figures["peak_memory_bytes_low"] = min(_values(finished, "peak_memory_bytes"), default=None)
    return CellResult(
        status=status,
        reason=reason_of(trials),
        expected=worst_of(trials).expected,
        verified=verified,
        ranked=status == "ok" and verified and bool(finished),
        recorded_trials=len(trials),
        trials=len(finished),
        by_round=by_round,
        peak_by_round=_by_round(well, "peak_memory_bytes"),
        turns=turns_of(finished),
        expert_tokens=next((t.expert_tokens for t in finished if t.expert_tokens), None),
        trend=max(map(abs, _values(finished, "trend")), default=None),
        **figures,
        **_rates(finished),
        **_disturbances(finished),
        **_by_rank(finished),
        **_states(finished),
        **_parity(trials),
    )


def _rates(finished: Sequence[TrialRecord]) -> Figures:
    """Returns denominators of utilizations, from the first trial."""
    first = finished[0] if finished else None
    return {
        "peak_flops_per_second": first and device_rate(first, first.mfu),
        "matmul_flops_per_second": first and device_rate(first, first.matmul_utilization),
    }


def _values(trials: Sequence[TrialRecord], name: str) -> list[float]:
    return [value for trial in trials if (value := getattr(trial, name)) is not None]


def _by_round(trials: Sequence[TrialRecord], name: str) -> dict[int, float]:
    return {t.trial: value for t in trials if (value := getattr(t, name)) is not None}


def _interval(name: str, values: Sequence[float]) -> Figures:
    median = estimate(values) if values else Estimate(0.0, None, None, 0)
    return {
        name: median.value if values else None,
        f"{name}_low": median.low,
        f"{name}_high": median.high,
    }


def _estimated(figures: Figures, estimate: LogEstimate) -> Figures:
    """Returns the throughput with and without the control's adjustment."""
    raw, adjusted = figures["samples_per_second"], estimate.estimate()
    each: Figures = {"log_throughput": estimate}
    for name in ("samples_per_second", "tokens_per_second"):
        if figures[name] is None:
            continue
        scale = figures[name] / raw
        each |= {
            f"raw_{name}": figures[name],
            name: adjusted.value * scale,
            f"{name}_low": None if adjusted.low is None else adjusted.low * scale,
            f"{name}_high": None if adjusted.high is None else adjusted.high * scale,
        }
    return each


def _disturbances(trials: Sequence[TrialRecord]) -> Figures:
    by_trial = [(trial, causes) for trial in trials if (causes := causes_of(trial))]
    counts = Counter(cause for _, causes in by_trial for cause in causes)
    words = [disturbance_in_words(trial, causes) for trial, causes in by_trial]
    records = [gpus_of(trial) for trial in trials]
    findings = [finding.words for record in records for finding in record.findings()]
    unanswered = [words for record in records for words in record.unanswered]
    return {
        "disturbed": len(words),
        "disturbed_by": {cause: counts[cause] for cause in CAUSES if counts[cause]},
        "disturbances": tuple(words),
        "gpu_findings": tuple(dict.fromkeys([*findings, *unanswered])),
    }


def _by_rank(trials: Sequence[TrialRecord]) -> Figures:
    counted = [[x for x in trial.sent_bytes_per_step if math.isfinite(x)] for trial in trials]
    sent = [max(ranks) for ranks in counted if ranks]
    peaks = [ranks for trial in trials if (ranks := trial.peak_memory_bytes_by_rank)]
    return {
        "sent_bytes_per_step": statistics.median(sent) if sent else None,
        "peak_memory_bytes_by_rank": tuple(max(peaks, key=max, default=())),
    }


def _states(trials: Sequence[TrialRecord]) -> Figures:
    """Returns the most that a rank holds between steps, and the formula's prediction."""
    kept = [
        (sum(sizes), sizes, trial)
        for trial in trials
        for sizes in zip(*(getattr(trial, name) for name in _KEPT), strict=True)
    ]
    if not kept:
        return {}
    total, sizes, trial = max(kept, key=lambda rank: rank[0])
    figures: Figures = {
        **dict(zip(_KEPT, sizes, strict=True)),
        "state_bytes": total,
        "library_buffers": trial.library_buffers,
        "host_state_bytes": max(trial.host_state_bytes, default=None),
    }
    by_kind = [getattr(trial, f"formula_{name}") for name in _KEPT]
    if None in by_kind:  # the strategy has no formula
        return figures
    formula = sum(by_kind)
    return figures | {
        "formula_bytes": formula,
        "formula_transient_bytes": trial.formula_transient_bytes,
        "formula_deviation": total / formula - 1 if formula else None,
    }


def _parity(trials: Sequence[TrialRecord]) -> Figures:
    """Returns parity of the trial that deviates most."""
    judged = [trial for trial in trials if trial.parity_verdict is not None]
    if not judged:
        return {}
    worst = min(judged, key=lambda trial: _WORST_VERDICT_FIRST.index(trial.parity_verdict))
    counts = [trial.set_backs for trial in judged if trial.set_backs is not None]
    losses = [x for trial in judged if (x := trial.set_back_loss_deviation) is not None]
    updates = [x for trial in judged if (x := trial.set_back_update_deviation) is not None]
    return {
        "set_backs": sum(counts) if counts else None,
        "not_set_back": next((trial.not_set_back for trial in judged if trial.not_set_back), None),
        "set_back_loss_deviation": max(losses, default=None),
        "set_back_update_deviation": max(updates, default=None),
        **{name: getattr(worst, name) for name in _PARITY},
        "losses": tuple(worst.losses),
        "reference_losses": tuple(worst.reference_losses),
    }
