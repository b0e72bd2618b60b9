"""Memory and cores of this process under the limits of control groups and SLURM jobs."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from bench.matrix import Host
from harness.cell.cell import Cell
from harness.cell.durable import write_cached
from harness.host import cores, environment
from harness.host.cores import available_memory_bytes, memory_bytes
from harness.parity.reference import Reference
from harness.record.store import TrialKey
from harness.run import prepared

GIB = 2**30


@pytest.fixture(autouse=True)
def large_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A 2 TiB host, half of it free, outside a SLURM job."""
    there = SimpleNamespace(total=2048 * GIB, available=1024 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: there)
    for name in ("SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU", "SLURM_CPUS_ON_NODE"):
        monkeypatch.delenv(name, raising=False)


def host(folder: Path, line: str, groups: dict[str, dict[str, object]]) -> tuple[Path, Path]:
    """Writes the /proc entry of a process in a control group and the groups' files."""
    process = folder / "proc" / "self"
    process.mkdir(parents=True)
    (process / "cgroup").write_text(f"{line}\n" if line else "")
    for group, files in groups.items():
        (folder / "cgroup" / group).mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / "cgroup" / group / name).write_text(f"{content}\n")
    return process, folder / "cgroup"


V2 = {
    "memory.max": 32 * GIB,
    "memory.current": 10 * GIB,
    "memory.stat": f"anon 1\ninactive_file {2 * GIB}",
}
V1 = {
    "memory.limit_in_bytes": 32 * GIB,
    "memory.usage_in_bytes": 10 * GIB,
    "memory.stat": f"inactive_file 5\ntotal_inactive_file {2 * GIB}",
}
UNLIMITED: dict[str, object] = {"memory.limit_in_bytes": 9223372036854771712}
"""A control group of version 1 without a limit."""


@pytest.mark.parametrize(
    ("line", "groups", "limit", "available"),
    [
        (
            "0::/job/step",
            {"job/step": {"memory.max": "max", "memory.current": 5}, "job": V2},
            *(32, 24),
        ),
        ("0::/", {".": V2}, 32, 24),
        ("0::/a", {"a": {**V2, "memory.max": "max", "memory.high": 32 * GIB}}, 32, 24),
        ("4:memory:/docker/1", {"memory": V1}, 32, 24),
        ("4:memory:/slurm/job", {"memory": UNLIMITED, "memory/slurm/job": V1}, 32, 24),
        ("0::/a", {"a": {"memory.max": "max", "memory.current": GIB}}, 2048, 1024),
        ("4:memory:/", {"memory": UNLIMITED}, 2048, 1024),
        ("", {}, 2048, 1024),
    ],
)
def test_the_limit_of_a_control_group_counts_or_else_the_host(
    tmp_path: Path, line: str, groups: dict[str, dict[str, object]], limit: int, available: int
) -> None:
    """Inactive page cache counts as available, since the kernel drops it first."""
    where = host(tmp_path, line, groups)
    found = (memory_bytes(*where), available_memory_bytes(*where))
    assert found == (limit * GIB, available * GIB)


@pytest.mark.parametrize(
    ("variables", "limit"),
    [
        ({"SLURM_MEM_PER_NODE": "32768"}, 32),
        ({"SLURM_MEM_PER_CPU": "4096", "SLURM_CPUS_ON_NODE": "8"}, 32),
        ({"SLURM_MEM_PER_NODE": "0"}, 2048),
        ({"SLURM_MEM_PER_NODE": "unknown"}, 2048),
    ],
)
def test_the_limit_of_a_slurm_job_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], limit: int
) -> None:
    where = host(tmp_path, "", {})
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert memory_bytes(*where) == limit * GIB
    available = available_memory_bytes(*where)
    if limit == 2048:
        assert available == 1024 * GIB
    else:
        assert 0 < available < limit * GIB, "the limit minus this process's memory"


def test_a_rewind_that_does_not_fit_into_the_group_is_not_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight ranks' states exceed the last of the group's 32 GiB, though the host has 1 TiB free."""
    where = host(tmp_path, "0::/", {".": {**V2, "memory.current": 33 * GIB}})
    folder = tmp_path / "reference"
    folder.mkdir()
    write_cached(folder / "reference.json", "{}")

    def why_not(workload: str) -> str:
        cell = Cell(strategy="ddp", workload=workload, devices=8, global_batch=8)
        key = TrialKey(cell.id, 0)
        trial = prepared.PreparedTrial(cell, key, 0, Reference(str(folder)), 0.5)
        return trial.rewind_skipped_reason

    assert why_not("llama-256x6") == ""
    limited = functools.partial(available_memory_bytes, *where)
    monkeypatch.setattr(prepared, "available_memory_bytes", limited)
    assert "GiB" in why_not("llama-256x6")
    assert why_not("llama-nano") == ""


def test_a_cpu_host_is_limited_by_its_slurm_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "device_type", lambda: "cpu")
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "1")
    assert Host.here().memory_bytes == 2**20
    assert environment.environment()["memory_bytes"] == 2**20


V1_CORES = {"cpu.cfs_quota_us": 250_000, "cpu.cfs_period_us": 100_000}


@pytest.mark.parametrize(
    ("line", "groups", "quota"),
    [
        ("0::/job", {".": {"cpu.max": "250000 100000"}, "job": {"cpu.max": "max 100000"}}, 3),
        ("0::/job", {".": {"cpu.max": "200000 100000"}, "job": {"cpu.max": "20000 10000"}}, 2),
        ("0::/", {".": {"cpu.max": "5000 10000"}}, 1),
        ("0::/", {".": {"cpu.max": "max 100000"}}, None),
        ("4:cpu,cpuacct:/docker/1", {"cpu": V1_CORES}, 3),
        ("0::/\n4:cpu:/a", {"cpu/a": V1_CORES, "cpu": {"cpu.cfs_quota_us": -1}}, 3),
        ("4:cpuset:/", {}, None),
        ("", {}, None),
    ],
)
def test_the_cpu_quota_of_a_control_group_counts(
    tmp_path: Path, line: str, groups: dict[str, dict[str, object]], quota: int | None
) -> None:
    assert cores.quota_cores(*host(tmp_path, line, groups)) == quota


def test_no_more_cores_are_pinned_than_a_quota_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container with `--cpus=3` may run on all 16 cores, which have two hardware threads each."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(32)))
    monkeypatch.setattr(
        cores, "physical_cores", lambda threads: [(n, n + 16) for n in threads if n < 16]
    )
    monkeypatch.setattr(cores, "quota_cores", lambda: None)
    assert len(cores.allowed_cores()) == 32
    monkeypatch.setattr(cores, "quota_cores", lambda: 3)
    assert cores.allowed_cores() == [0, 1, 2]
    on_cpu = Cell(strategy="ddp", devices=4, global_batch=4)
    assert cores.pin(on_cpu, 4, 4) == ((0,), (1,), (2,), (0,))
    monkeypatch.setattr(
        "harness.host.gpu_inventory.nearby_cores", lambda gpu: range(8 * gpu, 8 * gpu + 8)
    )
    on_gpus = Cell(strategy="ddp", devices=2, device="cuda")
    assert cores.pin(on_gpus, 2, 2) == ((0, 16), (8, 24)), "near each GPU, not the first cores"
