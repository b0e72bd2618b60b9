"""What a cell of a run shows: its status, its figures over trials, its parity, its memory."""

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
"""Verdicts of parity with which a cell may be compared by speed."""
UNVERIFIED = "unverified"
"""Stands in the place of status ok where parity is unknown."""


@dataclass(frozen=True)
class CellResult:
    """One cell of one run, from the last attempt of each of its trials. Unknown is None.

    A trial counts as finished where it has a throughput; trials that the user stopped count only
    where there are no others. Columns that a cell shares with its trials are described in
    harness/record/schema.py.
    """

    run_id: str
    cell_id: str
    cell_name: str
    label: str
    strategy: str
    workload: str
    devices: int
    status: str
    """The worst status of its trials."""
    reason: str
    """Of the worst trial, with the number of trials that ended so where others ended otherwise."""

    system: str | None = None
    cell: str = "{}"
    """JSON: the whole cell."""
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
    """The matrix expects this status (a cell that is known to diverge)."""
    verified: bool = False
    """Parity holds in every trial that ended well."""
    ranked: bool = False
    """May be compared by speed: status ok, verified, and with a throughput."""
    recorded_trials: int = 0
    """Without those that the user stopped, unless there are no others."""
    trials: int = 0
    """Finished ones."""

    samples_per_second: float | None = None
    """Geometric mean over trials, adjusted by the control where there is one (median over trials in
    runs from before schema version 8); `_low` and `_high` are its 95 % interval, None where there
    is none."""
    samples_per_second_low: float | None = None
    samples_per_second_high: float | None = None
    tokens_per_second: float | None = None
    tokens_per_second_low: float | None = None
    tokens_per_second_high: float | None = None
    log_throughput: LogEstimate | None = None
    """What these are made from; None in runs from before schema version 8."""
    raw_samples_per_second: float | None = None
    """Median over trials, nothing taken out by the control; None in runs from before version 8."""
    raw_tokens_per_second: float | None = None
    by_round: Mapping[int, float] = field(default_factory=dict)
    """Samples per second by number of trial, adjusted by the control where there is one."""
    peak_by_round: Mapping[int, float] = field(default_factory=dict)
    """Peak memory of the fullest rank in bytes by number of trial, of trials with status ok."""
    turns: Mapping[int, SliceRates] = field(default_factory=dict)
    """Begin and throughput of each time slice by number of trial, of trials that trained in time
    slices with others."""
    disturbed: int = 0
    """Trials that something disturbed."""
    disturbed_by: Mapping[Cause, int] = field(default_factory=dict)
    """Their number by cause."""
    disturbances: tuple[str, ...] = ()
    """What disturbed each of them, in words."""
    gpu_findings: tuple[str, ...] = ()
    """What was found on the trials' GPUs, in words."""

    step_seconds_p50: float | None = None
    """This and the next figures: median over trials."""
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
    """Of one device, by its data sheet: `mfu` is a share of it."""
    matmul_flops_per_second: float | None = None
    """What one device reached in a matrix product: `matmul_utilization` is a share of it."""
    trend: float | None = None
    """Largest of the trials, without its sign."""
    peak_memory_bytes: int | None = None
    """This and the next two figures: largest of the trials."""
    offload_kept_bytes: int | None = None
    fp32_loss_deviation: float | None = None
    peak_memory_bytes_low: int | None = None
    """Smallest of the trials."""
    peak_memory_bytes_by_rank: tuple[int, ...] = ()
    """In the trial with the largest peak."""
    expert_tokens: str | None = None
    """Of its first finished trial that knows them."""
    sent_bytes_per_step: float | None = None
    """Of the rank that sends most, median over trials."""

    parameter_bytes: float | None = None
    """This and the next three: kept between steps by the fullest rank, in the trial in which it
    keeps most."""
    gradient_bytes: float | None = None
    optimizer_bytes: float | None = None
    library_bytes: float | None = None
    state_bytes: float | None = None
    """Their sum."""
    host_state_bytes: float | None = None
    library_buffers: str | None = None
    formula_bytes: float | None = None
    """What the strategy's formula gives for `state_bytes`; None where it has no formula."""
    formula_transient_bytes: float | None = None
    formula_deviation: float | None = None
    """Measured over formula, less 1."""

    parity_verdict: str | None = None
    """This and what follows of parity: of the trial that deviates most."""
    parity_reason: str | None = None
    parity_max_loss_deviation: float | None = None
    parity_max_update_deviation: float | None = None
    parity_worst_tensor: str | None = None
    parity_loss_tolerance: float | None = None
    parity_update_tolerance: float | None = None
    set_backs: int | None = None
    """How often, in all trials together, the state was set back and judged again; None: unknown.
    The deviations are the largest found then, `not_set_back` is the reason where it never was."""
    not_set_back: str | None = None
    set_back_loss_deviation: float | None = None
    set_back_update_deviation: float | None = None
    same_training: bool = False
    """May be advised: it trains what one process trains. Parity is exact; or, in half precision, it
    is within what the precision alone allows, and not known to be inexact in fp32."""
    fp32_twin: str = ""
    """In half precision: the parity verdict of the same cell in fp32, possibly of a smaller model;
    empty if the run has none."""
    losses: tuple[float | None, ...] = ()
    reference_losses: tuple[float | None, ...] = ()

    baseline: str = ""
    """Id of the cell that its throughput is compared with; empty where there is none."""
    over_baseline: float | None = None
    """Throughput over the baseline's; `_low` and `_high` are its 95 % interval, None where there is
    none."""
    over_baseline_low: float | None = None
    over_baseline_high: float | None = None
    efficiency_own: float | None = None
    """Scaling efficiency against the same strategy on one device; None without one. `_low` and
    `_high` are its 95 % interval, None where there is none."""
    efficiency_own_low: float | None = None
    efficiency_own_high: float | None = None
    efficiency_single: float | None = None
    """Scaling efficiency against a single process without any parallelism, with its interval."""
    efficiency_single_low: float | None = None
    efficiency_single_high: float | None = None

    def throughput(self, column: str) -> Estimate | None:
        """Its throughput with the interval; None where it has none.

        `column`: samples_per_second or tokens_per_second.
        """
        value: float | None = getattr(self, column)
        if value is None:
            return None
        low, high = getattr(self, f"{column}_low"), getattr(self, f"{column}_high")
        return Estimate(value, low, high, self.trials)

    @property
    def plain(self) -> bool:
        """Whether it takes its batch at a time, computes nothing twice and compiles nothing."""
        return (self.micro_batches, self.recompute, self.compile) == PLAIN

    @property
    def outcome(self) -> str:
        """The status, or `unverified` where it is ok and parity is not known to hold."""
        return self.status if self.status != "ok" or self.verified else UNVERIFIED

    @property
    def outcome_reason(self) -> str:
        """Why the outcome is what it is; empty where it is ok."""
        if self.outcome != UNVERIFIED:
            return self.reason
        judged = self.parity_verdict not in (None, *VERIFIED)
        return (self.parity_reason if judged else None) or "parity unknown"
