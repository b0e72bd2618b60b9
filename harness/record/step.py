"""The table `steps`: one row per step of a rank."""

from __future__ import annotations

from dataclasses import dataclass

from harness.record.table import Int32, Record, since


@dataclass(frozen=True, kw_only=True)
class StepRecord(Record):
    run_id: str
    cell_id: str
    trial: Int32
    attempt: Int32
    rank: Int32
    step: Int32
    """number of the step, from 0"""
    phase: str
    """warmup, settling (after the parity check, and at the start of a time slice), timed"""
    data_seconds: float
    """getting the batch and moving it to the device"""
    step_seconds: float
    """the whole step between two device synchronisations, data included"""
    loss: float | None = None
    """mean loss of this rank's samples; null if the rank has none"""
    control_seconds: float | None = since(8, None)
    """duration of the control after the step: one sample's forward and backward in a separate
    process on the rank's cores; null without one"""
    left_over_seconds: float | None = since(8, None)
    """CPU time of the rank's threads in the pause after the step, for work left behind; part of
    step_seconds"""
    training_step: Int32 | None = since(11, None)
    """number of the training step, from 0: less than step after a rewind"""
