from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Literal

from harness.host.gpu_state import GpuRecord
from harness.record.trial_status import WORST_FIRST

if TYPE_CHECKING:
    from harness.record.trial import TrialRecord

DISTURBED_CORES = 0.25
"""Foreign load in cores above which a trial is disturbed."""
QUIET = 0.8
"""Idle fraction of the cores below which a trial is disturbed."""

Cause = Literal["busy", "shared", "throttled"]
CAUSES: dict[Cause, str] = {
    "busy": "something else used the machine during",
    "shared": "another process used its GPUs during",
    "throttled": "heat, hardware or a lowered power limit held its GPUs back in",
}
"""Description of each cause, before a number of trials."""


def disturbances(
    foreign_cores: float | None,
    idle_before: float | None,
    idle_after: float | None,
    gpus: GpuRecord | None = None,
) -> tuple[Cause, ...]:
    """Returns what disturbed a trial; ignores unknown values."""
    idle = [share for share in (idle_before, idle_after) if share is not None]
    busy = (foreign_cores or 0.0) > DISTURBED_CORES or min(idle, default=1.0) < QUIET
    causes: set[Cause] = {finding.cause for finding in gpus.findings()} if gpus else set()
    if busy:
        causes.add("busy")
    return tuple(cause for cause in CAUSES if cause in causes)


def ended(trials: Sequence[TrialRecord]) -> Sequence[TrialRecord]:
    """Drops interrupted trials, unless all were."""
    return [trial for trial in trials if trial.status != "interrupted"] or trials


def worst_of(trials: Sequence[TrialRecord]) -> TrialRecord:
    return min(trials, key=lambda trial: WORST_FIRST.index(trial.status))


def reason_of(trials: Sequence[TrialRecord]) -> str:
    worst = worst_of(trials)
    same = sum(trial.status == worst.status for trial in trials)
    if same == len(trials) or worst.status == "ok":
        return worst.reason
    return f"{same} of {len(trials)} trials: {worst.reason}"


def gpus_of(trial: TrialRecord) -> GpuRecord:
    return GpuRecord.read(trial.gpu_before, trial.gpu_after, trial.gpu_use)


def causes_of(trial: TrialRecord) -> tuple[Cause, ...]:
    return disturbances(
        trial.foreign_load_cores, trial.idle_before, trial.idle_after, gpus_of(trial)
    )


def disturbance_in_words(trial: TrialRecord, causes: Collection[Cause]) -> str:
    """Formats as `trial 2: 1.30 cores used by others, 40 % idle before`."""
    seen = [finding.words for finding in gpus_of(trial).findings()]
    if "busy" in causes:
        if trial.foreign_load_cores is not None:
            seen.append(f"{trial.foreign_load_cores:.2f} cores used by others")
        idle = ((trial.idle_before, "before"), (trial.idle_after, "after"))
        seen += [f"{share * 100:.0f} % idle {when}" for share, when in idle if share is not None]
    return f"trial {trial.trial}: {', '.join(seen)}"
