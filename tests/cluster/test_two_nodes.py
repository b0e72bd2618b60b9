"""Jobs on a SLURM of two nodes: they run, are verified, resume after interruptions, and leave no
processes behind."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING

import pytest

from harness.run.runner import REPEATED
from tests.cluster.conftest import Bench, Slurm, end
from tests.waiting import until

if TYPE_CHECKING:
    import pandas as pd

NODES = 2

SMALL = "{workload: llama-nano, sequence_length: 32, batch: 8, warmup_steps: 3, timed_steps: 5}"
PARITY = f"""
trials: 1
timed_seconds: 0
defaults: {SMALL}
cells:
  - {{strategy: [ddp, horovod], devices: 2, nodes: 2}}
  - {{strategy: pipeline, devices: 2, nodes: 2, micro_batches: 2}}
  - {{strategy: ddp, devices: 3, nodes: 3, batch: 9}}
"""
# Trials of about 7 s, mostly asleep, on one node or two: long enough to be interrupted.
LONG = """
trials: 3
timed_seconds: 0
defaults:
  workload: llama-nano
  sequence_length: 32
  batch: 8
  warmup_steps: 1
  timed_steps: 20
  strategy: faulty
  options: {fault: slow}
cells:
  - {devices: 2, nodes: [1, 2]}
"""


def once_each(trials: pd.DataFrame, cells: int, count: int) -> None:
    """Asserts that every trial of every cell has one final record, and that attempts are numbered
    without a gap."""
    final = trials[trials["status"] != "interrupted"].drop_duplicates(["cell_id", "trial"])
    assert sorted(final.groupby("cell_id").size()) == [count] * cells, trials[
        ["cell_name", "trial", "attempt", "status", "reason"]
    ]
    for _, attempts in trials.sort_values("attempt").groupby(["cell_id", "trial"]):
        assert list(attempts["attempt"]) == list(range(1, len(attempts) + 1))
        assert set(attempts["status"].iloc[:-1]) <= set(REPEATED)


def test_two_node_cells_train_the_same_while_the_controller_starts_anew(
    slurm: Slurm, bench: Bench
) -> None:
    told = bench.submit("--matrix", bench.matrix(PARITY), "--nodes", "2")
    # The cell that is unavailable is recorded first, and then one that ran.
    until(lambda: bench.recorded(told["run_id"]) >= 2, lambda: slurm.story(told["job"]))
    end(slurm.pid("slurmctld"), signal.SIGKILL)
    slurm.daemon("slurmctld")
    assert [job.state for job in slurm.wait_job(told["job"])] == ["COMPLETED"], slurm.story(
        told["job"]
    )
    found = bench.load(told["run_id"])
    once_each(found.trials, 4, 1)
    trials = found.trials.set_index("label")
    ran = trials[trials["devices"] == 2]
    assert set(ran.index) == {"ddp", "horovod", "pipeline(micro_batches=2)"}
    assert set(ran["parity_verdict"]) == {"exact"}, ran[["reason", "log_tail"]]
    assert all(list(names) == ["n1", "n2"] for names in ran["node_names"])
    allocation = json.loads(found.runs.iloc[0]["allocation"])
    assert (allocation["job"], allocation["nodes"], allocation["partition"]) == (
        told["job"],
        "n[1-2]",
        "test",
    )
    assert trials[trials["devices"] == 3]["status"].item() == "unavailable"
    # The first launch waits for the agents' imports; later ones find them done.
    assert ran.sort_values("position")["startup_seconds"].iloc[1:].min() < 1.5
    status = bench.call("status", told["job"]).stdout
    assert f"run {told['run_id']}" in status
    assert "3 of 3 planned trials (3 ok" in status
    assert f"job {told['job']}: COMPLETED on n[1-2]" in status


def test_tasks_of_an_array_share_the_cells(slurm: Slurm, bench: Bench) -> None:
    matrix = (
        f"trials: 2\ntimed_seconds: 0\ndefaults: {SMALL}\ncells:\n  - {{strategy: [single, ddp]}}\n"
    )
    told = bench.submit("--matrix", bench.matrix(matrix), "--array", "2", "--set", "timed_steps=4")
    assert [job.state for job in slurm.wait_job(told["job"])] == ["COMPLETED"] * 2, slurm.story(
        told["job"]
    )
    assert bench.load(told["run_id"]).runs.shape[0] == 1
    once_each(bench.load(told["run_id"]).trials, 2, 2)
    logs = sorted((bench.results / "slurm" / told["run_id"]).glob("slurm-*_*.log"))
    assert [file.read_text().count("trials to run") for file in logs] == [1, 1]
    assert all("2 trials to run" in file.read_text() for file in logs)


@pytest.mark.thorough
def test_a_cancelled_run_goes_on_and_a_time_limit_does_not_end_it(
    slurm: Slurm, bench: Bench
) -> None:
    """Another job resumes a cancelled job's run.

    SLURM warns the second job 100 s before its time limit. The job requeues itself, resumes and
    loses at most one trial.
    """
    told = bench.submit("--matrix", bench.matrix(LONG), "--nodes", "2")
    run_id, job = told["run_id"], told["job"]

    def in_a_trial_after(recorded: int) -> None:
        until(
            lambda: bench.recorded(run_id) >= recorded and bool(slurm.of_kind("forkserver")),
            lambda: slurm.story(job),
        )
        time.sleep(1.5)  # into the next trial

    def interrupted() -> int:
        return int((bench.load(run_id).trials["status"] == "interrupted").sum())

    in_a_trial_after(1)
    slurm.call("scancel", job)
    assert [job.state for job in slurm.wait_job(job)] == ["CANCELLED"]
    assert interrupted() == 1, slurm.story(job)

    bench.site["warn_seconds"] = 100
    recorded = bench.recorded(run_id)
    begun = time.monotonic()
    job = bench.submit(
        "--matrix", bench.matrix(LONG), "--nodes", "2", "--time", "30", "--run", run_id
    )["job"]
    in_a_trial_after(recorded + 1)
    # The limit is now 1 to 2 minutes away, so SLURM warns at its next check, every 30 s.
    minutes = int((time.monotonic() - begun) // 60) + 2
    slurm.call("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes}")
    until(
        lambda: [(one.state, one.restarts) for one in slurm.states(job)] == [("PENDING", 1)],
        lambda: slurm.story(job),
    )
    # SLURM would queue the job for two minutes. If it restarted within the second in which it was
    # killed, a node would take it for the killed one.
    time.sleep(3)
    slurm.call("scontrol", "update", f"JobId={job}", "StartTime=now", "TimeLimit=30")
    states = slurm.wait_job(job)
    assert [(one.state, one.restarts) for one in states] == [("COMPLETED", 1)], slurm.story(job)
    trials = bench.load(run_id).trials
    once_each(trials, 2, 3)
    assert interrupted() == 2, "one per job"
    assert set(trials["status"]) == {"ok", "interrupted"}


@pytest.fixture
def webhook() -> Iterator[tuple[list[str], str]]:
    """List that receives posted texts, and the address to post them to."""
    posted: list[str] = []

    class Hears(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
            self.send_response(200)
            self.end_headers()

    with HTTPServer(("127.0.0.1", 0), Hears) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield posted, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.thorough
def test_a_night_that_became_slower_is_found_and_one_that_did_not_is_quiet(
    slurm: Slurm, bench: Bench, webhook: tuple[list[str], str]
) -> None:
    planted, heard = bench.folder / "planted", bench.folder / "heard"
    matrix = (
        "trials: 3\ntimed_seconds: 0\n"
        f"defaults: {SMALL}\ncells:\n  - {{strategy: planted, devices: 2, options:"
        f" {{file: {planted}}}}}\n"
    )
    posted, address = webhook
    letter = bench.folder / "letter"
    programs = bench.folder / "programs"
    programs.mkdir()
    for name, text in (
        ("mail", f'echo "$@" > {letter}; cat >> {letter}'),
        ("hear", f'cat >> {heard}.text; echo "$@" >> {heard}'),
    ):
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    bench.site["prologue"] = [f"export PATH={programs}:$PATH"]
    bench.site["nightly"] = {
        "publish": str(bench.folder / "pages"),
        "textfile": str(bench.folder),
        "notify": {
            "mail": "owner@cluster.example",
            "webhook": address,
            "command": "hear",
        },
    }
    outcomes = []
    for night in range(3):
        if night == 2:
            planted.write_text("")
            bench.site["nightly"]["again"] = "now+1hour"
        told = bench.submit("--nightly", "--matrix", bench.matrix(matrix))
        outcomes.append(slurm.wait_job(told["job"])[0].state)
        if night == 1:
            assert outcomes == ["COMPLETED", "COMPLETED"], slurm.story(told["job"])
            assert not heard.exists()
            assert not letter.exists()
            assert not posted
            assert (
                'outcome="ok"} 1'
                in (bench.folder / "parallelism_bench_night_matrix.prom").read_text()
            )
    assert outcomes == ["COMPLETED", "COMPLETED", "FAILED"], slurm.story(told["job"])
    assert (
        'outcome="regression"} 1'
        in (bench.folder / "parallelism_bench_night_matrix.prom").read_text()
    )
    assert heard.read_text().strip() == "regression"
    assert "planted" in heard.with_suffix(".text").read_text()
    assert "slower" in heard.with_suffix(".text").read_text()
    assert letter.read_text().startswith("-s parallelism-bench: regression in night ")
    assert letter.read_text().splitlines()[0].endswith(" owner@cluster.example")
    assert "slower" in letter.read_text()
    assert [
        "regression" in json.loads(text)["text"] and "slower" in json.loads(text)["text"]
        for text in posted
    ] == [True]

    def following() -> list[str]:
        return slurm.call(
            "squeue", "-h", "-n", "bench-nightly-matrix", "-o", "%i %T %r"
        ).stdout.split()

    until(
        lambda: following()[1:] == ["PENDING", "BeginTime"],
        lambda: f"the next night waits for its hour: {following()}",
    )
    slurm.call("scancel", following()[0])
    runs = bench.results / "runs"
    pages = {page.name for page in (bench.folder / "pages").glob("*.html")}
    assert {f"{run.stem}.html" for run in runs.glob("*.parquet")} <= pages
    _, second, third = sorted(run.stem for run in runs.glob("*.parquet"))
    good = bench.results / "slurm" / "nightly" / "matrix" / "last-good"
    assert second in good.read_text()
    assert third not in good.read_text(), "a bad night must not become the standard"
    assert f"{third}-against-good-nights.html" in pages
