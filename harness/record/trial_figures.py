"""Columns of `trials`: measurements and verification."""

from __future__ import annotations

from dataclasses import dataclass

from harness.record.table import Int32, Record, since


@dataclass(frozen=True, kw_only=True)
class TrialSpeed(Record):
    step_seconds_p50: float | None = None
    """median step time of the timed steps: from the slowest rank finishing the previous step to it
    finishing this one"""
    step_seconds_p95: float | None = None
    """95th percentile of the step time"""
    step_seconds_mean: float | None = None
    """mean step time"""
    data_seconds_p50: float | None = None
    """median time for getting the batch, slowest rank"""
    samples_per_second: float | None = None
    """global batch / step_seconds_p50, or / the median of whole cycles if a strategy communicates
    every few steps"""
    tokens_per_second: float | None = None
    """null for images"""
    window_step_seconds: tuple[float, ...] = since(8, ())
    """mean step time of each window of consecutive timed steps, each position of a strategy's cycle
    counting alike; empty without a control. Control times cover the same windows and the last pause
    before each"""
    window_control_seconds: tuple[float, ...] = since(8, ())
    """mean time of the control per window, over all ranks"""
    window_slowest_control_seconds: tuple[float, ...] = since(8, ())
    """time of the slowest rank's control per window, mean over its pauses"""
    turn_began: tuple[float, ...] = since(6, ())
    """start of each time slice of an interleaved trial, in seconds since the epoch"""
    turn_samples_per_second: tuple[float, ...] = since(6, ())
    """throughput in each time slice"""


@dataclass(frozen=True, kw_only=True)
class TrialSurroundings(Record):
    """Other load on the host, and the state of its GPUs."""

    idle_before: float | None = since(3, None)
    """idle fraction of the cores' time just before the trial"""
    idle_after: float | None = since(3, None)
    """idle fraction of the cores' time just after the trial"""
    foreign_load_cores: float | None = since(3, None)
    """cores kept busy by other processes during the timed steps"""
    gpu_before: str | None = since(7, None)
    """JSON: state of its GPUs on the first node just before the trial: clocks, throttling,
    temperature, power, errors, processes"""
    gpu_after: str | None = since(7, None)
    """JSON: state of the same GPUs just after the trial"""
    gpu_use: str | None = since(7, None)
    """JSON: by rank, GPU UUIDs, seconds of timed steps with power or thermal throttling, state at
    the end"""


@dataclass(frozen=True, kw_only=True)
class TrialEfficiency(Record):
    energy_joules_per_sample: float | None = since(3, None)
    """energy of the trial's GPUs by NVML, or of the host's CPU packages by RAPL; null without
    counters"""
    trend: float | None = None
    """relative change over the timed steps if significant (Kendall, p < 0.01): warm-up was too
    short; else 0"""
    flops_per_step: float | None = None
    """FLOPs of the model, see `how it was measured`"""
    hardware_flops_per_step: float | None = since(9, None)
    """FLOPs including recomputation; null if the model's are unknown"""
    mfu: float | None = None
    """model FLOPs utilisation; null if the device's peak is unknown"""
    matmul_utilization: float | None = since(12, None)
    """utilisation of the device's measured rate in a large matrix product (column `device_speed` of
    the run); null if not measured"""
    bubble_fraction: float | None = None
    """fraction of stage time spent waiting, measured in a separate pass"""
    expert_tokens: str | None = since(10, None)
    """JSON: tokens of each expert by mixture-of-experts block, counted in the last warm-up step"""
    expert_imbalance: float | None = since(10, None)
    """tokens of the busiest expert over the mean of its block, in the most imbalanced block"""


@dataclass(frozen=True, kw_only=True)
class TrialParity(Record):
    """Losses, and deviations of losses and parameters from the reference run."""

    restarts: Int32 | None = None
    """number of elastic restarts"""
    losses: tuple[float, ...] = ()
    """mean loss of each training step, warm-up included, without retrained steps"""
    reference_losses: tuple[float, ...] = ()
    """losses of the reference run over the parity segment"""
    fp32_loss_deviation: float | None = since(2, None)
    """low-precision weights: largest relative loss deviation from the same training in fp32"""
    parity_steps: Int32
    """number of steps in the parity segment"""
    parity_verdict: str | None = None
    """exact, within tolerance, diverged, unknown"""
    parity_reason: str | None = None
    parity_max_loss_deviation: float | None = None
    """largest |loss - reference| / |reference|"""
    parity_max_update_deviation: float | None = None
    """largest |parameters - reference| / |reference's update| of a tensor"""
    later_steps_verified: Int32 | None = since(8, None)
    """number of steps after the parity segment whose loss was verified"""
    later_loss_deviation: float | None = since(8, None)
    """largest |loss - reference| / |reference| of these steps"""
    steps_taken: Int32 | None = since(11, None)
    """number of steps of a rank, including retrained ones"""
    set_backs: Int32 | None = since(11, None)
    """number of rewinds to an earlier step between timed steps, to verify the steps again"""
    not_set_back: str | None = since(11, None)
    """why the state was never rewound"""
    set_back_loss_deviation: float | None = since(11, None)
    """largest |loss - reference| / |reference| of a retrained step"""
    set_back_update_deviation: float | None = since(11, None)
    """largest |parameters - reference| / |reference's update| of a tensor after retrained steps"""
    parity_worst_tensor: str | None = None
    """name of the tensor with the largest update deviation"""
    reference_loss_noise: float | None = since(7, None)
    """largest loss deviation between two reference runs that split the batch differently"""
    reference_update_noise: float | None = since(7, None)
    """largest deviation of a tensor's update between the two"""
    parity_loss_tolerance: float | None = None
    """tolerance that the strategy declares for losses"""
    parity_update_tolerance: float | None = None
    """tolerance that the strategy declares for updates"""
