"""Multi-node cells before any agent runs: planning, placement of ranks, and node facts."""

from __future__ import annotations

import contextlib
import re
import select
import socket
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from bench.expand import expand
from bench.matrix import Host, Matrix
from harness.analysis.summary import cell_results
from harness.cell.cell import Cell
from harness.cell.errors import UsageError
from harness.host.cores import oversubscribed
from harness.host.environment import numa_nodes
from harness.host.process import machine_id
from harness.launch.outcome import RankOutputs, classify_end
from harness.nodes.agent import Node, link_speed
from harness.nodes.coordinator import Nodes
from harness.nodes.multi_node_trial import Trial
from harness.nodes.protocol import NodeConnection, reach_coordinator
from harness.nodes.rendezvous import (
    Rendezvous,
    addresses_of,
    addresses_of_host,
    interface_of,
    new_key,
)
from harness.record.plan import LeftOut, Plan
from harness.record.run_record import RunRecord
from harness.record.store import Store, TrialKey
from harness.record.trial import TrialRecord, distinct_cores, shared_machine
from harness.run.metrics import left_out_record
from harness.run.runner import Runner
from harness.worker.rank_answer import FailureAnswer, RankAnswer
from harness.worker.spec import TrialSpec
from harness.workloads import DataSource
from tests.unit.stored_trials import one_cell_run, trial_row
from tests.waiting import interrupt, until, when

DATA = DataSource("text", "t", "f", None, ((0, 9),), 4)


def plan(there: int, **axes: object) -> tuple[list[Cell], list[tuple[str, str]]]:
    matrix = Matrix(cells=[{"workload": "llama-nano", "devices": 2, **axes}])
    found = expand(matrix, Host("cpu", 2, 2**34, there))
    return list(found.cells), [(left.status, left.reason) for left in found.left_out]


def test_one_node_is_the_measurement_it_always_was() -> None:
    assert Cell(strategy="ddp", devices=2).id == Cell(strategy="ddp", devices=2, nodes=1).id
    assert Cell(strategy="ddp", devices=2).id != Cell(strategy="ddp", devices=2, nodes=2).id
    assert Cell(strategy="ddp", devices=2, nodes=2).reference() == Cell(strategy="ddp").reference()


@pytest.mark.parametrize(
    ("axes", "status"),
    [
        ({"strategy": "ddp", "devices": 3}, "refused"),
        ({"strategy": "ddp", "nodes": 3, "devices": 3, "batch": 6}, "unavailable"),
        ({"strategy": "ddp", "launcher": "spawn"}, "refused"),
        ({"strategy": "data_parallel"}, "refused"),
        ({"strategy": "ddp_elastic"}, "refused"),
        ({"strategy": "accelerate", "options": {"config_file": True}}, "refused"),
        pytest.param(
            {"strategy": "horovod", "options": {"controller": "mpi"}},
            "refused",
            marks=pytest.mark.skipif(
                find_spec("horovod") is None, reason="make setup builds Horovod"
            ),
        ),
    ],
    ids=str,
)
def test_cells_that_nodes_cannot_run_are_left_out_with_a_reason_about_nodes(
    axes: dict[str, object], status: str
) -> None:
    cells, [(found, reason)] = plan(2, **{"nodes": 2, **axes})
    assert (cells, found) == ([], status)
    assert re.search("node|one process", reason)


def test_many_counts_devices_per_node() -> None:
    cells, _ = plan(4, strategy="ddp", devices="many", nodes=["many", 2, 1])
    assert [(cell.nodes, cell.devices) for cell in cells] == [(4, 8), (2, 4), (1, 2)]


@pytest.mark.parametrize("processes", [4, 5])
def test_ranks_are_in_the_nodes_order_and_servers_on_the_last(processes: int) -> None:
    cell = Cell(strategy="ddp", devices=4, nodes=2)
    parts = [list(TrialSpec(cell, DATA, processes, node=node).ranks) for node in range(2)]
    assert parts == [[0, 1], list(range(2, processes))]


def test_cores_of_nodes_on_one_machine_count_once() -> None:
    apart = [{"machine": name, "cores": [0, 1]} for name in "ab"]
    together = [{"machine": "a", "cores": [0, 1]}, {"machine": "a", "cores": [0, 1]}]
    assert (distinct_cores(apart), distinct_cores(together)) == (4, 2)
    assert shared_machine(apart) is None
    assert shared_machine([]) is None
    assert shared_machine(together)
    four = Cell(strategy="ddp", devices=4, nodes=2)
    assert (oversubscribed(four, 4), oversubscribed(four, 2)) == (False, True)


def test_facts_that_the_kernel_does_not_know_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "class/net/eth0").mkdir(parents=True)
    speed = tmp_path / "class/net/eth0/speed"
    speed.write_text("25000\n")
    assert link_speed("eth0", tmp_path) == 25_000_000_000
    speed.write_text("-1\n")
    assert link_speed("eth0", tmp_path) is None
    assert link_speed("ib0", tmp_path) is None
    for number in (10, 2):
        folder = tmp_path / f"devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{number}-{number + 1}\n")
    assert numa_nodes(tmp_path) == ["2-3", "10-11"]


def test_interfaces_have_addresses() -> None:
    assert "127.0.0.1" in addresses_of("lo")
    assert interface_of("127.0.0.1") == "lo"
    assert addresses_of()[-1].startswith("127.")
    with pytest.raises(UsageError, match=r"'nosuch' .* there are: .*lo"):
        addresses_of("nosuch")


def test_a_rendezvous_is_readable_only_by_its_owner(tmp_path: Path) -> None:
    file = tmp_path / "rendezvous"
    told = Rendezvous("m", ("10.0.0.1", "127.0.0.1"), 4711, "00ff")
    told.write(file)
    assert file.stat().st_mode & 0o777 == 0o600
    assert Rendezvous.read(file) == told
    assert "00ff" not in repr(told)
    assert [p.name for p in tmp_path.iterdir()] == ["rendezvous"]


def test_a_lost_node_is_the_reason_unless_the_user_stopped_it() -> None:
    cell = Cell(strategy="ddp", devices=2, nodes=2)
    lost = FailureAnswer("failed", "connection closed by peer", failed_at=1.0, consequence=True)
    left = RankOutputs(answers={0: RankAnswer(0, failure=lost)})
    assert classify_end(cell, 2, left, "node n2 was lost").reason == "node n2 was lost"
    left.add(RankOutputs(interrupted=True))
    assert classify_end(cell, 2, left, "node n2 was lost").status == "interrupted"


def test_the_first_node_that_failed_is_the_cause() -> None:
    """Without answers from ranks, exit codes come in the order in which nodes answered."""
    left = RankOutputs()
    left.add(RankOutputs(exit_codes={1: -9}))
    left.add(RankOutputs(exit_codes={0: -15}))
    assert classify_end(Cell(strategy="ddp", devices=2, nodes=2), 2, left).reason.startswith(
        "rank 1 was killed by SIGKILL"
    )


def test_a_stop_before_the_nodes_have_met_is_an_interruption() -> None:
    """The first node is still busy and given up; the others have received nothing and are kept."""
    pairs = [socket.socketpair() for _ in range(2)]
    nodes = [
        Node(NodeConnection(near, "", b"", b""), {"number": i, "name": f"n{i}", "machine": "m"})
        for i, (near, _) in enumerate(pairs)
    ]
    specs = [TrialSpec(Cell(strategy="ddp", devices=2, nodes=2), DATA, 2, node=i) for i in range(2)]
    lost: list[str] = []

    def lose(node: Node, _: str) -> None:
        lost.append(node.name)

    asked = pairs[0][1]
    with when(lambda: select.select([asked], [], [], 0)[0], interrupt):
        outcome = Trial(lose, nodes, specs, None).run()
    assert (outcome.status, lost) == ("interrupted", ["n0"])
    for pair in pairs:
        for end in pair:
            end.close()


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(2, tmp_path / "rendezvous", "lo")
    yield made
    made.close()


def joined(coordinator: Nodes, number: int, name: str = "") -> NodeConnection:
    """Returns the agent's end of a connection that the coordinator has accepted as this node."""
    assert coordinator.rendezvous_file
    before = coordinator.connected.get(number)
    line = reach_coordinator(coordinator.rendezvous_file, 5)
    facts = {"number": number, "name": name or f"n{number}", "machine": "m"}
    line.send("hello", {**facts, "address": "127.0.0.1"})
    until(lambda: coordinator.connected.get(number) is not before)
    return line


def test_a_node_that_connects_again_during_its_trial_was_lost(
    coordinator: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This happens after a broken connection, or if two agents have the same number."""
    monkeypatch.setattr("harness.nodes.multi_node_trial.END_SECONDS", 0.0)
    first, second = joined(coordinator, 0), joined(coordinator, 1)
    replacing: list[NodeConnection] = []
    left = RankOutputs()

    def connect_again(*_: object) -> None:
        replacing.append(joined(coordinator, 1))

    def serve() -> None:
        answers = {"meet": ("met", 1), "run": ("step", (1, 0.1)), "stop": ("left", (0.0, left))}
        for word, answer in answers.items():
            assert first.receive()[0] == word
            first.send(*answer)

    thread = threading.Thread(target=serve)
    thread.start()
    cell = Cell(strategy="ddp", devices=2, nodes=2, time_limit_seconds=20)
    specs = [TrialSpec(cell, DATA, 2, node=number) for number in range(2)]
    outcome = Trial(coordinator.lose, coordinator.ready(2, 5), specs, connect_again).run()
    thread.join()
    assert outcome.status == "failed"
    assert outcome.reason.startswith("node n1 was lost: ")
    with contextlib.closing(first), contextlib.closing(second), contextlib.closing(replacing[0]):
        there = coordinator.ready(2, 5)
        there[1].line.send("warm", [])
        assert replacing[0].receive() == ("warm", []), "the new connection is used"


def test_agents_with_equal_numbers_are_named(coordinator: Nodes) -> None:
    """The number is 0 by default, so the last agent would replace all others without a reason."""
    with contextlib.closing(joined(coordinator, 0)):
        with contextlib.closing(joined(coordinator, 0)):
            assert "did not connect" in coordinator.shortfall(2), "it may have reconnected"
        with contextlib.closing(joined(coordinator, 0, "n1")):
            assert "n0 and n1 both joined as node 0" in coordinator.shortfall(2)


def test_a_resumed_run_repeats_trials_for_which_nodes_were_missing(tmp_path: Path) -> None:
    """The last attempt counts. Cells left out because of this host are not repeated."""
    cell = Cell(strategy="ddp", devices=2, nodes=2)
    left = LeftOut(Cell(strategy="horovod"), "unavailable", "horovod is not installed")
    store = Store(tmp_path)
    runner = Runner(store, Plan("run-1", "test", (cell,), 1, (left,)))
    store.write_run(RunRecord(**one_cell_run()))
    store.write_trial(left_out_record("run-1", left.cell, left.status, left.reason))
    missing = left_out_record("run-1", cell, "unavailable", "needs 2 nodes, 1 of 2 is there", 1, 0)
    store.write_trial(missing)
    assert [trial.key for trial in runner.open_trials()] == [TrialKey(cell.id, 0, 2)]
    assert runner.all_recorded, "a share of the run does not wait for nodes that may never return"
    store.write_trial(TrialRecord(**trial_row(cell, attempt=2)))
    assert runner.open_trials() == []
    results = cell_results(store.load().trials)
    assert {result.cell_id: (result.status, result.trials) for result in results} == {
        cell.id: ("ok", 1),
        left.cell.id: ("unavailable", 0),
    }


def test_a_host_whose_own_name_is_loopback_is_reached_by_its_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Debian's /etc/hosts has `127.0.1.1 n1`. Other names and addresses are used as given."""
    monkeypatch.setattr("socket.gethostname", lambda: "n1")
    monkeypatch.setattr("socket.gethostbyname", lambda host: "127.0.1.1")
    everywhere = addresses_of()
    for name in ("n1", "n1.example.org"):
        assert addresses_of_host(name) == [*everywhere, name]
        assert addresses_of_host(name, "lo")[0] == addresses_of("lo")[0]
    for other in ("localhost", "127.0.0.1", "10.0.0.1", "n2"):
        assert addresses_of_host(other) == [other]
    monkeypatch.setattr("socket.gethostbyname", lambda host: "10.0.0.1")
    assert addresses_of_host("n1") == ["n1"]


def test_a_coordinator_and_an_agent_meet_at_the_name_of_their_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "n1")
    monkeypatch.setattr("socket.gethostbyname", lambda host: "127.0.1.1")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    where = Rendezvous(machine_id(), ("n1",), port, new_key())
    nodes = Nodes(1, where, "lo")
    with contextlib.closing(nodes), contextlib.closing(reach_coordinator(where, 5)) as line:
        assert line.address.startswith("127.")
