"""Facts about GPUs from NVML, on hosts described by a stand-in. CUDA is never started."""

from __future__ import annotations

import os

import pynvml
import pytest
import torch

from harness.host.environment import gpus
from harness.host.gpu_inventory import Gpu, _places, nearby_cores, visible_gpus
from tests.gpu.fake_nvml import FakeNvml, a100_in_slices, h100_node, install, rtx_4090


def test_every_function_of_the_stand_in_is_one_of_nvml() -> None:
    functions = [name for name in vars(FakeNvml) if name.startswith("nvml")]
    assert len(functions) > 10
    assert [name for name in functions if not callable(getattr(pynvml, name, None))] == []


@pytest.mark.parametrize(
    ("variable", "numbers"),
    [
        (None, [0, 1, 2, 3, 4, 5, 6, 7]),
        ("1,0", [1, 0]),
        (" 2 , 3", [2, 3]),
        ("0,1,9,2", [0, 1]),
        ("0,-1,1", [0]),
        ("1,1", []),
        ("3rd", [3]),
        ("", []),
        ("-1", []),
        ("-", []),
        ("NoDevFiles", []),
        ("GPU-a0,GPU-b7000000-0000-0000-0000-000000000007", [0, 7]),
        ("GPU-a", []),
        ("GPU-a1,GPU-a1000000", []),
        ("GPU-a1,GPU-c,GPU-a2", [1]),
        ("GPU-a1,2", [1]),
        ("1,GPU-a2", [1]),
        ("MIG-aa11", []),
    ],
)
def test_visible_devices_are_those_that_cuda_shows(
    monkeypatch: pytest.MonkeyPatch,
    variable: str | None,
    numbers: list[int],
) -> None:
    """NoDevFiles, shortened UUIDs and numbers out of range raise no error."""
    host = install(monkeypatch, h100_node(), variable)
    assert [device.index for device in visible_gpus()] == numbers
    assert gpus() == tuple((host.gpus[i].name, host.gpus[i].memory_bytes) for i in numbers)
    assert host.started == 0


@pytest.mark.parametrize(
    "variable",
    [
        "1,0",
        "0,-1",
        "2,2",
        "3x,4",
        " 5",
        "x",
        "GPU-a0",
        "GPU-a0,GPU-b7",
        "GPU-a",
        "GPU-a0,1",
        "0,GPU-b4",
        "",
    ],
)
def test_the_list_is_read_as_torch_reads_it(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    uuids = [device.uuid for device in h100_node().gpus]
    parsed = torch.cuda._parse_visible_devices()
    if parsed and isinstance(parsed[0], str):
        parsed = torch.cuda._transform_uuid_to_ordinals(parsed, uuids)  # type: ignore[arg-type]
    assert _places(variable, uuids) == parsed


@pytest.mark.parametrize(
    ("variable", "uuids"),
    [
        (None, ["MIG-aa110000"]),
        ("0,1", ["MIG-aa110000"]),
        ("1", ["GPU-a2000000"]),
        ("MIG-aa220000-0000-0000-0000-000000000000", ["MIG-aa220000"]),
        ("MIG-aa22", ["MIG-aa220000"]),
        ("MIG-aa", []),
        ("MIG-aa2,MIG-aa1", ["MIG-aa220000"]),
    ],
)
def test_a_process_sees_one_mig_slice(
    monkeypatch: pytest.MonkeyPatch,
    variable: str | None,
    uuids: list[str],
) -> None:
    """UUIDs of slices may be shortened; CUDA shows one slice and no other GPU."""
    install(monkeypatch, a100_in_slices(), variable)
    assert [device.uuid[:12] for device in visible_gpus()] == uuids


def test_a_slice_has_its_own_memory_and_its_gpus_place(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, a100_in_slices(), "MIG-aa22")
    (device,) = visible_gpus()
    name, bus = "NVIDIA A100-SXM4-80GB MIG 1g.10gb", "00000000:01:00.0"
    cores = tuple(range(8))
    assert device == Gpu(0, device.uuid, name, 10 * 2**30, (8, 0), bus, 0, cores, mig=True)


def test_a_gpu_in_mig_mode_without_slices_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    host = a100_in_slices()
    host.gpus[0].slices = []
    install(monkeypatch, host)
    assert [device.index for device in visible_gpus()] == [1]


def test_cores_are_those_near_the_visible_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs 4 to 7 are on the second socket, whose cores exceed the mask's first 64-bit word."""
    install(monkeypatch, h100_node(), "6,0")
    assert nearby_cores(0) == tuple(range(56, 112))
    assert nearby_cores(1) == tuple(range(56))
    assert nearby_cores(2) == ()
    assert [device.numa_node for device in visible_gpus()] == [1, 0]


def test_what_a_gpu_does_not_tell_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    host = rtx_4090()
    host.gpus[0].lacks |= {
        "nvmlDeviceGetCpuAffinity",
        "nvmlDeviceGetMemoryAffinity",
        "nvmlDeviceGetCudaComputeCapability",
    }
    install(monkeypatch, host)
    (device,) = visible_gpus()
    assert (device.cores, device.numa_node, device.capability, device.mig) == (
        (),
        None,
        None,
        False,
    )
    assert nearby_cores(0) == ()


def test_without_a_driver_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeNvml([], no_driver=True))
    assert visible_gpus() == ()
    assert gpus() == ()


def test_reading_nvml_does_not_start_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Initialising CUDA in the parent makes every forked rank fail."""
    install(monkeypatch, h100_node())
    visible_gpus()
    assert not torch.cuda.is_initialized()
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
