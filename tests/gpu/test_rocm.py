"""Device `cuda` under ROCm, with a stand-in for torch's build; never run on AMD GPUs."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench.checks import gpu_troubles
from bench.matrix import Host
from harness.cell.cell import Cell
from harness.host import amd, gpu_inventory, nvml
from harness.host.environment import device_type, environment, unused_gpus
from harness.host.gpu_inventory import gpu_topology, visible_gpus
from harness.host.gpu_models import gpu_model
from harness.host.gpu_state import GpuLook
from harness.measure.resource_use import RankGpus
from harness.workloads.low_precision import has_float8
from tests.gpu import fake_nvml

GPU = torch.device("cuda", 0)
BUSES = ("0000:0c:00.0", "0000:22:00.0")


@pytest.fixture
def mi300x(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes torch look like a ROCm build with two GPUs."""
    fake_nvml.forget(monkeypatch)
    monkeypatch.setattr(torch.version, "hip", "7.0.51831")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 26, 6))
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    code = "gfx90a gfx942"
    monkeypatch.setattr(torch._C, "_cuda_getArchFlags", lambda: code, raising=False)
    monkeypatch.setattr(amd, "amd_gpus", lambda: {"gfx942": 2})
    gpus = tuple(
        amd.TorchGpu("AMD Instinct MI300X", 196592 * 2**20, f"GPU-{number}", bus, "gfx942")
        for number, bus in enumerate(BUSES)
    )
    monkeypatch.setattr(gpu_inventory, "torch_gpus", lambda: gpus)


def node(folder: Path, number: int, simd: int, version: int) -> None:
    place = folder / "class/kfd/kfd/topology/nodes" / str(number)
    place.mkdir(parents=True)
    (place / "properties").write_text(f"simd_count {simd}\ngfx_target_version {version}\n")


def test_gpus_are_described_by_the_kernel_and_by_torch(tmp_path: Path) -> None:
    for number, facts in enumerate([(0, 0), (1216, 90402), (1216, 90402), (440, 90010)]):
        node(tmp_path, number, *facts)
    assert amd.amd_gpus(tmp_path) == {"gfx942": 2, "gfx90a": 1}
    assert amd.amd_gpus(tmp_path / "nothing") == {}
    places = {"pci_domain_id": 0, "pci_bus_id": 0x0C, "pci_device_id": 0}
    named = {"name": "AMD Instinct MI300X", "gcnArchName": "gfx942:sramecc+:xnack-"}
    gpu = amd.described(SimpleNamespace(total_memory=1, uuid="a", **places, **named))
    assert (gpu.pci_bus_id, gpu.architecture, gpu.uuid) == (BUSES[0], "gfx942", "GPU-a")


def test_the_build_is_read_without_importing_torch(tmp_path: Path) -> None:
    (tmp_path / "__init__.py").write_text("raise SystemExit('torch was imported')")
    (tmp_path / "version.py").write_text("hip = '7.0.1'\n")
    assert amd._version_facts(str(tmp_path))["hip"] == "7.0.1"
    assert amd.rocm_version() is None, "these tests' torch is not built for ROCm"


@pytest.mark.usefixtures("mi300x")
def test_gpus_are_found_and_used_without_asking_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml.h100_node())
    assert nvml.Nvml.start() is None
    assert [(gpu.index, gpu.pci_bus_id) for gpu in visible_gpus()] == list(enumerate(BUSES))
    assert (device_type(), unused_gpus()) == ("cuda", None)
    host = Host.here()
    model = gpu_model(host.name)
    assert model is not None
    assert (host.device, host.num_devices, host.memory_bytes) == ("cuda", 2, model.memory_bytes)
    assert gpu_topology() == [["self", "unknown"], ["unknown", "self"]]
    row = environment()
    assert (row["torch_cuda_version"], row["nccl_version"]) == ("HIP 7.0.51831", "2.26.6")
    assert row["driver_version"] is row["cudnn_version"] is row["gpus_unused"] is None


@pytest.mark.usefixtures("mi300x")
def test_what_only_nvml_tells_is_unknown_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert GpuLook().states(2) == ()
    properties = SimpleNamespace(uuid="a")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    gpus = RankGpus([GPU])
    use = gpus.use()
    assert use is not None
    assert (gpus.joules(), use.states, use.process_bytes) == (None, (), None)
    assert use.unanswered == "NVML reports no AMD GPUs"


@pytest.mark.usefixtures("mi300x")
def test_float8_is_emulated_if_capabilities_mean_something_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    assert not has_float8(GPU)
    monkeypatch.setattr(torch.version, "hip", None)
    assert has_float8(GPU)


@pytest.mark.parametrize("rocm", [None, "7.0.1"])
def test_amd_gpus_that_torch_does_not_show_are_named(
    monkeypatch: pytest.MonkeyPatch, rocm: str | None
) -> None:
    fake_nvml.install(monkeypatch, fake_nvml.FakeNvml([], no_driver=True))
    monkeypatch.setattr(amd, "amd_gpus", lambda: {"gfx942": 8})
    monkeypatch.setattr(torch.version, "hip", rocm)
    monkeypatch.setattr(gpu_inventory, "torch_gpus", tuple)
    reason = unused_gpus() or ""
    assert "8 x gfx942" in reason
    assert ("/dev/kfd" in reason) == (rocm is not None)
    assert device_type() == "cpu"
    (trouble,) = gpu_troubles()
    assert trouble.what == reason


@pytest.mark.usefixtures("mi300x")
def test_a_gpu_that_this_build_has_no_code_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs that are hidden from torch do not matter."""
    monkeypatch.setattr(amd, "amd_gpus", lambda: {"gfx942": 2, "gfx950": 1})
    assert (device_type(), unused_gpus()) == ("cuda", None)
    other = amd.TorchGpu("AMD Instinct MI355X", 1, "GPU-2", BUSES[0], "gfx950")
    monkeypatch.setattr(gpu_inventory, "torch_gpus", lambda: (other,))
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "2")
    assert "gfx950" in (unused_gpus() or "")
    assert device_type() == "cpu"


@pytest.mark.parametrize("kind", ["mps", "xpu"])
def test_other_devices_are_refused_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    with pytest.raises(ValueError, match="not supported") as caught:
        Cell(strategy="single", device=kind)
    (error,) = caught.value.errors()
    assert error["type"] == "unsupported_device"
    fake_nvml.install(monkeypatch, fake_nvml.FakeNvml([], no_driver=True))
    monkeypatch.setattr(amd, "amd_gpus", dict)
    assert unused_gpus() is None
    if kind == "mps":
        monkeypatch.setattr(sys, "platform", "darwin")
    else:
        monkeypatch.setattr(torch.version, "xpu", "20250302")
    assert str(error["msg"]) in (unused_gpus() or "")
