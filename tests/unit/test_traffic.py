"""What is kept between steps, what was sent, what was written: on tensors, sockets and files made
for it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from pathlib import Path

import pytest
import torch

from harness.measure.memory_kinds import retained_by, state_bytes
from harness.measure.rank_traffic import (
    MOST_LOOKS,
    RankTraffic,
    disk_bytes,
    folder_bytes,
    tcp_bytes_sent,
)
from harness.spec.cell import Cell
from harness.spec.training import States
from harness.strategy.formulas import model_states, whole_model_states
from harness.worker.rank_answer import Offload
from harness.workloads.counts import ModelFacts
from tests.unit.recording import answer, figures
from tests.unit.test_measure import CELL, FACTS


def test_a_storage_counts_once_for_the_first_that_shows_it() -> None:
    """A flat buffer of 10 floats, two parameters that are views of it, and a bucket known by its
    size only."""
    flat = torch.zeros(10)
    kinds, buffers = state_bytes(
        [
            ("parameters", "a", flat[:4]),
            ("parameters", "b", flat[4:]),
            ("library", "flat", flat),
            ("library", "bucket", 100),
            ("library", "bucket", 20),
            ("optimizer", "m", torch.zeros(3, dtype=torch.bfloat16)),
        ],
        "cpu",
    )
    assert kinds == {
        "parameters": 40,
        "gradients": 0,
        "optimizer": 6,
        "library": 120,
        "host": 0,
    }
    assert buffers == {"bucket": 120}


def test_what_lies_on_another_device_is_told_apart() -> None:
    kinds, _ = state_bytes(
        [("optimizer", "m", torch.zeros(3)), ("parameters", "p", torch.zeros(2, device="meta"))],
        "meta",
    )
    assert (kinds["host"], kinds["optimizer"]) == (12, 0)


def test_a_walk_finds_parameters_gradients_buffers_and_moments() -> None:
    """Linear 3 -> 2 with bias is 8 elements; AdamW keeps two moments of each and a step number per
    tensor."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    kinds, buffers = state_bytes(retained_by(model, [optimizer]), "cpu")
    assert (kinds["parameters"], kinds["gradients"]) == (12 * 4, 12 * 4)
    assert kinds["optimizer"] == 2 * 12 * 4 + 4 * 4
    assert buffers["model buffer 1.running_mean"] == 8


def test_formulas_by_hand() -> None:
    """10 parameters, 8 of them trained, fp32: AdamW keeps 8 bytes of each trained one, SGD 4; DDP a
    bucket of the gradients."""
    facts = ModelFacts(("a", "b"), 10, 0, (5, 3))
    assert model_states(Cell(strategy="x"), facts) == States(
        parameters=40, optimizer=64, transient=32
    )
    assert model_states(Cell(strategy="x", optimizer="sgd"), facts, shards=2) == States(
        parameters=20, optimizer=16, transient=16
    )
    assert whole_model_states(Cell(strategy="x"), facts) == States(
        parameters=40, optimizer=64, library=32, transient=32
    )
    assert whole_model_states(Cell(strategy="x"), facts).total == 136


def test_bytes_sent_are_the_payload_of_this_processs_connections() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with (
            socket.create_connection(listener.getsockname()) as client,
            listener.accept()[0] as server,
        ):
            traffic = RankTraffic(over_tcp=True)
            traffic.start()
            for _ in range(2):
                client.sendall(b"x" * 30_000)
            received = 0
            while received < 60_000:
                received += len(server.recv(65536))
            traffic.stop(steps=2)
            server.sendall(b"y" * 1000)  # outside of the stretch
            client.recv(1000)
            assert (traffic.sent, traffic.steps) == (60_000, 2)
            traffic.start()
    traffic.stop(steps=1)
    assert traffic.sent is None, "the connection was closed: its bytes are no longer known"
    assert tcp_bytes_sent() is not None


def test_what_the_other_process_has_not_read_belongs_to_the_step_that_sent_it() -> None:
    """Its window is full, and the kernel holds the rest until it reads."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
        with client, server:
            client.setblocking(False)
            traffic, given = RankTraffic(over_tcp=True), 0
            traffic.start()
            with contextlib.suppress(BlockingIOError):
                while given < 50_000_000:
                    given += client.send(b"x" * 1_000_000)
            traffic.stop(steps=1)
            assert traffic.sent == given
            traffic.start()
            received = 0
            while received < given:
                received += len(server.recv(1_000_000))
            traffic.stop(steps=1)
    assert given < 50_000_000, "the kernel took all: nothing was left to be sent"
    assert traffic.sent == given


def test_what_nccl_sends_is_unknown_not_zero() -> None:
    traffic = RankTraffic(over_tcp=False)
    traffic.start()
    traffic.stop(steps=1)
    assert traffic.sent is None


def test_bytes_written_to_a_disk(tmp_path: Path) -> None:
    before = disk_bytes()
    assert before is not None
    with open(tmp_path / "swap", "wb") as file:
        file.write(os.urandom(1_000_000))
        file.flush()
        os.fsync(file.fileno())
    after = disk_bytes()
    assert after is not None
    assert folder_bytes(tmp_path) == 1_000_000
    if after[1] == before[1]:
        pytest.skip("the folder of the tests is not on a block device")
    assert after[1] - before[1] >= 1_000_000


def test_columns_of_states_and_traffic() -> None:
    """Two ranks; the disk's bytes are summed over them, the folder is one that both see."""
    disk = Offload(read=5.0, written=7.0, kept=100)
    row = figures(
        CELL,
        [answer(0, [1.0], offload=disk), answer(1, [1.0], offload=disk, sent_bytes_per_step=30.0)],
        FACTS,
        None,
    )
    assert row.parameter_bytes == (20, 20)
    assert row.sent_bytes_per_step == (20.0, 30.0)
    assert (
        row.offload_read_bytes_per_step,
        row.offload_written_bytes_per_step,
        row.offload_kept_bytes,
    ) == (10.0, 14.0, 100)
    assert json.loads(row.library_buffers) == {"buckets": 20}
    unknown = figures(
        CELL, [answer(0, [1.0]), answer(1, [1.0], sent_bytes_per_step=None)], FACTS, None
    )
    assert unknown.sent_bytes_per_step == ()
    assert unknown.offload_read_bytes_per_step is None


def test_what_a_thread_still_sends_after_the_last_step_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    readings = iter([100, 110, 125, 125, 125])
    monkeypatch.setattr("harness.measure.rank_traffic.tcp_bytes_sent", lambda: next(readings))
    traffic = RankTraffic(over_tcp=True)
    traffic.start()
    traffic.stop(1)
    assert traffic.sent == 25


def test_who_never_stops_sending_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter(range(100))
    monkeypatch.setattr("harness.measure.rank_traffic.tcp_bytes_sent", lambda: next(readings))
    traffic = RankTraffic(over_tcp=True)
    traffic.start()
    traffic.stop(1)
    assert traffic.sent == MOST_LOOKS + 2
