"""Model FLOPs, and their share of the device's peak."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.record.trial import TrialRecord


FORMULA = (
    "matrix-multiply, convolution and attention FLOPs of one forward and backward of the unsplit"
    " model, 2 per multiply-add, attention over the full square, counted by"
    " torch.utils.flop_counter; recomputation does not count (hardware FLOPs have it); MFU = FLOPs"
    " x steps/s / (devices x peak of the device in the precision)"
)


def mfu(
    flops_per_step: float | None, step_seconds: float, devices: int, peak: float | None
) -> float | None:
    """Returns the model FLOPs utilisation (PaLM, arXiv 2204.02311, appendix B), a fraction; None if
    the peak is unknown."""
    if flops_per_step is None or peak is None or step_seconds <= 0:
        return None
    return flops_per_step / step_seconds / (devices * peak)


def device_rate(trial: TrialRecord, utilization: float | None) -> float | None:
    """Returns the FLOP/s of one device at utilization 1; None if unknown."""
    if not (utilization and trial.flops_per_step and trial.samples_per_second):
        return None
    steps_per_second = trial.samples_per_second / trial.global_batch
    return trial.flops_per_step * steps_per_second / trial.devices / utilization
