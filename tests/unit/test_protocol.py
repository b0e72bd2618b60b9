"""The agents' protocol: no exchange without the run's key, and messages that are only data."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.cell.cell import Cell
from harness.cell.errors import UsageError
from harness.launch.outcome import RankOutputs
from harness.nodes.coordinator import Nodes
from harness.nodes.protocol import (
    MOST_BYTES,
    NodeConnection,
    ProtocolError,
    decoded,
    encoded,
    reach_coordinator,
    secure,
)
from harness.nodes.rendezvous import Rendezvous, default_interface, new_key
from harness.worker.rank_answer import FailureAnswer, RankAnswer
from harness.worker.spec import TrialSpec
from harness.workloads import DataSource

FACTS = {"number": 0, "name": "n0", "machine": "m", "address": "127.0.0.1"}
SECRET = bytes.fromhex(new_key())


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(1, tmp_path / "rendezvous", "lo")
    yield made
    made.close()


def stranger(nodes: Nodes) -> socket.socket:
    where = Rendezvous.read(nodes.rendezvous_file)
    raw = socket.create_connection((where.addresses[0], where.port))
    raw.settimeout(10)
    return raw


def is_closed(raw: socket.socket) -> bool:
    """Whether the other side closed the connection after sending at most its nonce."""
    heard = b""
    try:
        while part := raw.recv(2**16):
            heard += part
    except ConnectionError:
        pass
    return len(heard) <= 32


def still_serves(nodes: Nodes) -> bool:
    """Whether an agent with the key can join, and is the only one."""
    line = reach_coordinator(nodes.rendezvous_file, 5)
    line.send("hello", FACTS)
    there = nodes.ready(1, 5)
    with contextlib.closing(line):
        return [node.facts for node in there] == [FACTS] and list(nodes.connected) == [0]


def joined(secret: bytes = SECRET) -> tuple[NodeConnection, NodeConnection]:
    """Returns connected ends of a coordinator and an agent."""
    near, far = socket.socketpair()
    ends: list[NodeConnection] = []
    thread = threading.Thread(target=lambda: ends.append(secure(far, secret, coordinator=False)))
    thread.start()
    coordinator = secure(near, SECRET, coordinator=True)
    thread.join()
    return coordinator, ends[0]


class Tapped(socket.socket):
    """Socket that records what it sends."""

    sent = b""

    def sendall(self, data: bytes, flags: int = 0) -> None:  # type: ignore[override]
        self.sent += data
        super().sendall(data, flags)


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n" * 8,
        pickle.dumps(("hello", FACTS)) * 4,
        random.Random(1).randbytes(10_000_000),
    ],
    ids=["no key", "a pickle", "10 MB of noise"],
)
def test_a_stranger_is_shown_the_door(nodes: Nodes, said: bytes) -> None:
    with stranger(nodes) as raw:
        with contextlib.suppress(OSError):  # closed in the middle of the noise
            raw.sendall(said)
        assert is_closed(raw)
    assert still_serves(nodes)


@pytest.mark.parametrize("coordinator", [True, False])
def test_another_key_is_refused_by_both_sides(coordinator: bool) -> None:
    near, far = socket.socketpair()
    failures: list[BaseException] = []

    def other() -> None:
        try:
            secure(far, b"another key", coordinator=not coordinator)
        except (OSError, EOFError) as error:
            failures.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    with pytest.raises((ProtocolError, EOFError)):
        secure(near, SECRET, coordinator=coordinator)
    thread.join()
    assert failures


def test_a_recorded_connection_cannot_be_played_again(nodes: Nodes) -> None:
    where = Rendezvous.read(nodes.rendezvous_file)
    raw = Tapped()
    raw.connect((where.addresses[0], where.port))
    with contextlib.closing(secure(raw, where.secret, coordinator=False)) as line:
        # This goes through the tapped socket.
        line.send("hello", FACTS)
        assert nodes.ready(1, 5)
        recorded = raw.sent
    nodes.ready(1, 0)  # notices that the agent has left
    with stranger(nodes) as again:
        again.sendall(recorded)
        assert is_closed(again)
    assert nodes.connected == {}
    assert still_serves(nodes)


def test_no_message_is_taken_twice_or_changed() -> None:
    coordinator, agent = joined()
    tapped = Tapped(fileno=os.dup(coordinator.connection.fileno()))
    coordinator.connection.close()
    coordinator.connection = tapped
    coordinator.send("warm", ["torch"])
    assert agent.receive() == ("warm", ["torch"])
    tapped.sendall(tapped.sent)
    with pytest.raises(ProtocolError, match="run's key"):
        agent.receive()
    coordinator.close(), agent.close()
    coordinator, agent = joined()
    changed = bytearray(tapped.sent[: len(tapped.sent) // 2])
    changed[-40] ^= 1
    coordinator.connection.sendall(changed)
    with pytest.raises(ProtocolError, match="run's key"):
        agent.receive()
    coordinator.close(), agent.close()


@pytest.mark.parametrize("said", [b"", b"half of the nonce"])
def test_silence_ends_within_the_time_for_handshakes(
    nodes: Nodes, said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.nodes.protocol.HANDSHAKE_SECONDS", 0.3)
    with stranger(nodes) as raw:
        raw.sendall(said)
        assert is_closed(raw)
    assert still_serves(nodes)


def test_a_crowd_of_silent_strangers_keeps_no_agent_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Agents retry; at most `max_unauthenticated` threads serve strangers."""
    monkeypatch.setattr("harness.nodes.protocol.HANDSHAKE_SECONDS", 1)
    monkeypatch.setattr(Nodes, "max_unauthenticated", 4)
    nodes = Nodes(1, tmp_path / "rendezvous", "lo")
    threads = threading.active_count()
    crowd = [stranger(nodes) for _ in range(40)]
    assert threading.active_count() <= threads + 4
    assert still_serves(nodes)
    for raw in crowd:
        raw.close()
    nodes.close()


def test_half_a_message_and_silence_is_a_lost_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.nodes.protocol.HANDSHAKE_SECONDS", 1)
    coordinator, agent = joined()
    agent.connection.sendall(b"\0\0\0\x10\0\0\0\0half")
    with pytest.raises(BlockingIOError):
        coordinator.receive()
    coordinator.close(), agent.close()


def test_a_message_may_not_claim_any_size() -> None:
    coordinator, agent = joined()
    agent.connection.sendall((MOST_BYTES + 1).to_bytes(4, "big") * 2)
    with pytest.raises(ProtocolError, match="bytes"):
        coordinator.receive()
    coordinator.close(), agent.close()


def test_messages_arrive_unchanged() -> None:
    data = DataSource("text", "t", "f", None, ((0, 9),), 4)
    cell = Cell(strategy="ddp", devices=2, nodes=2, options={"bucket_cap_mb": 1.5})
    spec = TrialSpec(cell, data, 2, token="x", cores=((0,), (1,)), rendezvous=("10.0.0.1", 7))
    failed = FailureAnswer("failed", "ü", 1.0, consequence=False, holding={"parameters": 8})
    left = (1.5, RankOutputs({0: RankAnswer(0, failure=failed)}, {0: "log"}, exit_codes={1: -9}))
    coordinator, agent = joined()
    for word, value in (("run", spec), ("left", left), ("stop", None), ("step", (3, 0.5))):
        coordinator.send(word, value, padding=5)
        assert agent.receive() == (word, value)
    coordinator.close(), agent.close()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b'["run"]',
        b'["run", {"cell": 1}]',
        b'["measure", ["10.0.0.1", "; reboot"]]',
        b'["exec", "import os"]',
        b'[["run"], null]',
        b"[" * 100_000,
        pickle.dumps(("stop", None)),
        encoded("stop")[:-1],
    ],
)
def test_malformed_messages_are_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        decoded(body)


def test_an_agent_obeys_no_file_that_others_may_have_written(tmp_path: Path) -> None:
    file = tmp_path / "rendezvous"
    Rendezvous("m", ("127.0.0.1",), 1, new_key()).write(file)
    file.chmod(0o640)
    with pytest.raises(UsageError, match="rendezvous"):
        reach_coordinator(file, 1)


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"machine": 1}', "null"])
def test_a_file_that_no_coordinator_wrote_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "rendezvous"
    file.write_text(content)
    file.chmod(0o600)
    with pytest.raises(UsageError, match="rendezvous"):
        reach_coordinator(file, 1)


def test_the_default_route_names_the_interface(tmp_path: Path) -> None:
    table = tmp_path / "route"
    head = "Iface\tDestination\tGateway\tFlags\tRefCnt\n"
    table.write_text(head + "docker0\t0011AC00\t0\t0001\t0\neth1\t00000000\t0102A8C0\t0003\t0\n")
    assert default_interface(table) == "eth1"
    table.write_text(head)
    assert default_interface(table) is None
