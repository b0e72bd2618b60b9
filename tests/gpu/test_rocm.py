"""Device `cuda` under ROCm, with stand-ins for torch's build and amd-smi; never run on AMD GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench.checks import gpu_troubles
from bench.host import Host
from harness.host import amd, gpu_inventory, nvml
from harness.host.amd import AmdSmi, NoAmdSmi, described, rocm_version, torch_gpus
from harness.host.cuda import HIDE_GPUS
from harness.host.environment import device_type, environment, unused_gpus
from harness.host.gpu_inventory import gpu_topology, visible_gpus
from harness.host.gpu_models import gpu_model
from harness.host.gpu_state import GpuLook
from harness.measure import resource_use
from harness.measure.resource_use import RankGpus, rank_gpus
from harness.record.run_record import RunRecord
from harness.spec.cell import Cell
from harness.workloads.low_precision import has_float8
from tests.gpu import fake_nvml
from tests.gpu.fake_amdsmi import BUSES, FakeAmdSmi, install

GPU = torch.device("cuda", 0)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeAmdSmi:
    fake = FakeAmdSmi()
    install(monkeypatch, fake)
    return fake


def rank(monkeypatch: pytest.MonkeyPatch) -> RankGpus:
    domain, bus, device = 0, 0x0C, 0
    properties = SimpleNamespace(
        name="AMD Instinct MI300X",
        total_memory=1,
        uuid="a",
        pci_domain_id=domain,
        pci_bus_id=bus,
        pci_device_id=device,
        gcnArchName="gfx942:sramecc+:xnack-",
    )
    assert described(properties).pci_bus_id == BUSES[0]
    assert described(properties).architecture == "gfx942"
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 1000)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70, 100))
    return rank_gpus([GPU])


def test_the_build_is_read_without_importing_torch(tmp_path: Path) -> None:
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('torch was imported')")
    (package / "version.py").write_text("hip = '7.0.1'\n")
    ask = "from harness.host.amd import rocm_version; print(rocm_version())"
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    done = subprocess.run(
        [sys.executable, "-c", ask],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert (done.stdout.strip(), done.stderr) == ("7.0.1", "")
    assert rocm_version() is None, "these tests' torch is not built for ROCm"


def test_gpus_are_found_and_used(library: FakeAmdSmi) -> None:
    assert [(gpu.index, gpu.pci_bus_id) for gpu in visible_gpus()] == list(enumerate(BUSES))
    assert (device_type(), unused_gpus()) == ("cuda", None)
    host = Host.here()
    assert (host.device, host.num_devices) == ("cuda", 2)
    model = gpu_model(host.name)
    assert model is not None
    assert host.memory_bytes == model.memory_bytes
    assert gpu_topology() == [["self", "unknown"], ["unknown", "self"]]


def test_nvml_is_not_asked(library: FakeAmdSmi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml.h100_node())
    assert nvml.Nvml.start() is None
    assert {gpu.name for gpu in visible_gpus()} == {"AMD Instinct MI300X"}


def test_the_environment_says_rocm(library: FakeAmdSmi) -> None:
    row = environment()
    assert set(row) <= {column.name for column in RunRecord.columns()}
    assert row["torch_cuda_version"] == "HIP 7.0.51831"
    assert row["driver_version"] == "6.14.14"
    assert row["cudnn_version"] is None
    assert (row["nccl_version"], row["gpus_unused"]) == ("2.26.6", None)


def test_states_come_from_amd_smi(library: FakeAmdSmi) -> None:
    library.processes = {7: 5 * 2**20}
    library.lacking = {"amdsmi_get_gpu_total_ecc_count"}
    state, _ = GpuLook().states(2)
    assert (state.sm_mhz, state.sm_max_mhz, state.memory_mhz) == (132, 2100, None)
    assert (state.temperature_celsius, state.power_watts) == (41, 140.0)
    assert (state.power_limit_watts, state.default_power_limit_watts) == (750.0, 750.0)
    assert state.used_bytes == 283 * 2**20
    assert state.corrected_errors is None
    assert [(one.pid, one.memory_bytes) for one in state.processes or ()] == [(7, 5 * 2**20)]


def test_a_rank_reads_energy_and_memory(
    library: FakeAmdSmi, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = rank(monkeypatch)
    library.microjoules, library.processes = 153e6, {os.getpid(): 1500}
    assert gpus.joules() == {"GPU-a": (pytest.approx(153.0), 0.0)}
    gpus.start()
    gpus.stop()
    use = gpus.use()
    assert use is not None
    assert (use.process_bytes, use.context_bytes, use.unanswered) == (1500, 500, "")
    assert use.states[0].sm_mhz == 132


def test_without_amd_smi_torch_reads_memory_and_the_reason_is_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, None)
    gpus = rank(monkeypatch)
    assert gpus.joules() is None
    gpus.start()
    gpus.stop()
    use = gpus.use()
    assert use is not None
    assert (use.states[0].used_bytes, use.process_bytes) == (30, None)
    assert "amdsmi" in use.unanswered
    assert environment()["driver_version"] is None


def test_a_gpu_that_amd_smi_lacks_is_named(
    library: FakeAmdSmi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "amdsmi_get_processor_handles", lambda: [BUSES[1]])
    use = rank(monkeypatch).use()
    assert use is not None
    assert BUSES[0] in use.unanswered


@pytest.mark.parametrize("error", [OSError("libamd_smi.so"), KeyError("ROCM_PATH")])
def test_a_library_that_cannot_load_is_a_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception
) -> None:
    (tmp_path / "amdsmi.py").write_text(f"raise {error!r}")
    monkeypatch.delitem(sys.modules, "amdsmi", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(NoAmdSmi, match=str(error.args[0])):
        AmdSmi.start()


def test_doctor_says_what_is_unproven(library: FakeAmdSmi, monkeypatch: pytest.MonkeyPatch) -> None:
    library.power_cap = 500_000_000
    monkeypatch.setattr("bench.checks._software", list)
    troubles = gpu_troubles()
    assert [trouble.subject for trouble in troubles[:3]] == ["GPU 0", "GPU 1", "ROCm"]
    assert "nvidia" not in " ".join(trouble.fix for trouble in troubles)
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    assert [one.subject for one in gpu_troubles()][:2] == ["ROCm", "ROCm"]


def test_float8_is_emulated_if_capabilities_mean_something_else(
    library: FakeAmdSmi, monkeypatch: pytest.MonkeyPatch
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
    if rocm:  # this torch finds none, but the search takes seconds
        found = torch_gpus()
        assert found == ()
        monkeypatch.setattr(gpu_inventory, "torch_gpus", lambda: found)
    reason = unused_gpus() or ""
    assert "8 x gfx942" in reason
    assert ("/dev/kfd" in reason) == (rocm is not None)
    assert device_type() == "cpu"
    assert environment()["gpus_unused"] == reason
    (trouble,) = gpu_troubles()
    assert trouble.what == reason


def test_a_gpu_that_this_build_has_no_code_for(
    library: FakeAmdSmi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPUs that are hidden from torch do not matter."""
    monkeypatch.setattr(amd, "amd_gpus", lambda: {"gfx942": 2, "gfx950": 1})
    assert (device_type(), unused_gpus()) == ("cuda", None)
    other = amd.TorchGpu("AMD Instinct MI355X", 1, "GPU-2", BUSES[0], "gfx950")
    monkeypatch.setattr(gpu_inventory, "torch_gpus", lambda: (other,))
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "2")
    assert "gfx950" in (unused_gpus() or "")
    assert device_type() == "cpu"


def test_hidden_gpus_are_hidden_from_hip_too() -> None:
    """HIP treats an empty variable as unset, and a negative index as the end of its list."""
    assert HIDE_GPUS["HIP_VISIBLE_DEVICES"] == "-1"


def test_a_process_without_memory_on_a_gpu_does_not_use_it(
    library: FakeAmdSmi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.checks._software", list)
    library.processes = {7: 0}
    assert not [one for one in gpu_troubles() if "other processes" in one.what]
    library.processes = {7: 2**30}
    shared = [one.subject for one in gpu_troubles() if "other processes" in one.what]
    assert shared == ["GPU 0", "GPU 1"]


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


def test_a_cuda_build_uses_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml.install(monkeypatch, fake_nvml.h100_node())
    monkeypatch.setattr(resource_use.RankGpus, "_start", lambda self: None)
    assert type(rank_gpus([GPU])) is RankGpus
    assert nvml.Nvml.start() is not None
