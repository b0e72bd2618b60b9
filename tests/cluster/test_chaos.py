"""Random kills during a matrix: each trial ends in exactly one record, and no process is left.

BENCH_KILLS sets their number, rounded down to a multiple of 5 (5: one of each kind).
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time

import psutil
import pytest

from tests.cluster.conftest import Bench, Slurm, end
from tests.cluster.test_two_nodes import once_each
from tests.waiting import until

NODES = 2

KILLS = 5 * max(1, int(os.environ.get("BENCH_KILLS", "5")) // 5)
TRIALS = max(4, KILLS // 2)
MATRIX = f"""
trials: {TRIALS}
timed_seconds: 0
defaults:
  workload: llama-nano
  sequence_length: 32
  batch: 8
  warmup_steps: 1
  timed_steps: 4
  devices: 2
  time_limit_seconds: 40
cells:
  - {{strategy: faulty, options: {{fault: slow}}, nodes: [1, 2]}}
  - {{strategy: ddp, nodes: 2}}
"""


def targets(slurm: Slurm, kind: str) -> list[psutil.Process]:
    """Returns the processes of a kind: ranks, agents, the coordinator or the batch shell."""
    if kind == "rank":  # forked by a fork server, without a new command line
        return [
            p
            for p in slurm.of_kind("multiprocessing.forkserver")
            if "forkserver" in " ".join(p.parent().cmdline())
        ]
    if kind == "shell":  # the batch step's shell, not a shell that restarts an agent
        return [
            p
            for p in slurm.of_kind("bash", "slurm/multinode.sbatch")
            if p.parent().name() == "slurmstepd"
        ]
    words = {"agent": "-m harness.agent", "coordinator": "-m bench run"}[kind]
    return [p for p in slurm.of_kind(words) if p.name().startswith("python")]


def strike(slurm: Slurm, kind: str, chance: random.Random) -> bool:
    """Kills one process of a kind; returns False if there is none at the moment."""
    if kind == "controller":
        end(slurm.pid("slurmctld"), signal.SIGKILL)
        slurm.daemon("slurmctld")
        return True
    with contextlib.suppress(psutil.Error):
        if found := targets(slurm, kind):
            chance.choice(found).kill()
            return True
    return False


@pytest.mark.thorough
@pytest.mark.timeout(60 * KILLS)
def test_every_trial_ends_in_one_record_whatever_is_killed(slurm: Slurm, bench: Bench) -> None:
    chance = random.Random(6)
    kinds = [
        kind
        for kind in ("rank", "agent", "coordinator", "shell", "controller")
        for _ in range(KILLS // 5)
    ]
    chance.shuffle(kinds)
    matrix = bench.matrix(MATRIX)
    told = bench.submit("--matrix", matrix, "--nodes", "2")
    run_id, jobs, struck = told["run_id"], [told["job"]], []

    def over() -> bool:
        return all(
            one.state not in ("PENDING", "RUNNING", "COMPLETING", "REQUEUED", "CONFIGURING")
            for one in slurm.states(jobs[-1])
        )

    begun = time.monotonic()
    while kinds and time.monotonic() - begun < 40 * KILLS:
        if over():
            if not bench.open_trials(run_id):
                break  # the run ended before all kills were made
            jobs.append(bench.submit("--matrix", matrix, "--nodes", "2", "--run", run_id)["job"])
        recorded = bench.recorded(run_id)
        until(
            lambda recorded=recorded: over() or bench.recorded(run_id) > recorded,
            lambda: slurm.story(jobs[-1]),
        )
        time.sleep(chance.uniform(0.0, 2.0))
        if not over() and strike(slurm, kinds[-1], chance):
            struck.append(kinds.pop())
    while True:
        slurm.wait_job(jobs[-1])
        if not bench.open_trials(run_id):
            break
        jobs.append(bench.submit("--matrix", matrix, "--nodes", "2", "--run", run_id)["job"])
    trials = bench.load(run_id).trials
    print(
        f"{len(struck)} kills ({', '.join(struck)}), {len(jobs)} jobs,"
        f" {trials['status'].value_counts().to_dict()}"
    )
    assert len(struck) == KILLS
    once_each(trials, 3, TRIALS)
    assert set(trials["status"]) <= {"ok", "failed", "interrupted", "unavailable"}
    assert (trials["status"] == "ok").sum() >= 3 * TRIALS - KILLS, (
        "the run recovers: a kill costs a trial or two"
    )
    assert not slurm.processes()
