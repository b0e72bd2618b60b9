"""Troubles that doctor reports on hosts with GPUs, and on any host."""

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

from bench import checks
from bench.checks import (
    GIB,
    gpu_troubles,
    host_troubles,
    locked_memory_trouble,
    shared_memory_trouble,
)
from harness.host.gpu_state import GpuState
from harness.seam.base import Strategy
from tests.gpu import fake_nvml
from tests.gpu.fake_nvml import FakeNvml

LOCKED = pynvml.nvmlClocksEventReasonUserDefinedClocks
TOO_HOT = pynvml.nvmlClocksThrottleReasonHwThermalSlowdown
OTHERS = [(4242, 3 * GIB), (4243, None)]


@pytest.fixture
def torch_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes torch look as on a GPU host."""
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch._C, "_cuda_getArchFlags", lambda: "sm_80 sm_90", raising=False)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr("bench.checks._stand_ins", lambda: iter(()))
    monkeypatch.setattr("bench.checks.shared_memory_trouble", lambda: None)
    monkeypatch.setattr("harness.host.cores.allowed_cores", lambda: list(range(112)))


def found(monkeypatch: pytest.MonkeyPatch, host: FakeNvml) -> list[tuple[str, str, str]]:
    fake_nvml.install(monkeypatch, host)
    return [(one.subject, one.what, one.fix) for one in gpu_troubles()]


@pytest.mark.usefixtures("torch_for_gpus")
@pytest.mark.parametrize(
    ("change", "what", "fix"),
    [
        ({"enforced_limit_milliwatts": 500_000}, "limit is 500 W", "nvidia-smi -i 3 -pl 700"),
        ({"persistent": False}, "persistence mode is off", "sudo nvidia-smi -i 3 -pm 1"),
        ({"ecc": False}, "error correction (ECC) is off", "sudo nvidia-smi -i 3 -e 1"),
        ({"reasons": LOCKED}, "clocks are locked", "sudo nvidia-smi -i 3 -rgc"),
        ({"reasons": TOO_HOT}, "thermal slowdown", "TEMPERATURE,PERFORMANCE"),
        ({"celsius": 91}, "at 91 °C", "TEMPERATURE,PERFORMANCE"),
        ({"uncorrected_errors": 2}, "2 memory errors", "-q -d ECC"),
        ({"processes": OTHERS}, "with 3.0 GiB: 4242 4243", "kill 4242 4243"),
        ({}, "", ""),
        ({"processes": [(os.getpid(), GIB)]}, "", ""),
    ],
)
def test_each_gpu_trouble_comes_with_its_command(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], what: str, fix: str
) -> None:
    """A node in order has none, and this process is no neighbour of itself."""
    host = fake_nvml.h100_node()
    host.gpus[3] = replace(host.gpus[3], **change)
    told = found(monkeypatch, host)
    assert [subject for subject, _, _ in told] == ["GPU 3"] * bool(what)
    assert all(what in text and fix in command for _, text, command in told)


def test_throttling_is_reported_without_a_temperature() -> None:
    (trouble,) = checks._state(GpuState(3, "GPU-3", reasons=("power brake",)))
    assert trouble.what == "power brake"


def test_a_strategy_with_a_required_option_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    class Demanding(Strategy):
        size: int

    monkeypatch.setattr("harness.seam.registry.strategies", lambda: {"demanding": Demanding})
    assert list(checks._stand_ins()) == []


@pytest.mark.usefixtures("torch_for_gpus")
def test_slices_cores_and_missing_links_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert any(
        "slice of a GPU (MIG)" in what
        for _, what, _ in found(monkeypatch, fake_nvml.a100_in_slices())
    )
    host = fake_nvml.h100_node()
    for number in (0, 1):
        host.gpus[number] = replace(host.gpus[number], links=[])
    told = found(monkeypatch, host)
    assert {subject for subject, _, _ in told} == {
        f"GPUs {a} and {b}" for a in (0, 1) for b in range(8) if b > a
    }
    assert all("no NVLink is active" in what for _, what, _ in told)
    monkeypatch.setattr("harness.host.cores.allowed_cores", lambda: list(range(4)))
    assert ("CPU", "4 cores for 8 GPUs") in [
        (one[0], one[1]) for one in found(monkeypatch, fake_nvml.h100_node())
    ]


def test_a_hosts_clocks_are_reported(tmp_path: Path) -> None:
    system = tmp_path / "sys/devices/system/cpu"
    for name, text in (
        ("cpu0/cpufreq/scaling_governor", "powersave"),
        ("cpu1/cpufreq/scaling_governor", "performance"),
        ("intel_pstate/no_turbo", "0"),
        ("smt/active", "1"),
    ):
        (system / name).parent.mkdir(parents=True, exist_ok=True)
        (system / name).write_text(text + "\n")
    told = {one.what: one.fix for one in host_troubles(tmp_path)}
    assert (
        told["1 core with frequency governor powersave"]
        == "sudo cpupower frequency-set -g performance"
    )
    assert "no_turbo" in told["turbo is on"]
    assert "two hardware threads share each core (SMT)" in told
    (system / "intel_pstate/no_turbo").write_text("1\n")
    assert "turbo is on" not in {one.what for one in host_troubles(tmp_path)}


def test_memory_limits_of_containers_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Docker limits /dev/shm to 64 MiB by default."""
    usage = SimpleNamespace(total=64 * 2**20, free=0)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage)
    small = shared_memory_trouble()
    assert small
    assert "has 64 MiB" in small.what
    assert "--shm-size" in small.fix
    assert locked_memory_trouble(tmp_path, limit=65536) is None, "no InfiniBand"
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    locked = locked_memory_trouble(tmp_path, limit=65536)
    assert locked
    assert "0.1 MiB" in locked.what
    assert locked_memory_trouble(tmp_path, limit=-1) is None
