"""Results of a cell of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from harness.analysis.stats import Estimate, LogEstimate
from harness.record.trial import cell_columns
from harness.spec.cell import Cell

if TYPE_CHECKING:
    from harness.analysis.stats import SliceRates
    from harness.analysis.trials import Cause

VERIFIED = ("exact", "within tolerance")
"""Parity verdicts with which a cell may be compared by speed."""
UNVERIFIED = "unverified"
"""Replaces status ok if parity is unknown."""

T = TypeVar("T")
Result = TypeVar("Result", bound="CellResult")
Summary = Literal["shared", "median", "largest", "worst"]
"""How trials become one value: all share it, median or largest of the finished ones, or the value
of the trial whose parity deviates most."""


def of_trials(summary: Summary, default: T, column: str = "") -> T:
    """Returns a field filled from a column of `trials`; `column`: its name if not the field's."""
    metadata = {"summary": summary} | ({"column": column} if column else {})
    return field(default=default, metadata=metadata)


def named(column: str, default: T) -> T:
    """Returns a field whose name among a result's columns is another."""
    return field(default=default, metadata={"column": column})


@dataclass(frozen=True)
class Placement:
    """How the cell was run; columns of `trials`."""

    processes: int | None = of_trials("shared", None)
    data_parallel: int | None = of_trials("shared", None)
    pipeline_parallel: int | None = of_trials("shared", None)
    tensor_parallel: int | None = of_trials("shared", None)
    sequence_parallel: int | None = of_trials("shared", None)
    launched_by: str = of_trials("shared", "", "launcher")
    packages: tuple[str, ...] = of_trials("shared", ())
    wraps_ddp: str | None = of_trials("shared", None)
    stand_in: str | None = of_trials("shared", None)
    oversubscribed: bool = of_trials("shared", False)


@dataclass(frozen=True)
class Work:
    """Size of the model, its arithmetic, and how well the devices were used."""

    parameters: int | None = of_trials("shared", None)
    trained_parameters: int | None = of_trials("shared", None)
    flops_per_step: float | None = of_trials("shared", None)
    hardware_flops_per_step: float | None = of_trials("shared", None)
    mfu: float | None = of_trials("median", None)
    matmul_utilization: float | None = of_trials("median", None)
    peak_flops_per_second: float | None = None
    """FLOP/s of one device by its data sheet, for `mfu`."""
    matmul_flops_per_second: float | None = None
    """FLOP/s of one device in a matrix product, for `matmul_utilization`."""
    energy_joules_per_sample: float | None = of_trials("median", None)


@dataclass(frozen=True)
class Speed:
    """Throughput: geometric mean over trials, adjusted by any control. `_low` and `_high` are its
    95 % interval, or None."""

    samples_per_second: float | None = None
    samples_per_second_low: float | None = None
    samples_per_second_high: float | None = None
    tokens_per_second: float | None = None
    tokens_per_second_low: float | None = None
    tokens_per_second_high: float | None = None
    log_throughput: LogEstimate | None = None
    """Estimate behind these throughputs."""
    raw_samples_per_second: float | None = None
    """Unadjusted median over trials."""
    raw_tokens_per_second: float | None = None
    by_round: Mapping[int, float] = field(default_factory=dict)
    """Samples per second by trial number, adjusted by any control."""
    turns: Mapping[int, SliceRates] = field(default_factory=dict)
    """Start and throughput of each turn, by number of interleaved trial."""
    trend: float | None = None
    """Largest absolute value over trials."""


@dataclass(frozen=True)
class Relative:
    """Throughput over that of other cells; `_low` and `_high` are 95 % intervals, or None."""

    baseline: str = ""
    """Id of the baseline cell, or empty."""
    over_baseline: float | None = None
    over_baseline_low: float | None = None
    over_baseline_high: float | None = None
    efficiency_own: float | None = None
    """Scaling efficiency against the same strategy on one device."""
    efficiency_own_low: float | None = None
    efficiency_own_high: float | None = None
    efficiency_single: float | None = None
    """Scaling efficiency against a single process without parallelism."""
    efficiency_single_low: float | None = None
    efficiency_single_high: float | None = None


@dataclass(frozen=True)
class Times:
    """Seconds and shares of a trial and of its steps, median over finished trials."""

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
    """Peak memory of the fullest rank; the largest over finished trials."""

    peak_memory_bytes: int | None = of_trials("largest", None)
    peak_memory_bytes_low: int | None = None
    """Smallest value over trials."""
    peak_memory_bytes_by_rank: tuple[int, ...] = ()
    """Peaks in the trial with the largest peak."""
    peak_by_round: Mapping[int, float] = field(default_factory=dict)
    """Peak by trial number, for trials with status ok."""
    memory_imbalance: float | None = of_trials("median", None)
    memory_method: str | None = of_trials("shared", None)


@dataclass(frozen=True)
class Traffic:
    """Bytes moved in a step, and tokens routed to experts."""

    sent_bytes_per_step: float | None = None
    """Bytes sent by the busiest rank, median over trials."""
    offload_read_bytes_per_step: float | None = of_trials("median", None)
    offload_written_bytes_per_step: float | None = of_trials("median", None)
    offload_kept_bytes: int | None = of_trials("largest", None)
    expert_tokens: str | None = None
    """Value of the first finished trial that has one."""
    expert_imbalance: float | None = of_trials("median", None)


@dataclass(frozen=True)
class KeptStates:
    """Bytes between steps on the fullest rank of any trial, and the strategy's formula."""

    parameter_bytes: float | None = None
    gradient_bytes: float | None = None
    optimizer_bytes: float | None = None
    library_bytes: float | None = None
    state_bytes: float | None = None
    """Sum of the four above."""
    host_state_bytes: float | None = None
    library_buffers: str | None = None
    formula_bytes: float | None = None
    """Value of `state_bytes` by the strategy's formula; None if it has none."""
    formula_transient_bytes: float | None = None
    formula_deviation: float | None = None
    """Measured over formula, minus 1."""


@dataclass(frozen=True)
class Parity:
    """Comparison with the reference run; verdict and deviations are those of the trial that
    deviates most."""

    verdict: str | None = of_trials("worst", None, "parity_verdict")
    reason: str | None = of_trials("worst", None, "parity_reason")
    max_loss_deviation: float | None = of_trials("worst", None, "parity_max_loss_deviation")
    max_update_deviation: float | None = of_trials("worst", None, "parity_max_update_deviation")
    worst_tensor: str | None = of_trials("worst", None, "parity_worst_tensor")
    loss_tolerance: float | None = of_trials("worst", None, "parity_loss_tolerance")
    update_tolerance: float | None = of_trials("worst", None, "parity_update_tolerance")
    losses: tuple[float | None, ...] = of_trials("worst", ())
    reference_losses: tuple[float | None, ...] = of_trials("worst", ())
    fp32_loss_deviation: float | None = of_trials("largest", None)
    rewinds: int | None = None
    """Number of rewinds to an earlier state for another judgement, over all trials; None if
    unknown. The deviations are the largest found then."""
    rewind_skipped_reason: str | None = None
    rewind_loss_deviation: float | None = None
    rewind_update_deviation: float | None = None
    same_training: bool = False
    """Whether it trains the same as one process, so that it may be recommended. Parity is exact;
    or, in half precision, within what the precision alone allows and not known to be inexact in
    fp32."""
    fp32_twin: str = ""
    """Parity verdict of a half-precision cell's fp32 twin, possibly a smaller model; empty without
    one."""


@dataclass(frozen=True)
class Disturbance:
    """What else happened on the machine."""

    trials: int = named("disturbed", 0)
    """Number of disturbed trials."""
    by_cause: Mapping[Cause, int] = field(default_factory=dict, metadata={"column": "disturbed_by"})
    """Number of disturbed trials by cause."""
    descriptions: tuple[str, ...] = named("disturbances", ())
    """Description of each disturbed trial."""
    gpu_findings: tuple[str, ...] = ()
    """Descriptions of what was found on the trials' GPUs."""


@dataclass(frozen=True)
class CellResult:
    """One cell of one run, from the last attempt of each trial. Unknown values are None.

    A trial with a throughput counts as finished. Trials stopped by the user count only if there are
    no others. harness/record/schema.py describes the columns that groups share with `trials`.
    """

    run_id: str
    cell: Cell
    cell_id: str
    """Recorded id, the key of the cell in every table."""
    status: str
    """Worst status of the trials."""
    reason: str = ""
    """Reason of the worst trial; with a count if others ended differently."""
    expected: bool = False
    """Whether the matrix expects this status (such as a known divergence)."""
    verified: bool = False
    """Whether parity holds in every trial that ended well."""
    ranked: bool = False
    """Whether it may be compared by speed: ok, verified, with a throughput."""
    recorded_trials: int = 0
    """Number of trials that count."""
    trials: int = 0
    """Number of finished trials."""
    placement: Placement = Placement()
    work: Work = Work()
    speed: Speed = Speed()
    relative: Relative = Relative()
    times: Times = Times()
    memory: Memory = Memory()
    traffic: Traffic = Traffic()
    states: KeptStates = KeptStates()
    parity: Parity = Parity()
    disturbance: Disturbance = Disturbance()

    def column(self, name: str) -> Any:
        """Returns a value by its column's name, see `columns`."""
        if group := _GROUP_OF.get(name):
            return getattr(getattr(self, group[0]), group[1])
        of_cell = cell_columns(self.cell) if name not in vars(self) or name == "cell" else {}
        return of_cell[name] if name in of_cell else getattr(self, name)

    def columns(self) -> dict[str, object]:
        """Returns values by column: the cell's fields, the result's own and those of its groups."""
        own = {name: value for name, value in vars(self).items() if name not in (*GROUPS, "cell")}
        return cell_columns(self.cell) | own | {name: self.column(name) for name in _GROUP_OF}

    def varied(self: Result, **fields: object) -> Result:
        """Returns the result with other fields of its cell, for its label and setting."""
        return dataclasses.replace(self, cell=self.cell.model_copy(update=fields))

    def throughput(self, column: str) -> Estimate | None:
        """Returns the throughput with its interval, or None.

        `column`: samples_per_second or tokens_per_second.
        """
        value, low, high = (getattr(self.speed, column + end) for end in ("", "_low", "_high"))
        return None if value is None else Estimate(value, low, high, self.trials)

    @property
    def outcome(self) -> str:
        """Status, or `unverified` if it is ok without verified parity."""
        return self.status if self.status != "ok" or self.verified else UNVERIFIED

    @property
    def outcome_reason(self) -> str:
        """Reason for the outcome; empty if it is ok."""
        if self.outcome != UNVERIFIED:
            return self.reason
        judged = self.parity.verdict not in (None, *VERIFIED)
        return (self.parity.reason if judged else None) or "parity unknown"


GROUPS: dict[str, type] = {
    field.name: type(field.default)
    for field in dataclasses.fields(CellResult)
    if dataclasses.is_dataclass(field.default)
}
"""Groups of fields of a result, by name."""
_GROUP_OF = {
    field.metadata.get("column", field.name): (group, field.name)
    for group, kind in GROUPS.items()
    for field in dataclasses.fields(kind)
}
"""Group and attribute of each column."""
