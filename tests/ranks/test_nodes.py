"""Cells on two nodes: two agents on this machine, over loopback.

They must behave as on one node.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.cell.cell import Cell
from harness.launch.launcher import Launcher
from harness.launch.outcome import Outcome
from harness.launch.watch import VARIABLE as HANGS_AFTER
from harness.nodes.coordinator import Nodes, NodesLauncher
from harness.nodes.protocol import secure
from harness.nodes.rendezvous import KEY, Rendezvous
from harness.record.plan import Plan
from harness.record.store import Results, Store
from harness.run.runner import ProgressListener, Runner
from harness.seam.registry import validate
from harness.workloads import make_workload, prepare_data
from tests.conftest import runs
from tests.ranks.conftest import cell, representative
from tests.waiting import LONG, PROMPT, at_first_step, interrupt, until


class Cluster:
    """A coordinator in this process, and agents as its children."""

    def __init__(
        self,
        where: Path | Rendezvous,
        local: Launcher,
        prefix: Callable[[int], Sequence[str]] = lambda number: (),
        interface: str = "lo",
    ) -> None:
        """`prefix`: command that starts a node's agent; `interface`: empty lets agents choose."""
        self.nodes = Nodes(2, where, interface or None)
        self.prefix, self.interface, self.local = prefix, interface, local
        # On half a core, one node's ranks may start long after another's.
        self.argument, self.environment = str(where), os.environ | {HANGS_AFTER: str(LONG)}
        if isinstance(where, Rendezvous):
            self.argument = f"{where.addresses[0]}:{where.port}"
            self.environment[KEY] = where.key
        self.agents: dict[int, subprocess.Popen[bytes]] = {}
        for number in range(2):
            self.start(number)
        self.launcher = NodesLauncher(
            self.nodes, ["deepspeed", "horovod.torch"], lambda packages: local
        )
        assert len(self.nodes.ready(2, 600)) == 2

    def start(self, number: int) -> None:
        core = sorted(os.sched_getaffinity(0))[number % os.cpu_count()]
        words = ["harness.agent", self.argument, "--node", str(number)]
        words += ["--name", f"n{number + 1}", "--interface", self.interface]
        self.agents[number] = agent = subprocess.Popen(
            [*self.prefix(number), "taskset", "-c", str(core), sys.executable, "-m", *words],
            env=self.environment,
        )
        self.local.ignore_pid(agent.pid)

    def complete(self) -> None:
        """Replaces each lost agent."""
        for number, agent in self.agents.items():
            if agent.poll() is not None:
                self.start(number)
        until(lambda: len(self.nodes.connected) == 2)
        self.launcher.wait_seconds = 30.0

    def ranks(self) -> list[psutil.Process]:
        """Returns the processes below the agents' fork servers."""
        agents = [
            psutil.Process(agent.pid) for agent in self.agents.values() if agent.poll() is None
        ]
        return [
            rank
            for agent in agents
            for child in agent.children()
            for rank in child.children(recursive=True)
        ]

    def run(self, one: Cell, on_progress: Callable[[int, float], None] | None = None) -> Outcome:
        workload = make_workload(one.workload)
        _, layout = validate(one, workload)
        outcome = self.launcher.run(
            one,
            prepare_data(one.data, workload, one.sequence_length),
            layout.processes,
            on_progress=on_progress,
        )
        assert self.ranks() == []
        return outcome

    def close(self) -> None:
        self.nodes.close()
        for agent in self.agents.values():
            agent.wait(timeout=LONG)


@pytest.fixture(scope="module")
def shared(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("cluster") / "rendezvous", launcher)
    yield made
    made.close()


@pytest.fixture
def cluster(shared: Cluster) -> Cluster:
    """Returns the shared cluster after restarting agents that earlier tests lost."""
    shared.complete()
    return shared


def run_on(cluster: Cluster, folder: Path, *cells: Cell, trials: int = 1) -> Results:
    store = Store(folder / "results")
    runner = Runner(
        store, Plan.new("test", cells, trials, []), launcher=lambda packages: cluster.launcher
    )
    runner.begin()
    assert runner.run(ProgressListener())
    return store.load([runner.plan.run_id])


@pytest.fixture
def run_cells(cluster: Cluster, tmp_path: Path) -> Callable[..., Results]:
    return functools.partial(run_on, cluster, tmp_path)


CELLS: list[dict[str, Any]] = [
    {"strategy": "ddp", "devices": 4},
    {"strategy": "deepspeed", "options": {"stage": 3}},
    {"strategy": "pipeline", "micro_batches": 2},
    {"strategy": "horovod"},
    {"strategy": "parameter_server"},
    *({"strategy": name} for name in ("fsdp2", "zero_redundancy", "tensor")),
]


@pytest.mark.parametrize("cells", representative([CELLS[:5], CELLS[5:]]), ids=["some", "more"])
def test_cells_train_the_same_on_two_nodes(
    run_cells: Callable[..., Results], cells: list[dict[str, Any]]
) -> None:
    on_two = [cell(**{"nodes": 2, **axes}) for axes in cells]
    trials = run_cells(*on_two, cell("ddp")).trials
    (alone,) = trials[trials["nodes"] == 1].to_dict("records")
    assert (alone["status"], list(alone["node_names"])) == ("ok", [])
    for trial in trials[trials["nodes"] == 2].to_dict("records"):
        assert (trial["status"], trial["reason"]) == ("ok", ""), trial["log_tail"]
        assert trial["parity_verdict"] == "exact"
        assert list(trial["node_names"]) == ["n1", "n2"]
        assert [node["interface"] for node in json.loads(trial["node_facts"])] == ["lo", "lo"]
        assert "2 nodes on 1 machine" in trial["stand_in"]
    assert len(trials) == len(cells) + 1


def test_ranks_follow_the_nodes_order(cluster: Cluster) -> None:
    outcome = cluster.run(cell("ddp", devices=4, nodes=2))
    assert [answer.node for answer in outcome.answers] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("raises", "rank 1: ValueError: the planted mistake"),
        ("killed", "rank 1 was killed by SIGKILL"),
    ],
)
def test_the_first_cause_is_named_over_nodes(cluster: Cluster, fault: str, said: str) -> None:
    outcome = cluster.run(cell("faulty", nodes=2, options={"fault": fault}))
    assert outcome.status == "failed"
    assert outcome.reason.startswith(said)


def test_a_time_limit_holds_on_every_node(cluster: Cluster) -> None:
    outcome = cluster.run(cell("faulty", nodes=2, options={"fault": "hangs"}, time_limit_seconds=4))
    assert outcome.status == "timeout"
    assert "rank 0:" in outcome.stacks
    assert "faulty.py" in outcome.stacks
    assert "rank 1:" in outcome.stacks
    assert cluster.run(cell("ddp", nodes=2)).status == "ok"


def test_a_stop_is_recorded_as_interrupted_over_nodes(cluster: Cluster) -> None:
    hanging = cell("faulty", nodes=2, options={"fault": "hangs"}, time_limit_seconds=LONG)
    outcome = cluster.run(hanging, at_first_step(interrupt))
    assert outcome.status == "interrupted"
    assert cluster.run(cell("ddp", nodes=2)).status == "ok"


def test_the_links_of_the_nodes_are_measured(cluster: Cluster) -> None:
    cluster.nodes.measure()
    for node in cluster.nodes.connected.values():
        assert 0 < node.facts["round_trip_seconds"] < 0.1
        assert 1e8 < node.facts["bits_per_second_from_head"] < 1e13
    assert cluster.run(cell("ddp", nodes=2)).status == "ok"


def test_a_peer_without_the_key_is_rejected(cluster: Cluster) -> None:
    rendezvous = Rendezvous.read(cluster.nodes.rendezvous_file)
    assert cluster.nodes.rendezvous_file.stat().st_mode & 0o777 == 0o600
    raw = socket.create_connection((rendezvous.addresses[0], rendezvous.port))
    with pytest.raises((OSError, EOFError)):
        secure(raw, b"another key", coordinator=False)
    assert cluster.run(cell("ddp", nodes=2)).status == "ok"


@pytest.mark.thorough
def test_a_stalled_agent_costs_its_trial(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent stops in mid-trial, as if its disks hung, and is given up after the time limit.

    Restarted, it serves again.
    """
    monkeypatch.setattr("harness.nodes.multi_node_trial.ANSWER_SECONDS", 5.0)
    stalled = cluster.agents[1]
    one = cell("faulty", nodes=2, options={"fault": "hangs"}, time_limit_seconds=4)
    outcome = cluster.launcher.run(
        one,
        prepare_data(one.data, make_workload(one.workload), one.sequence_length),
        2,
        on_progress=at_first_step(lambda: stalled.send_signal(signal.SIGSTOP)),
    )
    assert outcome.status == "failed"
    assert "node n2 was lost: did not answer" in outcome.reason
    stalled.kill()
    stalled.wait()
    cluster.complete()
    outcome = cluster.run(cell("ddp", nodes=2))
    assert outcome.status == "ok", outcome.reason


def test_a_lost_agent_costs_its_trial(cluster: Cluster) -> None:
    """A trial whose agent is killed names the node, and all its ranks are gone.

    This test must be the last, because it does not restart the agent.
    """
    lost = cluster.agents[1]
    below = [*psutil.Process(lost.pid).children(recursive=True)]
    hanging = cell("faulty", nodes=2, options={"fault": "hangs"}, time_limit_seconds=LONG)
    outcome = cluster.run(hanging, at_first_step(lost.kill))
    lost.wait()
    assert outcome.status == "failed"
    assert outcome.reason.startswith("node n2 was lost: its agent is gone")
    until(lambda: not any(map(runs, below)), within=PROMPT)

    cluster.launcher.wait_seconds = 1.0
    outcome = cluster.run(cell("ddp", nodes=2))
    assert (outcome.status, outcome.reason[:41]) == (
        "unavailable",
        "needs 2 nodes, 1 of 2 is there (n2: its a",
    )
