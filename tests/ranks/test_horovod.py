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

from harness.cell.errors import Unavailable
from harness.strategies import _horovod
from harness.strategies._horovod import built, places
from harness.strategies.horovod import Horovod
from harness.workloads import make_workload
from tests.listening import watched
from tests.ranks.conftest import RunCells, cell

pytest.importorskip("horovod", reason="make setup builds Horovod")
with_mpi = pytest.mark.skipif(
    not (built(b"MPIController") and shutil.which("mpirun")), reason="needs Horovod with MPI"
)


@with_mpi
def test_mpi_trains_the_same_and_says_what_it_sends(run_cells: RunCells) -> None:
    """Over TCP, MPI sends the same bytes as Gloo and listens on loopback only."""
    over_tcp = cell(
        "horovod",
        workload="llama-micro",
        options={"controller": "mpi", "transport": "tcp"},
    )
    with watched() as seen:
        row = run_cells(over_tcp).trials.iloc[0]
    assert (row["parity_verdict"], row["reason"]) == ("exact", "")
    assert (row["launcher"], row["wraps_ddp"]) == ("mpirun", "Horovod")
    bound = 4.0 * row["trained_parameters"]
    assert list(row["sent_bytes_per_step"]) == pytest.approx([bound] * 2, rel=0.05)
    assert seen.inside
    assert seen.outside == []


@pytest.mark.thorough
@with_mpi
def test_adasum_is_its_formula(run_cells: RunCells) -> None:
    """Ranks of mpirun communicate through shared memory, where no bytes are counted."""
    options = {"controller": "mpi", "op": "adasum"}
    trials = run_cells(cell("horovod", options=options), cell("adasum_by_hand")).trials.set_index(
        "strategy"
    )
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
    limit = {"time_limit_seconds": 12.0} if fault == "hangs" else {}
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


@pytest.mark.thorough
@with_mpi
@pytest.mark.alone
def test_polling_in_a_pause_is_not_work(run_cells: RunCells) -> None:
    """MPI polls without rest while it waits for a slower rank."""
    mpi = cell(
        "horovod",
        workload="llama-mini",
        options={"controller": "mpi", "mpi_yield_when_idle": True},
        timed_steps=20,
    )
    steps = run_cells(mpi, timed_seconds=0.3).steps.query("phase == 'timed'")
    measured = steps["left_over_seconds"].dropna()
    assert len(measured) >= len(steps) // 4, "there is a pause after every second step"
    assert measured.mean() < 0.0005
