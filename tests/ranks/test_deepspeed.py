"""DeepSpeed: offloading to disk, its compiled parts, and memory that it must not share."""

from __future__ import annotations

import math
import multiprocessing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import harness.strategies._deepspeed
import harness.strategies._deepspeed_zero
from harness.cell.errors import Refused, Unavailable
from harness.launch.launcher import Launcher
from harness.seam.registry import validate
from harness.strategies._deepspeed import (
    compiled_parts,
    is_in_memory,
    lockable_bytes,
)
from harness.workloads import make_workload
from tests.ranks.conftest import RunCells, cell
from tests.ranks.test_strategies import states_follow_the_formula

pytestmark = pytest.mark.skipif(not find_spec("deepspeed"), reason="make setup builds DeepSpeed")
with_disk = pytest.mark.skipif(
    "async_io" not in compiled_parts() or lockable_bytes() < 2**26,
    reason="needs DeepSpeed with async_io (libaio-dev) and 64 MiB of lockable memory (ulimit -l)",
)
NVME: dict[str, Any] = {"stage": 3, "offload_optimizer": "nvme"}


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a folder on a disk; states offloaded to a file system in memory stay in memory."""
    if is_in_memory(str(tmp_path)):
        pytest.skip(
            "pytest's folders are on a file system in memory; give one on a disk with --basetemp"
        )
    monkeypatch.setenv("PARALLELISM_BENCH_DISKS", str(tmp_path))
    return tmp_path


@with_disk
@pytest.mark.parametrize(
    ("workload", "options"),
    [("llama-nano", NVME), ("llama-mini", {"stage": 3, "offload_parameters": "nvme"})],
    ids=str,
)
def test_tensors_that_would_stay_in_memory_are_refused(
    disk: Path, workload: str, options: dict[str, Any]
) -> None:
    one = cell("deepspeed", workload=workload, options={"folder": str(disk), **options})
    with pytest.raises(Refused, match="below 1 MiB in memory"):
        validate(one, make_workload(one.workload))


@pytest.mark.parametrize(
    ("part", "needs"), [("cpu_adam", "make setup"), ("async_io", "libaio-dev")]
)
def test_a_part_that_is_not_compiled_is_never_compiled_in_a_trial(
    monkeypatch: pytest.MonkeyPatch, part: str, needs: str
) -> None:
    ops = dict.fromkeys({"cpu_adam", "async_io"} - {part}, 1)
    monkeypatch.setattr(harness.strategies._deepspeed, "prebuilt", lambda: {"installed_ops": ops})
    one = cell("deepspeed", workload="llama-512x2", options=NVME)
    with pytest.raises(Unavailable, match=f"{part} .*{needs}"):
        validate(one, make_workload(one.workload))


@pytest.mark.parametrize(("allowed", "needs"), [(2**23, 8.0), (0, 0.0)])
def test_disk_buffers_that_cannot_be_locked_are_reported(
    monkeypatch: pytest.MonkeyPatch, disk: Path, allowed: int, needs: float
) -> None:
    """DeepSpeed does not check whether mlock succeeded; ranks of ordinary users died of SIGSEGV."""
    one = cell("deepspeed", workload="llama-512x2", options={**NVME, "folder": str(disk)})
    monkeypatch.setattr(harness.strategies._deepspeed_zero, "lockable_bytes", lambda: 2**40)
    validate(one, make_workload(one.workload))
    monkeypatch.setattr(harness.strategies._deepspeed_zero, "lockable_bytes", lambda: allowed)
    with pytest.raises(Unavailable, match=f"{needs} MiB.*ulimit -l unlimited"):
        validate(one, make_workload(one.workload))


def test_a_process_that_has_the_capability_locks_without_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit = harness.strategies._deepspeed.resource.RLIMIT_MEMLOCK
    monkeypatch.setattr(
        harness.strategies._deepspeed.resource,
        "getrlimit",
        lambda which: {limit: (4096, 4096)}[which],
    )
    capable = "CapEff:\t0000000000004000\n"
    monkeypatch.setattr(Path, "read_text", lambda _: capable)
    assert harness.strategies._deepspeed.lockable_bytes() == math.inf
    monkeypatch.setattr(Path, "read_text", lambda _: "CapEff:\t0000000000000000\n")
    assert harness.strategies._deepspeed.lockable_bytes() == 4096


def _makes_no_shared_memory() -> None:
    from deepspeed.comm.torch import build_shm_op

    from harness.strategies._deepspeed import settle

    settle("cpu", 1)
    assert build_shm_op() is None


def test_its_shared_memory_for_inference_is_neither_compiled_nor_made(launcher: Launcher) -> None:
    """DeepSpeed's shared memory, 66 MiB per rank, would outlive the processes."""
    process = multiprocessing.get_context("forkserver").Process(target=_makes_no_shared_memory)
    process.start()
    process.join(60)
    assert process.exitcode == 0


@with_disk
def test_files_on_disk_hold_the_offloaded_states(run_cells: RunCells, disk: Path) -> None:
    """Files equal the states of the same training without a disk, byte for byte; memory is free of
    them."""
    swapped, held = disk / "swapped", disk / "held"
    axes: dict[str, Any] = {
        "workload": "llama-512x2",
        "warmup_steps": 1,
        "timed_steps": 3,
        "parity_steps": 3,
    }
    trials = run_cells(
        cell(
            "deepspeed",
            options={**NVME, "offload_parameters": "nvme", "folder": str(swapped)},
            **axes,
        ),
        cell(
            "deepspeed_dump",
            options={"stage": 3, "offload_optimizer": "cpu", "dump_folder": str(held)},
            **axes,
        ),
    ).trials.set_index("strategy")
    assert list(trials["parity_verdict"]) == ["exact"] * 2
    on_disk = {(f.parent.name, f.name): f for f in swapped.rglob("*.swp")}
    compared = 0
    for file in held.rglob("*.swp"):
        expected, swap = file.read_bytes(), on_disk.get((file.parent.name, file.name))
        if swap is None:
            assert len(expected) < 2**20, (
                f"{file.name} is missing, though DeepSpeed swaps tensors of at least 1 MiB"
            )
            continue
        read = swap.read_bytes()
        assert read[: len(expected)] == expected, file.name
        assert len(read) - len(expected) < 1024
        compared += len(expected)
    trial, other = trials.loc["deepspeed"], trials.loc["deepspeed_dump"]
    assert sum(trial["optimizer_bytes"]) == 0
    gone = (
        sum(other["optimizer_bytes"])
        + sum(other["parameter_bytes"])
        - sum(trial["parameter_bytes"])
        + 4 * other["parameters"]
    )
    assert compared == pytest.approx(gone, rel=1e-4)  # moments, parameters, and the fp32 masters
    states_follow_the_formula(trial)
    states_follow_the_formula(other)


@with_disk
def test_each_step_reads_and_writes_the_files_once(run_cells: RunCells, disk: Path) -> None:
    """The kernel counts masters, moments and gradients once each way per step."""
    axes: dict[str, Any] = {
        "workload": "llama-mini",
        "warmup_steps": 1,
        "timed_steps": 3,
        "parity_steps": 3,
    }
    trial = run_cells(cell("deepspeed", options={**NVME, "folder": str(disk)}, **axes)).trials.iloc[
        0
    ]
    assert trial["parity_verdict"] == "exact"
    states_follow_the_formula(trial)
    size = sum(
        f.stat().st_size for f in (disk / "parallelism-bench-offload").rglob("*") if f.is_file()
    )
    assert trial["offload_kept_bytes"] == size
    # If memory is short, the kernel also rereads library pages from disk.
    assert 0.99 * size <= trial["offload_read_bytes_per_step"] <= 1.1 * size
    assert trial["offload_written_bytes_per_step"] == pytest.approx(size, rel=0.01)


@pytest.mark.thorough
def test_tiles_train_a_layer_that_is_too_large_for_the_budget(run_cells: RunCells) -> None:
    """The layer's weights, gradient and their buffers need four times its size on top of the
    partitions. A tile's fit."""
    axes: dict[str, Any] = {
        "workload": "llama-1536x1",
        "global_batch": 2,
        "warmup_steps": 1,
        "timed_steps": 1,
        "parity_steps": 2,
        "memory_limit_bytes": 395_000_000,
    }
    few: dict[str, Any] = {"stage": 3, "bucket_elements": 300_000}
    whole, tiled = (
        cell("deepspeed", options=few, **axes),
        cell("tiled_linear", options={**few, "out_tiles": 8}, **axes),
    )
    trials = run_cells(whole, tiled).trials.set_index("strategy")
    assert trials["status"].to_dict() == {"deepspeed": "out_of_memory", "tiled_linear": "ok"}, list(
        trials["reason"]
    )
