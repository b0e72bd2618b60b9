from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.record.profile_record import GPU_PARTS, ProfileRecord

if TYPE_CHECKING:
    from harness.record.trial import TrialRecord

FORMULA = (
    "matrix-multiply, convolution and attention FLOPs of one forward and backward of the unsplit"
    " model, 2 per multiply-add, attention over the full square, counted by"
    " torch.utils.flop_counter; recomputation is not counted (hardware FLOPs include it); MFU ="
    " FLOPs x steps/s / (devices x peak of the device in the precision)"
)


def mfu(
    flops_per_step: float | None, step_seconds: float, devices: int, peak: float | None
) -> float | None:
    """Returns model FLOPs utilisation, a fraction (PaLM, arXiv 2204.02311, appendix B), if the peak
    is known."""
    if flops_per_step is None or peak is None or step_seconds <= 0:
        return None
    return flops_per_step / step_seconds / (devices * peak)


def device_rate(trial: TrialRecord, utilization: float | None) -> float | None:
    """Returns a device's FLOP/s at utilisation 1."""
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
        told = [f"{shares[n] * 100:.0f} % {PARTS[n]}" for n in gap if shares[n] >= _LEAST_SHARE]
        start = f"{shares[first] * 100:.0f} % of the step is {PARTS[first]}"
        return f"{start}; the rest: {', '.join(told)}" if told else start


def gpu_time(
    profile: ProfileRecord, flops_per_device: float | None, matmul_rate: float | None
) -> GpuTime | None:
    """Breaks down a profiled step, if a GPU was profiled.

    `flops_per_device`: model FLOPs per step, with attention. `matmul_rate`: measured FLOP/s. Idle
    time excludes the profiler's overhead.
    """
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
