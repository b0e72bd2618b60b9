"""A device's peak rates, measured on this CPU; figures are not compared with each other."""

from __future__ import annotations

import math

import pytest
import torch

from harness.measure.hardware_benchmark import measure_apart, measure_device_speed, median_seconds
from harness.record.trial import SpeedMeasurement

CPU = torch.device("cpu")


@pytest.mark.slow
@pytest.mark.parametrize("allowed", [True, False])
def test_speed_of_a_cpu_is_plausible(allowed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates are positive and finite, and the TF32 setting is restored."""
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
    """A call that takes no time is repeated only a bounded number of times."""
    calls = []
    assert median_seconds(lambda: calls.append(1), CPU, 1.0) > 0
    assert len(calls) == 52


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "limit", "succeeds"),
    [("cpu", 90.0, True), ("cuda:99", 90.0, False), ("cpu", 0.01, False)],
)
def test_a_separate_process_measures_or_gives_a_reason(
    device: str, limit: float, succeeds: bool
) -> None:
    """A missing device or a hanging measurement gives a reason instead of a speed."""
    measured = measure_apart(device, limit)
    assert (measured.speed is not None, measured.reason == "") == (succeeds, succeeds)
    assert SpeedMeasurement.read(measured.as_json) == measured
