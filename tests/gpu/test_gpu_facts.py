"""GPUs from NVML on hosts described by a stand-in, and the table of GPU models."""

from __future__ import annotations

import json
from datetime import datetime, timezone

import pynvml
import pytest
import torch

from harness.analysis.selection import Hardware
from harness.host.environment import cudnn_version, device_type, environment, gpus, unused_gpus
from harness.host.gpu_inventory import (
    Gpu,
    _indices,
    gpu_facts,
    gpu_topology,
    nearby_cores,
    visible_gpus,
)
from harness.host.gpu_models import gpu_model, gpu_models, peak_flops_per_second
from harness.nodes.agent import node_facts
from harness.record.run_record import RunRecord
from tests.gpu.fake_nvml import (
    ANSWERS,
    FakeNvml,
    a100_in_slices,
    h100_node,
    install,
    rtx_4090,
)


def test_every_function_of_the_stand_in_is_one_of_nvml() -> None:
    functions = [name for name in vars(FakeNvml) if name.startswith("nvml")] + list(ANSWERS)
    assert len(functions) > 20
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
    monkeypatch: pytest.MonkeyPatch, variable: str | None, numbers: list[int]
) -> None:
    """NoDevFiles, shortened UUIDs and numbers out of range raise no error; CUDA never starts."""
    host = install(monkeypatch, h100_node(), variable)
    assert [device.index for device in visible_gpus()] == numbers
    assert gpus() == tuple((host.gpus[i].name, host.gpus[i].memory_bytes) for i in numbers)
    assert (host.started, torch.cuda.is_initialized()) == (0, False)


@pytest.mark.parametrize(
    "variable", ["1,0", "0,-1", "2,2", "3x,4", " 5", "x", "GPU-a0,GPU-b7", "GPU-a", "0,GPU-b4", ""]
)
def test_the_list_is_read_as_torch_reads_it(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    uuids = [device.uuid for device in h100_node().gpus]
    parsed = torch.cuda._parse_visible_devices()
    if parsed and isinstance(parsed[0], str):
        parsed = torch.cuda._transform_uuid_to_ordinals(parsed, uuids)  # type: ignore[arg-type]
    assert _indices(variable, uuids) == parsed


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
    monkeypatch: pytest.MonkeyPatch, variable: str | None, uuids: list[str]
) -> None:
    """UUIDs of slices may be shortened; CUDA shows one slice and no other GPU."""
    install(monkeypatch, a100_in_slices(), variable)
    assert [device.uuid[:12] for device in visible_gpus()] == uuids


def test_a_slice_has_its_own_memory_and_its_gpus_place_and_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, a100_in_slices(), "MIG-aa22")
    (device,) = visible_gpus()
    name, bus = "NVIDIA A100-SXM4-80GB MIG 1g.10gb", "00000000:01:00.0"
    cores = tuple(range(8))
    assert device == Gpu(0, device.uuid, name, 10 * 2**30, (8, 0), bus, 0, cores, mig=True)
    (facts,) = gpu_facts()
    assert (facts.mig, facts.ecc, facts.power_limit_watts) == (True, True, 400.0)
    assert gpu_topology() == [["self"]]
    host = a100_in_slices()
    host.gpus[0].slices = []
    install(monkeypatch, host)
    assert [device.index for device in visible_gpus()] == [1], "without slices, it cannot be used"


def test_cores_are_those_near_the_visible_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs 4 to 7 are on the second socket, whose cores exceed the mask's first 64-bit word."""
    install(monkeypatch, h100_node(), "6,0")
    near = [nearby_cores(number) for number in range(3)]
    assert near == [tuple(range(56, 112)), tuple(range(56)), ()]
    assert [device.numa_node for device in visible_gpus()] == [1, 0]


def test_what_a_gpu_does_not_tell_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    host = rtx_4090()
    asked = ("CpuAffinity", "MemoryAffinity", "CudaComputeCapability")
    host.gpus[0].lacks |= {f"nvmlDeviceGet{name}" for name in asked}
    install(monkeypatch, host)
    (device,) = visible_gpus()
    found = (device.cores, device.numa_node, device.capability, device.mig, nearby_cores(0))
    assert found == ((), None, None, False, ())


def test_without_a_driver_there_are_no_gpus_and_nothing_to_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, FakeNvml([], no_driver=True))
    assert (visible_gpus(), gpus()) == ((), ())
    assert (unused_gpus(), device_type(), gpu_facts(), gpu_topology()) == (None, "cpu", [], [])


def run_row(monkeypatch: pytest.MonkeyPatch, host: FakeNvml) -> dict[str, object]:
    install(monkeypatch, host)
    row = environment()
    assert set(row) <= {column.name for column in RunRecord.columns()}
    return {column.name: None for column in RunRecord.columns()} | row


def test_a_runs_row_names_settings_and_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML is closed again."""
    host = h100_node()
    host.gpus[7].enforced_limit_milliwatts = 500_000
    row = run_row(monkeypatch, host)
    assert (row["driver_version"], row["driver_cuda_version"]) == ("580.95.05", "13.0")
    facts = json.loads(str(row["gpu_facts"]))
    assert [one["power_limit_watts"] for one in facts] == 7 * [700.0] + [500.0]
    assert (facts[7]["numa_node"], facts[7]["default_power_limit_watts"]) == (1, 700.0)
    pairs = json.loads(str(row["gpu_topology"]))
    kinds = {pairs[a][b] for a in range(8) for b in range(8) if a != b}
    assert (pairs[0][0], kinds) == ("self", {"18 x NVLink 4.0 through a switch"})
    assert host.started == 0


@pytest.mark.parametrize(("number", "words"), [(91501, "9.15.1"), (8907, "8.9.7"), (None, None)])
def test_cudnns_number_is_its_version(
    monkeypatch: pytest.MonkeyPatch, number: int | None, words: str | None
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: number)
    assert cudnn_version() == words


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


def hardware_of(row: dict[str, object]) -> Hardware:
    """Returns the hardware of a run with this row, adding the columns that identify it."""
    texts = dict.fromkeys(("run_id", "matrix", "plan"), "")
    started = datetime(2026, 1, 1, tzinfo=timezone.utc)
    return Hardware.of(
        RunRecord.from_row({**row, **texts, "schema_version": 12, "started_at": started})
    )


def test_other_power_limits_and_other_error_correction_are_other_hardware(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both may change a GPU's speed, but not that of CPU cells."""
    monkeypatch.setattr("harness.host.environment.unused_gpus", lambda: None)
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


def test_names_that_contain_each_other_are_other_products() -> None:
    """GPUs before Ampere have no bf16 tensor cores. Drivers before 470 left `NVIDIA ` out."""
    pairs = [("NVIDIA L4", "NVIDIA L40S"), ("NVIDIA A10G", "NVIDIA A100 80GB PCIe")]
    for one, other in [*pairs, ("NVIDIA H200", "NVIDIA H200 NVL")]:
        found = {peak_flops_per_second(name, "bf16") for name in (one, other)}
        assert len(found) == 2
        assert None not in found
    assert peak_flops_per_second("Tesla V100-SXM2-16GB", "bf16") is None
    old, new = "A100-SXM4-40GB", "NVIDIA A100-SXM4-40GB"
    assert peak_flops_per_second(old, "bf16") == peak_flops_per_second(new, "bf16") == 312e12


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA RTX A1000",  # not an A100
        "NVIDIA A100-SXM4-80GB MIG 1g.10gb",  # a seventh of an A100
        "GRID A100-10C",
        "NVIDIA H100",  # ambiguous
        "NVIDIA A100X",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA H20-141C",
    ],
)
def test_unlisted_products_have_no_peak(name: str) -> None:
    """Names that only contain a product's name, and slices of GPUs, have no peak."""
    assert {peak_flops_per_second(name, kind) for kind in ("fp32", "bf16", "fp16")} == {None}


def test_the_table_is_plausible_and_its_names_are_unique() -> None:
    models = gpu_models()
    assert len({model.product_name for model in models.values()}) == len(models) >= 48
    for host_name, model in models.items():
        assert gpu_model(model.device_name) is model
        assert host_name == host_name.lower()
        assert 11 * 2**30 < model.memory_bytes < 300 * 2**30
        assert model.source
        assert model.memory_bytes_per_second
        fp16, fp32 = model.fp16_flops_per_second, model.fp32_flops_per_second
        if host_name == "gb10-128gb":
            assert fp16 is fp32 is None, "its data sheet states neither"
            continue
        assert fp16, "every product of the table has tensor cores"
        assert fp32
        assert 1.9 < fp16 / fp32 < 32, (
            "a figure with sparsity, or of another column, would be outside"
        )
        assert model.bf16_flops_per_second in (None, fp16)
        assert model.nvlink_bytes_per_second is None or model.nvlink_bytes_per_second >= 300e9
        assert model.fabric_bytes_per_second is None or model.fabric_bytes_per_second >= 100e9
        assert None in (model.nvlink_bytes_per_second, model.fabric_bytes_per_second)
