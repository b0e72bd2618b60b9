"""Cells on two and three nodes in one job: a lost node costs its trial, and a spare one takes its
place."""

from __future__ import annotations

from tests.cluster.conftest import Bench, Slurm
from tests.cluster.test_two_nodes import once_each
from tests.waiting import until

NODES = 3

MATRIX = """
trials: 3
timed_seconds: 0
defaults:
  workload: llama-nano
  sequence_length: 32
  batch: 6
  warmup_steps: 1
  timed_steps: 6
  strategy: faulty
  options: {fault: slow}
cells:
  - {devices: 2, nodes: 2}
  - {devices: 3, nodes: many}
"""


def test_a_spare_node_takes_the_place_of_a_lost_one(slurm: Slurm, bench: Bench) -> None:
    told = bench.submit("--matrix", bench.matrix(MATRIX), "--nodes", "3")
    until(lambda: bench.recorded(told["run_id"]) >= 2, lambda: slurm.story(told["job"]))
    slurm.kill_node("n2")
    slurm.wait_job(told["job"])
    trials = bench.load(told["run_id"]).trials
    once_each(trials, 2, 3)
    before, after = trials[trials["trial"] == 0], trials.sort_values("position").iloc[3:]
    assert set(before["status"]) == {"ok"}, before["reason"]
    assert {tuple(names) for names in before["node_names"]} == {("n1", "n2"), ("n1", "n2", "n3")}
    assert set(before["parity_verdict"]) == {"exact"}
    assert all(
        "node n2 was lost: its agent is gone" in reason
        for reason in trials[trials["status"] == "failed"]["reason"]
    )
    assert len(trials[trials["status"] == "failed"]) <= 1, "a lost node costs at most one trial"
    assert set(after[after["nodes"] == 3]["status"]) == {"unavailable"}
    assert all("2 of 3 are there" in reason for reason in after[after["nodes"] == 3]["reason"])
    over_two = after[after["nodes"] == 2]
    assert set(over_two["status"]) == {"ok"}, over_two["reason"]
    assert {tuple(names) for names in over_two["node_names"]} == {("n1", "n3")}
