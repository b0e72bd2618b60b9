"""What a device reaches at best, measured on this CPU; no figure is compared with another."""

from __future__ import annotations

import math

import pytest
import torch

from harness.measure.hardware_benchmark import measure_apart, measure_device_speed, median_seconds
from harness.record.hardware_facts import SpeedMeasurement

CPU = torch.device("cpu")


@pytest.mark.parametrize("allowed", [True, False])
def test_speed_of_a_cpu(allowed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rate is positive and finite; TF32 is afterwards as it was."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", allowed)
    speed = measure_device_speed(CPU)
    assert torch.backends.cuda.matmul.allow_tf32 is allowed
    assert set(speed.matmul_flops_per_second) == {"fp32", "bf16", "fp16"}
    rates = [
        *speed.matmul_flops_per_second.values(),
        speed.copy_bytes_per_second,
        speed.launch_seconds,
    ]
    assert all(math.isfinite(rate) and rate > 0 for rate in rates)
    assert speed.host_to_device_bytes_per_second == {}
    assert speed.device_to_host_bytes_per_second == {}


def test_repeats_are_bounded() -> None:
    """Calls that take no time are repeated at most so often that the measurement ends."""
    calls = []
    assert median_seconds(lambda: calls.append(1), CPU, 1.0) > 0
    assert len(calls) == 52


@pytest.mark.parametrize(
    ("device", "limit", "succeeds"),
    [("cpu", 90.0, True), ("cuda:99", 90.0, False), ("cpu", 0.01, False)],
)
def test_a_process_of_its_own_measures_or_says_why_not(
    device: str, limit: float, succeeds: bool
) -> None:
    """A device that is not there, and a measurement that hangs, are a reason."""
    measured = measure_apart(device, limit)
    assert (measured.speed is not None, measured.reason == "") == (succeeds, succeeds)
    assert SpeedMeasurement.read(measured.as_json) == measured
