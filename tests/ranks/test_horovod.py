"""Horovod: its ring's bytes, its two controllers, and each trap on the way to exact training."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import Any

import pandas as pd
import psutil
import pytest

from harness.cell.errors import Refused, Unavailable
from harness.strategies import _horovod
from harness.strategies._horovod import built, places
from harness.strategies.horovod import Horovod
from harness.workloads import make_workload
from tests.listening import watched
from tests.ranks.conftest import RunCells, cell

pytest.importorskip("horovod", reason="make setup builds Horovod")
PATIENT: dict[str, Any] = {"time_limit_seconds": 150.0}  # mpirun starts fresh interpreters
with_mpi = pytest.mark.skipif(
    not (built(b"MPIController") and shutil.which("mpirun")), reason="needs Horovod with MPI"
)


def test_the_ring_sends_what_it_must(run_cells: RunCells) -> None:
    """Each of N ranks sends 2(N-1)/N of the gradients' bytes per step, as in DDP's ring."""
    devices = 4
    micro = [cell(name, devices=devices, workload="llama-micro") for name in ("horovod", "ddp")]
    trials = run_cells(*micro).trials.set_index("strategy")
    for name in ("horovod", "ddp"):
        row = trials.loc[name]
        bound = 2 * (devices - 1) / devices * 4 * row["trained_parameters"]
        assert list(row["sent_bytes_per_step"]) == pytest.approx([bound] * devices, rel=0.05)
    assert trials.loc["horovod", "parity_verdict"] == "exact"
    assert trials.loc["horovod", "wraps_ddp"] == "Horovod"


def test_fp16_compression_halves_the_bytes(run_cells: RunCells) -> None:
    row = run_cells(
        cell("horovod", workload="llama-micro", options={"compression": "fp16"})
    ).trials.iloc[0]
    assert row["status"] == "ok"
    assert row["parity_max_loss_deviation"] > 0
    assert list(row["sent_bytes_per_step"]) == pytest.approx(
        [2.0 * row["trained_parameters"]] * 2, rel=0.05
    )
    assert pd.isna(row["wraps_ddp"])


def test_it_trains_the_same_by_sgd(run_cells: RunCells) -> None:
    """Matrix full covers micro-batches, bf16 and fp16."""
    row = run_cells(cell("horovod", optimizer="sgd")).trials.iloc[0]
    assert (row["status"], row["parity_verdict"]) == ("ok", "exact"), row["reason"]


def test_the_fusion_buffer_is_as_large_as_its_threshold(run_cells: RunCells) -> None:
    """Matrix full covers a buffer of 0 bytes."""
    row = run_cells(
        cell("horovod", options={"fusion_threshold_mib": 1.0, "cycle_time_ms": 0.5})
    ).trials.iloc[0]
    assert row["parity_verdict"] == "exact"
    assert row["library_bytes"][0] == pytest.approx(row["formula_library_bytes"], abs=1000)
    assert row["formula_library_bytes"] == pytest.approx(2**20, abs=1000), "and model buffers"


TRAPS = [
    pytest.param({"trap": "state_before_wrapping"}, {}, id="state before wrapping"),
    pytest.param(
        {"trap": "state_after_wrapping"}, {"optimizer": "sgd"}, id="state after wrapping, SGD"
    ),
    pytest.param({"apart": True, "trap": "no_broadcast"}, {}, id="no broadcast"),
    pytest.param(
        {"apart": True, "plain_sgd": True, "trap": "state_after_wrapping"},
        {"optimizer": "sgd", "parity_steps": 1, "warmup_steps": 1},
        id="plain SGD",
    ),
]


@pytest.mark.parametrize(("options", "axes"), TRAPS)
def test_each_trap_is_seen_and_avoided(
    run_cells: RunCells, options: dict[str, Any], axes: dict[str, Any]
) -> None:
    """Horovod diverges without the strategy's broadcast; with it, the same start stays exact.

    One step of SGD needs no momentum; without momentum, later steps differ from the reference.
    """
    trapped = cell("horovod_traps", options=options, **axes)
    fixed = cell("horovod_traps", options={**options, "trap": "none"}, **axes)
    trials = run_cells(trapped, fixed).trials
    trials = trials.set_index("cell_id")
    assert trials.loc[trapped.id, "status"] == "diverged", trials.loc[trapped.id, "log_tail"]
    assert "after the parity segment" not in trials.loc[trapped.id, "reason"]
    if "plain_sgd" in options:
        assert "after the parity segment" in trials.loc[fixed.id, "reason"]
    else:
        assert trials.loc[fixed.id, "status"] == "ok", trials.loc[fixed.id, "log_tail"]
        assert trials.loc[fixed.id, "parity_verdict"] == "exact"


@with_mpi
def test_mpi_trains_the_same_and_says_what_it_sends(run_cells: RunCells) -> None:
    """Over TCP, MPI sends the same bytes as Gloo and listens on loopback only."""
    over_tcp = cell(
        "horovod",
        workload="llama-micro",
        options={"controller": "mpi", "transport": "tcp"},
        **PATIENT,
    )
    with watched() as seen:
        row = run_cells(over_tcp).trials.iloc[0]
    assert (row["parity_verdict"], row["reason"]) == ("exact", "")
    assert (row["launcher"], row["wraps_ddp"]) == ("mpirun", "Horovod")
    bound = 4.0 * row["trained_parameters"]
    assert list(row["sent_bytes_per_step"]) == pytest.approx([bound] * 2, rel=0.05)
    assert seen.inside
    assert seen.outside == []


@with_mpi
def test_adasum_is_its_formula(run_cells: RunCells) -> None:
    """Ranks of mpirun communicate through shared memory, where no bytes are counted."""
    options = {"controller": "mpi", "op": "adasum"}
    trials = run_cells(
        cell("horovod", options=options, **PATIENT), cell("adasum_by_hand")
    ).trials.set_index("strategy")
    row, by_hand = trials.loc["horovod"], trials.loc["adasum_by_hand"]
    assert row["status"] == "ok", row["reason"]
    assert row["parity_verdict"] in ("within tolerance", "unknown"), row["parity_reason"]
    assert list(row["losses"]) == pytest.approx(list(by_hand["losses"]), rel=1e-5)
    assert not len(row["sent_bytes_per_step"])
    assert row["library_bytes"][0] == pytest.approx(row["formula_library_bytes"], rel=0.01)
    assert pd.isna(row["wraps_ddp"])


@with_mpi
@pytest.mark.parametrize(
    ("fault", "status", "reason"),
    [
        pytest.param(
            "raises",
            "failed",
            "rank 1: ValueError: the planted mistake",
            marks=pytest.mark.thorough,
        ),
        ("killed", "failed", "mpirun exited with code 137"),
        pytest.param(
            "hangs", "timeout", "still running after its time limit", marks=pytest.mark.thorough
        ),
    ],
)
def test_a_failing_rank_ends_mpirun_with_the_cause(
    run_cells: RunCells, fault: str, status: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = f"{os.getpid()}-{fault}"  # distinguishes these ranks from another test's
    monkeypatch.setenv("BENCH_TEST_MARKER", marker)
    limit = {"time_limit_seconds": 12.0} if fault == "hangs" else PATIENT
    row = run_cells(
        cell("horovod_faulty", options={"controller": "mpi", "fault": fault}, **limit)
    ).trials.iloc[0]
    assert (row["status"], row["launcher"]) == (status, "mpirun")
    assert row["reason"].startswith(reason)
    assert fault != "killed" or "rank 1 with PID" in row["log_tail"]
    assert fault != "hangs" or row["stacks"]
    assert not [
        process
        for process in psutil.process_iter(["cmdline", "environ"])
        if "harness.worker.mpi" in (process.info["cmdline"] or [])
        and marker in (process.info["environ"] or {}).values()
    ]


@pytest.mark.parametrize("fault", ["raises", "killed"])
def test_a_failing_rank_ends_gloo_with_the_cause(run_cells: RunCells, fault: str) -> None:
    row = run_cells(cell("horovod_faulty", options={"fault": fault})).trials.iloc[0]
    assert row["status"] == "failed"
    assert row["reason"].startswith(
        "rank 1: ValueError: the planted mistake"
        if fault == "raises"
        else "rank 1 was killed by SIGKILL"
    )


def test_what_the_build_holds_is_what_it_says_of_itself() -> None:
    code = (
        "import horovod.torch as hvd; print([bool(x()) for x in (hvd.mpi_built, hvd.gloo_built,"
        " hvd.nccl_built)])"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert printed == str(
        [built(name) for name in (b"MPIController", b"GlooController", b"NCCLAllreduce")]
    )


def test_places_are_those_of_horovodrun() -> None:
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts

    assert places(["a", "a", "b", "b"]) == get_host_assignments(parse_hosts("a:2,b:2"), 4)
    assert places(["a", "a", "b"]) == get_host_assignments(parse_hosts("a:2,b:1"), 3)
    cyclic = [
        (slot.rank, slot.local_rank, slot.cross_rank) for slot in places(["a", "b", "a", "b"])
    ]
    assert cyclic == [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)]


def check(strategy: Horovod, **axes: Any) -> None:
    one = cell("horovod", **axes)
    strategy.check(one, make_workload(one.workload))


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_horovod, "built", lambda part: False)
    with pytest.raises(
        Unavailable, match=r"apt-get install openmpi-bin libopenmpi-dev.*make setup"
    ):
        check(Horovod(controller="mpi"))
    with pytest.raises(Unavailable, match="without Gloo"):
        check(Horovod())
    with pytest.raises(Unavailable, match="CPU"):
        check(Horovod(), device="cuda")
    monkeypatch.setattr(_horovod, "built", lambda part: True)
    check(Horovod(), device="cuda")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(Unavailable, match="mpirun"):
        check(Horovod(controller="mpi"))


@pytest.mark.parametrize(
    ("strategy", "axes", "reason"),
    [
        (Horovod(op="adasum"), {}, "set controller to mpi"),
        (Horovod(op="adasum", controller="mpi"), {"devices": 3}, "power of two"),
        (Horovod(op="adasum", controller="mpi"), {"precision": "fp16"}, "use bf16 or fp32"),
        (Horovod(controller="mpi"), {"launcher": "spawn"}, "leave the launcher out"),
        (Horovod(), {"workload": "llama-nano+bf16"}, "set the precision to bf16"),
    ],
)
def test_impossible_cells_are_refused(strategy: Horovod, axes: dict[str, Any], reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        check(strategy, **axes)


@with_mpi
@pytest.mark.alone
def test_polling_in_a_pause_is_not_work(run_cells: RunCells) -> None:
    """MPI polls without rest while it waits for a slower rank."""
    mpi = cell(
        "horovod", workload="llama-mini", options={"controller": "mpi"}, timed_steps=20, **PATIENT
    )
    steps = run_cells(mpi, timed_seconds=0.3).steps.query("phase == 'timed'")
    measured = steps["left_over_seconds"].dropna()
    assert len(measured) >= len(steps) // 4, "there is a pause after every second step"
    assert measured.mean() < 0.0005
