"""Disturbances of a GPU, read around a trial and in its timed steps, and how they are reported."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pynvml
import pytest
import torch

from harness.analysis.cell_result import disturbances
from harness.host.gpu_state import (
    GIB,
    GpuLook,
    GpuProcess,
    GpuRecord,
    GpuState,
    GpuUse,
    as_json,
    decoded,
)
from harness.measure.peak_memory import MemoryMeter
from harness.measure.resource_use import Energy, RankGpus
from tests.gpu.fake_nvml import FakeNvml, a100_in_slices, h100_node, install, rtx_4090

COOL = GpuState(
    3,
    "GPU-x",
    1980,
    1980,
    reasons=("idle",),
    power_limit_watts=700.0,
    default_power_limit_watts=700.0,
)
SECOND = 10**9


def record(before: GpuState = COOL, after: GpuState = COOL, use: GpuUse | None = None) -> GpuRecord:
    """Writes a GPU's columns as a row does, and reads them back."""
    columns = as_json([before]), as_json([after]), as_json([use or GpuUse(("GPU-x",), 10.0)])
    return GpuRecord.read(*columns)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeNvml], list[torch.device]]:
    """Function that makes torch.cuda show a host's GPUs by UUID, and returns their devices."""

    def show(host: FakeNvml) -> list[torch.device]:
        install(monkeypatch, host)
        uuids = [device.uuid.removeprefix("GPU-") for device in host.gpus]
        properties = [SimpleNamespace(uuid=uuid, total_memory=80 * GIB) for uuid in uuids]
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda one: properties[one.index])
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda one: 10 * GIB)
        return [torch.device("cuda", number) for number in range(len(uuids))]

    return show


def test_every_reason_of_nvml_is_decoded_in_words() -> None:
    name = "nvmlClocksThrottleReason"
    bits = {mask for reason, mask in vars(pynvml).items() if reason.startswith(name)}
    single = [mask for mask in bits if mask.bit_count() == 1]
    words = [decoded(mask)[0] for mask in single]
    assert len(set(words)) == len(words) >= 11
    assert not any(word.startswith("reason ") for word in words)
    assert decoded(pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown) == ("power brake",)
    assert decoded(0) == ()
    assert decoded(0x24) == ("power cap", "thermal slowdown by the driver")
    assert decoded(1 << 20) == ("reason 20",)


def test_a_look_has_the_state_of_the_visible_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    host = install(monkeypatch, h100_node(), "5,6")
    host.gpus[6].processes = [(4711, 2 * GIB)]
    first, state = GpuLook().states(2)
    assert (first.index, state.index) == (5, 6)
    assert (state.sm_mhz, state.memory_max_mhz, state.reasons) == (1980, 2619, ("idle",))
    assert (state.temperature_celsius, state.power_watts) == (41, 120.0)
    assert (state.corrected_errors, state.uncorrected_errors, state.used_bytes) == (0, 0, 2 * GIB)
    assert state.processes == (GpuProcess(4711, 2 * GIB),)
    assert (len(GpuLook().states(1)), GpuLook().states(0)) == (1, ())


def test_what_a_consumer_card_lacks_is_unknown_and_no_disturbance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = install(monkeypatch, rtx_4090())
    lacking = {"nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetCurrentClocksEventReasons"}
    host.gpus[0].lacks |= lacking
    host.gpus[0].processes = [(1, None)]
    (state,) = GpuLook().states(1)
    assert (state.uncorrected_errors, state.reasons, state.power_limit_watts) == (None, None, None)
    assert record(state, state).findings() == []


def test_a_host_without_nvml_is_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeNvml([], no_driver=True))
    assert GpuLook().states(8) == ()
    assert as_json(()) is None
    assert GpuRecord.read(None, None, float("nan")) == GpuRecord()
    assert GpuRecord.read("[1]", "{}", "no JSON") == GpuRecord()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {"reasons": ("thermal slowdown by the driver",), "temperature_celsius": 88},
            "thermal slowdown by the driver at 88 °C",
        ),
        ({"reasons": ("power brake", "idle")}, "power brake"),
        ({"reasons": ("hardware slowdown",)}, "hardware slowdown"),
        ({"reasons": ("hardware slowdown", "idle")}, None),
        ({"reasons": ("power cap",)}, None),
        ({"reasons": None}, None),
    ],
)
def test_a_slowed_gpu_is_marked_and_a_power_cap_at_the_default_is_not(
    changed: dict[str, object],
    words: str | None,
) -> None:
    state = replace(COOL, **changed)  # type: ignore[arg-type]
    told = record(before=state)
    expected = [f"GPU 3 just before: {words}"] if words else []
    assert [one.sentence for one in told.findings()] == expected
    assert bool(disturbances(None, None, None, told)) == (words is not None)


def test_other_processes_mark_the_trial() -> None:
    processes = (GpuProcess(4711, 3 * GIB), GpuProcess(4712, GIB))
    told = record(after=replace(COOL, processes=processes))
    words = "GPU 3 just after: 2 other processes with 4.0 GiB"
    assert [one.sentence for one in told.findings()] == [words]
    assert disturbances(0.0, 1.0, 1.0, told) == ("shared",)
    assert disturbances(9.0, 1.0, 1.0, told) == ("busy", "shared")


def test_a_power_limit_below_the_default_is_marked_if_it_held_the_gpu_back() -> None:
    """A lowered limit slows a GPU; at the default one, a busy GPU is usually capped."""
    lowered = replace(COOL, power_limit_watts=450.0, reasons=("power cap",))
    words = "GPU 3: held back by a power limit of 450 W; the default is 700 W"
    use = GpuUse(("GPU-x",), 10.0, {"power": 9.0}, (lowered,))
    assert [one.sentence for one in record(use=use).findings()] == [words]
    at_default = replace(use, states=(replace(COOL, reasons=("power cap",)),))
    assert record(use=at_default).findings() == []
    free = replace(lowered, reasons=())
    far_from_it = replace(use, throttled_seconds={"power": 0.0}, states=(free,))
    assert record(use=far_from_it).findings() == []


@pytest.mark.parametrize(("seconds", "is_marked"), [(0.05, False), (0.3, True)])
def test_seconds_held_back_by_heat_are_counted_over_the_timed_steps(
    monkeypatch: pytest.MonkeyPatch,
    cuda: Callable[[FakeNvml], list[torch.device]],
    seconds: float,
    is_marked: bool,
) -> None:
    """Only the two timed stretches of 5 s count; the counters run since the driver's start."""
    host = h100_node()
    thermal, power = pynvml.NVML_PERF_POLICY_THERMAL, pynvml.NVML_PERF_POLICY_POWER
    clock = iter([0.0, 5.0, 100.0, 105.0])
    for device in host.gpus:
        device.throttled_nanoseconds = {thermal: 77 * SECOND, power: 5 * SECOND}
    gpus = RankGpus(cuda(host)[:1])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    for _ in range(2):
        gpus.start()
        host.gpus[0].throttled_nanoseconds[thermal] += int(seconds / 2 * SECOND)
        gpus.stop()
        host.gpus[0].throttled_nanoseconds[thermal] += 9 * SECOND  # between the stretches
    use = gpus.use()
    assert use is not None
    assert (use.counted_seconds, use.throttled_seconds) == (
        10.0,
        {"power": 0.0, "temperature": pytest.approx(seconds)},
    )
    words = "rank 0: held back by heat for 0.3 of 10.0 timed seconds"
    findings = [one.sentence for one in record(use=use).findings()]
    assert findings == ([words] if is_marked else [])


def test_energy_is_that_of_all_devices_of_a_rank(
    cuda: Callable[[FakeNvml], list[torch.device]],
) -> None:
    """DataParallel drives eight GPUs in one process, and all of them count. A slice's energy is
    unknown, because NVML's counter covers the whole GPU."""
    host = h100_node()
    energy = Energy.of(RankGpus(cuda(host)), first_of_node=True)
    energy.start()
    for number, device in enumerate(host.gpus):
        device.millijoules += 1000 * (number + 1)
    energy.stop()
    assert energy.joules == 36.0
    host = a100_in_slices()
    devices = cuda(host)
    assert RankGpus(devices[:1]).joules() is None
    assert RankGpus(devices[1:]).joules() == {host.gpus[1].uuid: (0.0, 0.0)}


@pytest.mark.parametrize(
    ("sizes", "process", "context"),
    [([11, 13, 12], 13, 3), ([11], 11, 1), ([None], None, None), ([], None, None)],
)
def test_memory_outside_the_allocator_is_separate(
    cuda: Callable[[FakeNvml], list[torch.device]],
    sizes: list[int | None],
    process: int | None,
    context: int | None,
) -> None:
    """NVML's GiB of this process on its fullest GPU include the context and NCCL's buffers. WSL
    hides them, and in a container NVML may give the host's process ids."""
    host = h100_node()
    for device, size in zip(host.gpus, sizes, strict=False):
        device.processes = [(1, GIB), (os.getpid(), size and size * GIB)]
    use = RankGpus(cuda(host)[: len(sizes) or 1]).use()
    assert use is not None
    found = (use.process_bytes, use.context_bytes)
    assert found == (process and process * GIB, context and context * GIB)


def test_a_rank_on_the_cpu_asks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    host = install(monkeypatch, h100_node())
    gpus = RankGpus([torch.device("cpu")])
    gpus.start()
    gpus.stop()
    assert (gpus.use(), host.started) == (None, 0)


def test_peaks_and_limit_are_those_of_all_devices(
    monkeypatch: pytest.MonkeyPatch,
    cuda: Callable[[FakeNvml], list[torch.device]],
) -> None:
    """Peaks are the fullest GPU's, the limit holds on each, and host memory has a peak too."""
    devices = cuda(h100_node())
    limits: dict[int, float] = {}
    peaks = {"max_memory_allocated": 5, "max_memory_reserved": 7, "memory_allocated": 3}
    for name, size in peaks.items():
        monkeypatch.setattr(torch.cuda, name, lambda one, size=size: size * (one.index + 1))
    reset: list[int] = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda one: reset.append(one.index))
    monkeypatch.setattr(
        torch.cuda,
        "set_per_process_memory_fraction",
        lambda share, one: limits.update({one.index: share}),
    )
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    meter = MemoryMeter(devices[0], 20 * GIB, devices)
    assert limits == dict.fromkeys(range(8), 0.25)
    meter.reset()
    assert reset == [*range(8)]
    kept = bytearray(os.urandom(1)) * (64 * 2**20)
    peak = meter.peak()
    assert (peak.allocated, peak.reserved, meter.in_use()) == (40, 56, 24)
    assert peak.by_device == (5, 10, 15, 20, 25, 30, 35, 40)
    if meter.usable:
        assert peak.host is not None
        assert 0.95 * len(kept) < peak.host < 2 * len(kept)
    with meter.unlimited():
        assert limits == dict.fromkeys(range(8), 1)
    assert limits == dict.fromkeys(range(8), 0.25)
