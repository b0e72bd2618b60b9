"""Columns of `trials`: what was measured and verified."""

from __future__ import annotations

from dataclasses import dataclass

from harness.record.table import Int32, Record, since


@dataclass(frozen=True, kw_only=True)
class TrialSpeed(Record):
    """Times of steps, and throughput."""

    step_seconds_p50: float | None = None
    """median over timed steps of the step time: from when the last rank ended the step before to
    when the last one ends this"""
    step_seconds_p95: float | None = None
    """95th percentile of the same"""
    step_seconds_mean: float | None = None
    """mean of the same"""
    data_seconds_p50: float | None = None
    """median share of the step for getting the batch, slowest rank"""
    samples_per_second: float | None = None
    """global batch / step_seconds_p50; of a strategy that communicates every few steps, / the
    median of whole cycles"""
    tokens_per_second: float | None = None
    """null for images"""
    window_step_seconds: tuple[float, ...] = since(8, ())
    """of a launch with a control, over windows of timed steps in a row: mean of the step times,
    each place of a strategy's cycle counting alike; the control's times below are of the same
    windows and of the last pause before each"""
    window_control_seconds: tuple[float, ...] = since(8, ())
    """mean time of the control, over all ranks"""
    window_slowest_control_seconds: tuple[float, ...] = since(8, ())
    """mean over the pauses of the time of the rank whose control took longest"""
    turn_began: tuple[float, ...] = since(6, ())
    """of a launch that trained by turns with its round's others: when each began, seconds after the
    epoch"""
    turn_samples_per_second: tuple[float, ...] = since(6, ())
    """throughput in each of them"""


@dataclass(frozen=True, kw_only=True)
class TrialSurroundings(Record):
    """What else the host did, and the state of its GPUs."""

    idle_before: float | None = since(3, None)
    """share of the cores' time that was idle just before the launch"""
    idle_after: float | None = since(3, None)
    """the same just after its end"""
    foreign_load_cores: float | None = since(3, None)
    """cores that others than the ranks kept busy during the timed steps"""
    gpu_before: str | None = since(7, None)
    """JSON: of the first node's GPUs that it uses, just before the launch: clocks, what holds them
    back, heat, power, errors, processes"""
    gpu_after: str | None = since(7, None)
    """JSON: the same just after its end"""
    gpu_use: str | None = since(7, None)
    """JSON: by rank the UUIDs of its GPUs, seconds of the timed steps in which power or heat held
    them back, their state at the end"""


@dataclass(frozen=True, kw_only=True)
class TrialEfficiency(Record):
    """What the speed is worth."""

    energy_joules_per_sample: float | None = since(3, None)
    """of all its GPUs by NVML, or of the host's CPU packages by RAPL; null where these do not count
    """
    trend: float | None = None
    """relative change over the timed steps where significant (Kendall, p < 0.01), else 0: warm-up
    was too short"""
    flops_per_step: float | None = None
    """of the model, see `how it was measured`"""
    hardware_flops_per_step: float | None = since(9, None)
    """those and what recomputation adds; null where the model's are"""
    mfu: float | None = None
    """model FLOPs utilisation; null where the device's peak is unknown"""
    matmul_utilization: float | None = since(12, None)
    """the same over the rate that this device reached in a large matrix product (column
    `device_speed` of the run) instead of its peak; null where that was not measured"""
    bubble_fraction: float | None = None
    """share of stage time spent waiting, measured in a pass of its own"""
    expert_tokens: str | None = since(10, None)
    """JSON: of each block with a mixture of experts the tokens that each expert gets, counted in
    the last warm-up step"""
    expert_imbalance: float | None = since(10, None)
    """tokens of the busiest expert over the mean of its block's experts, in the block where that is
    most"""


@dataclass(frozen=True, kw_only=True)
class TrialParity(Record):
    """Losses, and how far they and the parameters are from the reference run's."""

    restarts: Int32 | None = None
    """elastic restarts taken"""
    losses: tuple[float, ...] = ()
    """mean loss of each step of the training, warm-up included; steps trained again are not"""
    reference_losses: tuple[float, ...] = ()
    """the reference run's, over the parity segment"""
    fp32_loss_deviation: float | None = since(2, None)
    """low-precision weights: largest relative loss deviation from the same training in fp32"""
    parity_steps: Int32
    """length of the parity segment"""
    parity_verdict: str | None = None
    """exact, within tolerance, diverged, unknown"""
    parity_reason: str | None = None
    parity_max_loss_deviation: float | None = None
    """largest |loss - reference| / |reference|"""
    parity_max_update_deviation: float | None = None
    """largest |parameters - reference| / |reference's update| of a tensor"""
    later_steps_verified: Int32 | None = since(8, None)
    """steps after the parity segment whose loss was held to the reference's"""
    later_loss_deviation: float | None = since(8, None)
    """largest |loss - reference| / |reference| of these"""
    steps_taken: Int32 | None = since(11, None)
    """all steps of a rank, those trained again included"""
    set_backs: Int32 | None = since(11, None)
    """how often the state was set back to an earlier step, between timed steps, and the steps after
    it judged again"""
    not_set_back: str | None = since(11, None)
    """why it never was"""
    set_back_loss_deviation: float | None = since(11, None)
    """largest |loss - reference| / |reference| of a step that was trained again"""
    set_back_update_deviation: float | None = since(11, None)
    """largest |parameters - reference| / |reference's update| of a tensor after these"""
    parity_worst_tensor: str | None = None
    """the tensor that it was"""
    reference_loss_noise: float | None = since(7, None)
    """largest loss deviation between two reference runs that split the batch differently"""
    reference_update_noise: float | None = since(7, None)
    """largest deviation of a tensor's update between these"""
    parity_loss_tolerance: float | None = None
    """what the strategy declares"""
    parity_update_tolerance: float | None = None
    """what the strategy declares"""
