from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from harness.analysis.stats import Comparison, Estimate, LogEstimate
from harness.cell.cell import Cell
from harness.cell.errors import plural
from harness.host.gpu_state import GpuRecord
from harness.record.trial import WORST_FIRST, cell_columns

if TYPE_CHECKING:
    from harness.record.trial import TrialRecord

VERIFIED = ("exact", "within tolerance")
"""Parity verdicts that allow comparison by speed."""
NOT_CHECKED = "not checked"
"""Parity verdict, and outcome, of cells that have no reference by design."""
WORST_VERDICT_FIRST = ("diverged", "unknown", NOT_CHECKED, "within tolerance", "exact")
UNVERIFIED = "unverified"
"""Outcome that replaces status ok if parity is not verified."""

SUMS = ("all_reduce", "reduce")
"""Beginnings of the names of collectives that add up."""
T = TypeVar("T")
Result = TypeVar("Result", bound="CellResult")
Summary = Literal["shared", "median", "largest", "worst", "all"]
"""How the trials' values become one value. `shared` takes any trial's value, `median` and `largest`
summarise finished trials, `worst` takes the value of the trial with the worst parity. `all` says
whether the value is true in all trials that have it."""


def of_trials(summary: Summary, default: T, column: str = "") -> T:
    """Returns a field filled from a column of `trials`, by default of its name."""
    metadata = {"summary": summary} | ({"column": column} if column else {})
    return field(default=default, metadata=metadata)


def named(column: str, default: T) -> T:
    return field(default=default, metadata={"column": column})


@dataclass(frozen=True)
class Placement:
    processes: int | None = of_trials("shared", None)
    data_parallel: int | None = of_trials("shared", None)
    pipeline_parallel: int | None = of_trials("shared", None)
    tensor_parallel: int | None = of_trials("shared", None)
    sequence_parallel: int | None = of_trials("shared", None)
    launched_by: str = of_trials("shared", "", "launcher")
    packages: tuple[str, ...] = of_trials("shared", ())
    differences: tuple[str, ...] = of_trials("shared", ())
    wraps_ddp: str | None = of_trials("shared", None)
    stand_in: str | None = of_trials("shared", None)
    oversubscribed: bool = of_trials("shared", False)
    nodes: tuple[str, ...] = of_trials("shared", (), "node_names")


@dataclass(frozen=True)
class Work:
    parameters: int | None = of_trials("shared", None)
    trained_parameters: int | None = of_trials("shared", None)
    flops_per_step: float | None = of_trials("shared", None)
    hardware_flops_per_step: float | None = of_trials("shared", None)
    mfu: float | None = of_trials("median", None)
    matmul_utilization: float | None = of_trials("median", None)
    peak_flops_per_second: float | None = None
    """Rate of one device by its data sheet, for `mfu`."""
    matmul_flops_per_second: float | None = None
    """Measured matrix-product rate of one device, for `matmul_utilization`."""
    energy_joules_per_sample: float | None = of_trials("median", None)


@dataclass(frozen=True)
class Speed:
    """Throughput: geometric mean over trials, adjusted by the control if one ran. `_low` and
    `_high` are its 95% interval."""

    samples_per_second: float | None = None
    samples_per_second_low: float | None = None
    samples_per_second_high: float | None = None
    tokens_per_second: float | None = None
    tokens_per_second_low: float | None = None
    tokens_per_second_high: float | None = None
    log_throughput: LogEstimate | None = None
    raw_samples_per_second: float | None = None
    """Median over trials, not adjusted by the control."""
    raw_tokens_per_second: float | None = None
    by_round: Mapping[int, float] = field(default_factory=dict)
    """Adjusted samples per second by trial number."""
    trend: float | None = None
    """Relative change of the step time during the timed steps, if it is significant: median over
    trials of the absolute value."""

    @property
    def drifts(self) -> bool:
        """Whether steps changed by more than the interval allows: the warm-up was too short."""
        value, high = self.samples_per_second, self.samples_per_second_high
        return bool(self.trend and value and self.trend > (high or value) / value - 1)


@dataclass(frozen=True)
class Relative:
    """Comparison with other cells of the run; `_low` and `_high` are 95% intervals, or None."""

    place: int | None = None
    """Rank in the setting by throughput; None if it is not ranked, or not fairly timed."""
    may_be_fastest: bool = False
    """Whether it is in the verdict's set of cells that may be the fastest of their setting."""
    baseline: str = ""
    """Cell id of the baseline; empty if there is none."""
    over_baseline: float | None = None
    """Throughput over the baseline's. Its interval holds jointly for the setting's cells."""
    over_baseline_low: float | None = None
    over_baseline_high: float | None = None
    efficiency_own: float | None = None
    """Scaling efficiency against this strategy on one device."""
    efficiency_own_low: float | None = None
    efficiency_own_high: float | None = None
    efficiency_single: float | None = None
    """Scaling efficiency against a single process."""
    efficiency_single_low: float | None = None
    efficiency_single_high: float | None = None


@dataclass(frozen=True)
class Times:
    """Times of trials and of their steps: medians over finished trials."""

    step_seconds_p50: float | None = of_trials("median", None)
    step_seconds_p95: float | None = of_trials("median", None)
    data_seconds_p50: float | None = of_trials("median", None)
    setup_seconds: float | None = of_trials("median", None)
    startup_seconds: float | None = of_trials("median", None)
    first_step_seconds: float | None = of_trials("median", None)
    compile_seconds: float | None = of_trials("median", None)
    wall_seconds: float | None = of_trials("median", None)
    bubble_fraction: float | None = of_trials("median", None)


@dataclass(frozen=True)
class Memory:
    """Peak memory of the rank that uses most; the largest over finished trials."""

    peak_memory_bytes: int | None = of_trials("largest", None)
    peak_memory_bytes_low: int | None = None
    peak_memory_bytes_by_rank: tuple[int, ...] = ()
    """Peaks by rank in the trial with the largest peak."""
    peak_by_round: Mapping[int, float] = field(default_factory=dict)
    """Peak by trial number, for trials with status ok."""
    memory_imbalance: float | None = of_trials("median", None)
    memory_method: str | None = of_trials("shared", None)


@dataclass(frozen=True)
class Traffic:
    sent_bytes_per_step: float | None = None
    """Bytes that the busiest rank sends per step, median over trials."""
    collectives: tuple[str, ...] = of_trials("shared", ())
    gradient_dtypes: tuple[str, ...] = of_trials("shared", ())
    offload_read_bytes_per_step: float | None = of_trials("median", None)
    offload_written_bytes_per_step: float | None = of_trials("median", None)
    offload_kept_bytes: int | None = of_trials("largest", None)
    expert_tokens: str | None = None
    """Tokens per expert, from the first finished trial that has them."""
    expert_imbalance: float | None = of_trials("median", None)


@dataclass(frozen=True)
class Checkpoint:
    """Costs of the checkpoint that training resumed from; seconds are medians over trials."""

    checkpoint_ranks: int | None = of_trials("shared", None)
    checkpoint_bytes: int | None = of_trials("largest", None)
    checkpoint_files: int | None = of_trials("largest", None)
    checkpoint_save_seconds: float | None = of_trials("median", None)
    checkpoint_blocked_seconds: float | None = of_trials("median", None)
    checkpoint_load_seconds: float | None = of_trials("median", None)
    checkpoint_restores_random: bool | None = of_trials("all", None)
    checkpoint_restores_bits: bool | None = of_trials("all", None)


@dataclass(frozen=True)
class KeptStates:
    """Bytes that the fullest rank keeps between steps, and the value of the strategy's formula."""

    parameter_bytes: float | None = None
    gradient_bytes: float | None = None
    optimizer_bytes: float | None = None
    library_bytes: float | None = None
    state_bytes: float | None = None
    host_state_bytes: float | None = None
    library_buffers: str | None = None
    formula_bytes: float | None = None
    """Value of the strategy's formula for `state_bytes`; None if it has no formula."""
    formula_transient_bytes: float | None = None
    formula_deviation: float | None = None


@dataclass(frozen=True)
class Parity:
    """Comparison with the reference, from the trial that deviates most."""

    verdict: str | None = of_trials("worst", None, "parity_verdict")
    reason: str | None = of_trials("worst", None, "parity_reason")
    max_loss_deviation: float | None = of_trials("worst", None, "parity_max_loss_deviation")
    max_update_deviation: float | None = of_trials("worst", None, "parity_max_update_deviation")
    worst_tensor: str | None = of_trials("worst", None, "parity_worst_tensor")
    max_element_deviation: float | None = of_trials("worst", None, "parity_max_element_deviation")
    max_decay_deviation: float | None = of_trials("worst", None, "parity_max_decay_deviation")
    max_buffer_deviation: float | None = of_trials("worst", None, "parity_max_buffer_deviation")
    max_moment_deviation: float | None = of_trials("worst", None, "parity_max_moment_deviation")
    moments_skipped_reason: str | None = of_trials("worst", None, "parity_moments_skipped_reason")
    loss_tolerance: float | None = of_trials("worst", None, "parity_loss_tolerance")
    update_tolerance: float | None = of_trials("worst", None, "parity_update_tolerance")
    losses: tuple[float | None, ...] = of_trials("worst", ())
    reference_losses: tuple[float | None, ...] = of_trials("worst", ())
    fp32_loss_deviation: float | None = of_trials("largest", None)
    verified_steps: int | None = of_trials("largest", None)
    rewinds: int | None = None
    """Number of rewinds over all trials; None if unknown."""
    rewind_skipped_reason: str | None = None
    rewind_loss_deviation: float | None = None
    rewind_update_deviation: float | None = None
    same_training: bool = False
    """Whether parity is exact, or half precision explains the deviation."""
    fp32_twin: str = ""
    """Parity verdict of a half-precision cell's fp32 twin; empty if there is no twin."""


@dataclass(frozen=True)
class Disturbance:
    trials: int = named("disturbed", 0)
    by_cause: Mapping[Cause, int] = field(default_factory=dict, metadata={"column": "disturbed_by"})
    descriptions: tuple[str, ...] = named("disturbances", ())
    gpu_findings: tuple[str, ...] = ()


@dataclass(frozen=True)
class CellResult:
    """Results of a cell in one run, from the last attempt of each trial. None means unknown. Trials
    with a throughput count as finished. See harness/record/trial.py for shared columns."""

    run_id: str
    cell: Cell
    cell_id: str
    status: str
    reason: str = ""
    """Reason of the worst trial, with a count if other trials ended differently."""
    expected: bool = False
    verified: bool = False
    """Whether parity holds in every trial with status ok."""
    ranked: bool = False
    """Whether the cell's speed may be compared: it is ok, verified, and has a throughput."""
    recorded_trials: int = 0
    trials: int = 0
    placement: Placement = Placement()
    work: Work = Work()
    speed: Speed = Speed()
    relative: Relative = Relative()
    times: Times = Times()
    memory: Memory = Memory()
    traffic: Traffic = Traffic()
    checkpoint: Checkpoint = Checkpoint()
    states: KeptStates = KeptStates()
    parity: Parity = Parity()
    disturbance: Disturbance = Disturbance()

    def column(self, name: str) -> Any:
        if group := _GROUP_OF.get(name):
            return getattr(getattr(self, group[0]), group[1])
        of_cell = cell_columns(self.cell) if name not in vars(self) or name == "cell" else {}
        return of_cell[name] if name in of_cell else getattr(self, name)

    def columns(self) -> dict[str, object]:
        ungrouped = {
            name: value for name, value in vars(self).items() if name not in (*GROUPS, "cell")
        }
        return cell_columns(self.cell) | ungrouped | {name: self.column(name) for name in _GROUP_OF}

    def varied(self: Result, **fields: object) -> Result:
        return dataclasses.replace(self, cell=self.cell.model_copy(update=fields))

    def throughput(self, column: str) -> Estimate | None:
        """Returns the estimate of samples_per_second or tokens_per_second; None if unknown."""
        value, low, high = (getattr(self.speed, column + end) for end in ("", "_low", "_high"))
        return None if value is None else Estimate(value, low, high, self.trials)

    @property
    def gain(self) -> Comparison | None:
        """Throughput over the baseline's, in tables as in the verdict."""
        over = self.relative
        if over.over_baseline is None:
            return None
        ends = over.over_baseline_low, over.over_baseline_high
        return Comparison(over.over_baseline, *ends, self.trials)

    @property
    def parity_and_steps(self) -> str:
        """Verdict and number of verified steps, such as `exact, 200 steps`."""
        steps = self.parity.verified_steps if self.parity.verdict in VERIFIED else None
        return (self.parity.verdict or "") + (f", {plural(steps, 'step')}" if steps else "")

    @property
    def narrow_sums(self) -> str:
        """Warning that ranks add up in a narrower dtype than that of the gradients; empty if they
        do not, or if it is unknown. Tensor parallelism in half precision adds up activations."""
        sums = [name.split()[1] for name in self.traffic.collectives if name.startswith(SUMS)]
        widest = max(self.traffic.gradient_dtypes, key=_bits, default="")
        narrow = " and ".join(name for name in sums if _bits(name) < _bits(widest))
        activations = self.cell.precision != "fp32" and (self.placement.tensor_parallel or 1) > 1
        if activations or not narrow:
            return ""
        return (
            f"its ranks add up in {narrow}, although gradients are {widest}: this rounding grows"
            " with the number of ranks, and has made trainings on hundreds unstable"
        )

    @property
    def outcome(self) -> str:
        """Status; `unverified` or `not checked` replaces ok if parity is not verified."""
        if self.status == "ok" and self.parity.verdict == NOT_CHECKED:
            return NOT_CHECKED
        return self.status if self.status != "ok" or self.verified else UNVERIFIED

    @property
    def outcome_reason(self) -> str:
        if self.outcome != UNVERIFIED:
            return self.reason
        judged = self.parity.verdict not in (None, *VERIFIED)
        return (self.parity.reason if judged else None) or "parity unknown"


def _bits(dtype: str) -> int:
    return int("0" + "".join(re.findall(r"\d+", dtype)[:1]))


GROUPS: dict[str, type] = {
    field.name: type(field.default)
    for field in dataclasses.fields(CellResult)
    if dataclasses.is_dataclass(field.default)
}
_GROUP_OF = {
    field.metadata.get("column", field.name): (group, field.name)
    for group, kind in GROUPS.items()
    for field in dataclasses.fields(kind)
}
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
"""Text for each cause, followed by a number of trials."""


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
    """Returns the trials that were not interrupted, or all trials if all were interrupted."""
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
    """Formats as `trial 2: 1.30 cores used by others, 40% idle before`."""
    seen = [finding.sentence for finding in gpus_of(trial).findings()]
    if "busy" in causes:
        if trial.foreign_load_cores is not None:
            seen.append(f"{trial.foreign_load_cores:.2f} cores used by others")
        idle = ((trial.idle_before, "before"), (trial.idle_after, "after"))
        seen += [f"{share * 100:.0f}% idle {when}" for share, when in idle if share is not None]
    return f"trial {trial.trial}: {', '.join(seen)}"
