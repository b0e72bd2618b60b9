"""Results of a cell of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.analysis.stats import Estimate, LogEstimate
from harness.spec.cell import PLAIN

if TYPE_CHECKING:
    from harness.analysis.disturbance import Cause
    from harness.analysis.stats import SliceRates

VERIFIED = ("exact", "within tolerance")
"""Parity verdicts with which a cell may be compared by speed."""
UNVERIFIED = "unverified"
"""Replaces status ok if parity is unknown."""


@dataclass(frozen=True)
class CellResult:
    """One cell of one run, from the last attempt of each trial. Unknown values are None.

    A trial with a throughput counts as finished. Trials stopped by the user count only if there are
    no others. harness/record/schema.py describes columns shared with trials.
    """

    run_id: str
    cell_id: str
    cell_name: str
    label: str
    strategy: str
    workload: str
    devices: int
    status: str
    """Worst status of the trials."""
    reason: str
    """Reason of the worst trial; with a count if others ended differently."""

    system: str | None = None
    cell: str = "{}"
    """Whole cell as JSON."""
    options: str = "{}"
    data: str = ""
    sequence_length: int = 0
    nodes: int = 1
    links: str | None = None
    device: str = "cpu"
    processes: int | None = None
    data_parallel: int | None = None
    pipeline_parallel: int | None = None
    tensor_parallel: int | None = None
    sequence_parallel: int | None = None
    precision: str = ""
    regime: str = "strong"
    global_batch: int = 0
    micro_batches: int = 1
    recompute: str = "none"
    compile: str = "none"
    optimizer: str = ""
    launcher: str = ""
    packages: tuple[str, ...] = ()
    wraps_ddp: str | None = None
    threads_per_device: int = 1
    stand_in: str | None = None
    oversubscribed: bool = False
    parameters: int | None = None
    trained_parameters: int | None = None
    flops_per_step: float | None = None
    hardware_flops_per_step: float | None = None
    memory_method: str | None = None
    parity_steps: int = 0

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

    samples_per_second: float | None = None
    """Geometric mean over trials, adjusted by any control (before schema version 8: median). `_low`
    and `_high` are its 95 % interval, or None."""
    samples_per_second_low: float | None = None
    samples_per_second_high: float | None = None
    tokens_per_second: float | None = None
    tokens_per_second_low: float | None = None
    tokens_per_second_high: float | None = None
    log_throughput: LogEstimate | None = None
    """Estimate behind these throughputs; None before schema version 8."""
    raw_samples_per_second: float | None = None
    """Unadjusted median over trials; None before schema version 8."""
    raw_tokens_per_second: float | None = None
    by_round: Mapping[int, float] = field(default_factory=dict)
    """Samples per second by trial number, adjusted by any control."""
    peak_by_round: Mapping[int, float] = field(default_factory=dict)
    """Peak bytes of the fullest rank by trial number, for trials with status ok."""
    turns: Mapping[int, SliceRates] = field(default_factory=dict)
    """Start and throughput of each time slice, by number of interleaved trial."""
    disturbed: int = 0
    """Number of disturbed trials."""
    disturbed_by: Mapping[Cause, int] = field(default_factory=dict)
    """Number of disturbed trials by cause."""
    disturbances: tuple[str, ...] = ()
    """Description of each disturbed trial."""
    gpu_findings: tuple[str, ...] = ()
    """Descriptions of what was found on the trials' GPUs."""

    step_seconds_p50: float | None = None
    """Median over trials, like the columns up to `offload_written_bytes_per_step`."""
    step_seconds_p95: float | None = None
    data_seconds_p50: float | None = None
    setup_seconds: float | None = None
    startup_seconds: float | None = None
    first_step_seconds: float | None = None
    compile_seconds: float | None = None
    mfu: float | None = None
    matmul_utilization: float | None = None
    bubble_fraction: float | None = None
    expert_imbalance: float | None = None
    memory_imbalance: float | None = None
    wall_seconds: float | None = None
    energy_joules_per_sample: float | None = None
    offload_read_bytes_per_step: float | None = None
    offload_written_bytes_per_step: float | None = None
    peak_flops_per_second: float | None = None
    """FLOP/s of one device by its data sheet, for `mfu`."""
    matmul_flops_per_second: float | None = None
    """FLOP/s of one device in a matrix product, for `matmul_utilization`."""
    trend: float | None = None
    """Largest absolute value over trials."""
    peak_memory_bytes: int | None = None
    """Largest over trials, like the next two columns."""
    offload_kept_bytes: int | None = None
    fp32_loss_deviation: float | None = None
    peak_memory_bytes_low: int | None = None
    """Smallest value over trials."""
    peak_memory_bytes_by_rank: tuple[int, ...] = ()
    """Peaks in the trial with the largest peak."""
    expert_tokens: str | None = None
    """Value of the first finished trial that has one."""
    sent_bytes_per_step: float | None = None
    """Bytes sent by the busiest rank, median over trials."""

    parameter_bytes: float | None = None
    """Bytes between steps on the fullest rank of any trial, like the next three columns."""
    gradient_bytes: float | None = None
    optimizer_bytes: float | None = None
    library_bytes: float | None = None
    state_bytes: float | None = None
    """Sum of the four columns above."""
    host_state_bytes: float | None = None
    library_buffers: str | None = None
    formula_bytes: float | None = None
    """Value of `state_bytes` by the strategy's formula; None if it has none."""
    formula_transient_bytes: float | None = None
    formula_deviation: float | None = None
    """Measured over formula, minus 1."""

    parity_verdict: str | None = None
    """Verdict of the trial that deviates most, like the parity columns below."""
    parity_reason: str | None = None
    parity_max_loss_deviation: float | None = None
    parity_max_update_deviation: float | None = None
    parity_worst_tensor: str | None = None
    parity_loss_tolerance: float | None = None
    parity_update_tolerance: float | None = None
    set_backs: int | None = None
    """Number of rewinds to an earlier state for another judgement, over all trials; None if
    unknown. The deviations are the largest found then. `not_set_back` is the reason for none."""
    not_set_back: str | None = None
    set_back_loss_deviation: float | None = None
    set_back_update_deviation: float | None = None
    same_training: bool = False
    """Whether it trains the same as one process, so that it may be recommended. Parity is exact;
    or, in half precision, within what the precision alone allows and not known to be inexact in
    fp32."""
    fp32_twin: str = ""
    """Parity verdict of a half-precision cell's fp32 twin, possibly a smaller model; empty without
    one."""
    losses: tuple[float | None, ...] = ()
    reference_losses: tuple[float | None, ...] = ()

    baseline: str = ""
    """Id of the baseline cell, or empty."""
    over_baseline: float | None = None
    """Throughput over the baseline's. `_low` and `_high` are its 95 % interval, or None."""
    over_baseline_low: float | None = None
    over_baseline_high: float | None = None
    efficiency_own: float | None = None
    """Scaling efficiency against the same strategy on one device, with its interval."""
    efficiency_own_low: float | None = None
    efficiency_own_high: float | None = None
    efficiency_single: float | None = None
    """Scaling efficiency against a single process without parallelism, with its interval."""
    efficiency_single_low: float | None = None
    efficiency_single_high: float | None = None

    def throughput(self, column: str) -> Estimate | None:
        """Returns the throughput with its interval, or None.

        `column`: samples_per_second or tokens_per_second.
        """
        value: float | None = getattr(self, column)
        if value is None:
            return None
        low, high = getattr(self, f"{column}_low"), getattr(self, f"{column}_high")
        return Estimate(value, low, high, self.trials)

    @property
    def plain(self) -> bool:
        """Whether it uses no micro-batches, recomputation or compilation."""
        return (self.micro_batches, self.recompute, self.compile) == PLAIN

    @property
    def outcome(self) -> str:
        """Status, or `unverified` if it is ok without verified parity."""
        return self.status if self.status != "ok" or self.verified else UNVERIFIED

    @property
    def outcome_reason(self) -> str:
        """Reason for the outcome; empty if it is ok."""
        if self.outcome != UNVERIFIED:
            return self.reason
        judged = self.parity_verdict not in (None, *VERIFIED)
        return (self.parity_reason if judged else None) or "parity unknown"
