"""Versions, settings and links of a run's GPUs, and whether this torch can use them."""

from __future__ import annotations

import json
from datetime import datetime, timezone

import pynvml
import pytest
import torch

from harness.analysis.selection import Hardware
from harness.host.environment import cudnn_version, device_type, environment, unused_gpus
from harness.host.gpu_inventory import gpu_facts, gpu_topology
from harness.nodes.agent import node_facts
from harness.record.run_record import RunRecord
from tests.gpu.fake_nvml import FakeNvml, a100_in_slices, h100_node, install, rtx_4090

ARCHITECTURES = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]
"""Architectures of torch 2.13 for CUDA 13.0."""

TOO_OLD = (
    "driver 570.86.15 supports CUDA up to 12.8, torch 2.13.0+cu130 needs CUDA 13.0;"
    " install driver 580 or newer, or run `PARALLELISM_BENCH_TORCH_CUDA=12 make setup`"
)


@pytest.fixture
def cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes torch look like a build for CUDA 13.0."""
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
    code = " ".join(ARCHITECTURES)
    monkeypatch.setattr(torch._C, "_cuda_getArchFlags", lambda: code, raising=False)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91501)


def hardware_of(row: dict[str, object]) -> Hardware:
    """Returns the hardware of a run with this row, adding the columns that identify it."""
    texts = dict.fromkeys(("run_id", "matrix", "plan"), "")
    started = datetime(2026, 1, 1, tzinfo=timezone.utc)
    return Hardware.of(
        RunRecord.from_row({**row, **texts, "schema_version": 12, "started_at": started})
    )


def run_row(monkeypatch: pytest.MonkeyPatch, host: FakeNvml) -> dict[str, object]:
    install(monkeypatch, host)
    row = environment()
    assert set(row) <= {column.name for column in RunRecord.columns()}
    return {column.name: None for column in RunRecord.columns()} | row


@pytest.mark.usefixtures("cuda_build")
@pytest.mark.parametrize(
    ("driver", "cuda", "reason"),
    [
        ("580.95.05", 13000, None),
        ("590.10", 13010, None),
        ("570.86.15", 12080, TOO_OLD),
    ],
)
def test_an_old_driver_means_cpu_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
    driver: str,
    cuda: int,
    reason: str | None,
) -> None:
    """With an old driver, every rank on device `cuda` would fail."""
    host = h100_node()
    host.driver, host.cuda = driver, cuda
    install(monkeypatch, host)
    assert unused_gpus() == reason
    assert device_type() == ("cpu" if reason else "cuda")


@pytest.mark.usefixtures("cuda_build")
@pytest.mark.parametrize(
    ("capability", "built", "usable"),
    [
        ((7, 0), ARCHITECTURES, False),
        ((7, 5), ARCHITECTURES, True),
        ((8, 9), ARCHITECTURES, True),
        ((9, 0), ["sm_90a"], True),
        ((12, 1), ["sm_120a"], False),
        ((12, 1), ["sm_120", "compute_120"], True),
        ((13, 0), ["sm_120"], False),
        ((13, 0), ["sm_80", "compute_120"], True),
        ((8, 0), ["sm_86"], False),
    ],
)
def test_a_gpu_that_torch_has_no_code_for_means_cpu(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    built: list[str],
    usable: bool,
) -> None:
    """For example, torch 2.13 for CUDA 13 has no code for Volta (7.0)."""
    host = rtx_4090()
    host.gpus[0].capability, host.gpus[0].name = capability, "Tesla V100"
    install(monkeypatch, host)
    monkeypatch.setattr(torch._C, "_cuda_getArchFlags", lambda: " ".join(built), raising=False)
    assert device_type() == ("cuda" if usable else "cpu")
    words = ".".join(map(str, capability))
    older = capability == (7, 0)
    remedy = "`PARALLELISM_BENCH_TORCH_CUDA=12 make setup`" if older else "install a torch that has"
    reason = (
        f"torch 2.13.0+cu130 has no code for compute capability {words} of GPU 0 (Tesla V100);"
        f" {'run ' if older else ''}{remedy}, or hide this GPU with CUDA_VISIBLE_DEVICES"
    )
    assert unused_gpus() == (None if usable else reason)


def test_a_torch_without_cuda_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, rtx_4090())
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    words = "torch 2.13.0+cpu is built without CUDA; install a CUDA build to use"
    assert unused_gpus() == f"{words} NVIDIA GeForce RTX 4090"
    assert device_type() == "cpu"


def test_a_driver_that_does_not_answer_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, after an update of the driver without a restart."""

    def start() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)

    monkeypatch.setattr(install(monkeypatch, rtx_4090()), "nvmlInit", start)
    reason = unused_gpus() or ""
    assert "version mismatch" in reason
    assert "nvidia-smi" in reason
    assert device_type() == "cpu"


def test_without_gpus_there_is_nothing_to_report(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeNvml([], no_driver=True))
    assert (unused_gpus(), device_type(), gpu_facts(), gpu_topology()) == (None, "cpu", [], [])


@pytest.mark.usefixtures("cuda_build")
def test_a_runs_row_names_versions_settings_and_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One-node runs record them too; NVML is closed again, and CUDA never started."""
    host = h100_node()
    host.gpus[7].enforced_limit_milliwatts = 500_000
    row = run_row(monkeypatch, host)
    versions = ("driver_version", "driver_cuda_version", "torch_cuda_version", "nccl_version")
    assert [row[name] for name in versions] == ["580.95.05", "13.0", "13.0", "2.28.9"]
    assert (row["cudnn_version"], row["gpus_unused"]) == ("9.15.1", None)
    facts = json.loads(str(row["gpu_facts"]))
    assert [one["power_limit_watts"] for one in facts] == 7 * [700.0] + [500.0]
    last = facts[7]
    assert (last["ecc"], last["persistence"], last["mig"]) == (True, True, False)
    assert (last["numa_node"], last["capability"], last["default_power_limit_watts"]) == (
        1,
        [9, 0],
        700.0,
    )
    pairs = json.loads(str(row["gpu_topology"]))
    assert pairs[0][0] == "self"
    kinds = {pairs[a][b] for a in range(8) for b in range(8) if a != b}
    assert kinds == {"18 x NVLink 4.0 through a switch"}
    assert not torch.cuda.is_initialized()
    assert host.started == 0


@pytest.mark.parametrize(("number", "words"), [(91501, "9.15.1"), (8907, "8.9.7"), (None, None)])
def test_cudnns_number_is_its_version(
    monkeypatch: pytest.MonkeyPatch,
    number: int | None,
    words: str | None,
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: number)
    assert cudnn_version() == words


def test_unused_gpus_are_recorded_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    row = run_row(monkeypatch, rtx_4090())
    assert row["gpus"] == []
    assert "CUDA" in str(row["gpus_unused"])
    (facts,) = json.loads(str(row["gpu_facts"]))
    settings = [facts[name] for name in ("ecc", "persistence", "power_limit_watts")]
    assert settings == [None, False, 450.0]


def test_direct_links_count_by_pair_and_the_rest_is_the_bus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four NVLinks join GPUs 0 and 1; GPUs 2 and 3 have none."""
    host = h100_node()
    del host.gpus[4:]
    host.gpus[3].numa_node = 1
    for device in host.gpus:
        device.links, device.far_end = [], pynvml.NVML_NVLINK_DEVICE_TYPE_GPU
        device.link_version = pynvml.NVML_NVLINK_VERSION_3_0
    host.gpus[0].links, host.gpus[1].links = 4 * [host.gpus[1].bus_id], 4 * [host.gpus[0].bus_id]
    install(monkeypatch, host)
    assert gpu_topology() == [
        ["self", "4 x NVLink 3.0", "NUMA node", "system"],
        ["4 x NVLink 3.0", "self", "NUMA node", "system"],
        ["NUMA node", "NUMA node", "self", "system"],
        ["system", "system", "system", "self"],
    ]
    assert node_facts(0, "n0")["gpu_topology"] == gpu_topology()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,0")
    assert gpu_topology() == [["self", "system"], ["system", "self"]]


@pytest.mark.parametrize("version", range(1, 9))
def test_nvlink_versions_need_no_names_in_pynvml(
    monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    """Before 13.610, nvidia-ml-py lacks NVML_NVLINK_VERSION_6_0; before 12.570, all versions."""
    host = h100_node()
    names = [name for name in vars(pynvml) if name.startswith("NVML_NVLINK_VERSION_")]
    name = next((name for name in names if getattr(pynvml, name) == version), "")
    for device in host.gpus:
        device.link_version = version
    for lacking in names:
        monkeypatch.delattr(pynvml, lacking)
    install(monkeypatch, host)
    expected = name.removeprefix("NVML_NVLINK_VERSION_").replace("_", ".")
    assert f"NVLink {expected}" in gpu_topology()[0][1]


def test_a_slice_has_the_settings_of_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, a100_in_slices(), "MIG-aa22")
    (facts,) = gpu_facts()
    assert (facts.mig, facts.ecc, facts.power_limit_watts) == (True, True, 400.0)
    assert gpu_topology() == [["self"]]


@pytest.mark.usefixtures("cuda_build")
def test_other_power_limits_and_other_error_correction_are_other_hardware(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both may change a GPU's speed, but not that of CPU cells."""
    plain = hardware_of(run_row(monkeypatch, h100_node()))
    capped, uncorrected = h100_node(), h100_node()
    for device in capped.gpus:
        device.enforced_limit_milliwatts = 500_000
    uncorrected.gpus[3].ecc = False
    for host, words in (
        (capped, "different GPU power limit: 8 x 700 W, then 8 x 500 W"),
        (uncorrected, "different error correction of GPU memory: 8 x on, then 7 x on, 1 x off"),
    ):
        other = hardware_of(run_row(monkeypatch, host))
        assert plain.difference(other, "cuda") == words
        assert plain.difference(other, "cpu") == ""
    old = hardware_of(run_row(monkeypatch, h100_node()) | {"gpu_facts": None})
    assert plain.difference(old, "cuda") == old.difference(plain, "cuda") == ""
    sliced = hardware_of(run_row(monkeypatch, a100_in_slices()))
    whole = a100_in_slices()
    whole.gpus[0].slices = None
    words = "different GPUs: 1 x NVIDIA A100-SXM4-80GB MIG 3g.40gb, then 2 x NVIDIA A100"
    assert words in sliced.difference(hardware_of(run_row(monkeypatch, whole)), "cuda")
