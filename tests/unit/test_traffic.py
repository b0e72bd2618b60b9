"""Retained states, and bytes sent and written, on handmade tensors, sockets and files."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.cell.cell import Cell
from harness.cell.training import States
from harness.measure.memory_kinds import retained_by, state_bytes
from harness.measure.rank_traffic import (
    MOST_LOOKS,
    RankTraffic,
    disk_bytes,
    folder_bytes,
    tcp_bytes_sent,
)
from harness.seam.registry import make_strategy
from harness.worker.rank_answer import Offload
from harness.workloads.counts import ModelFacts
from tests.unit.recording import answer, figures
from tests.unit.test_measure import CELL, FACTS


def test_a_storage_counts_once_for_its_first_tensor() -> None:
    """Two parameters are views of a flat buffer of 10 floats; a bucket has only a known size."""
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


def test_tensors_on_another_device_count_as_host() -> None:
    kinds, _ = state_bytes(
        [("optimizer", "m", torch.zeros(3)), ("parameters", "p", torch.zeros(2, device="meta"))],
        "meta",
    )
    assert (kinds["host"], kinds["optimizer"]) == (12, 0)


def test_a_walk_finds_parameters_gradients_buffers_and_moments() -> None:
    """AdamW keeps two moments for each of 12 elements, and a step number for each of 4 tensors."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    kinds, buffers = state_bytes(retained_by(model, [optimizer]), "cpu")
    assert (kinds["parameters"], kinds["gradients"]) == (12 * 4, 12 * 4)
    assert kinds["optimizer"] == 2 * 12 * 4 + 4 * 4
    assert buffers["model buffer 1.running_mean"] == 8


TEN = ModelFacts(("a",), 10, 0, (10,), buffer_bytes=100, scale_bytes=60)
"""Ten fp32 parameters, 40 bytes of buffers, and 60 of scales."""


def cell(strategy: str, **axes: Any) -> Cell:
    return Cell(**{"strategy": strategy, "devices": 2, "workload": "llama-nano", **axes})


def sent(one: Cell, facts: ModelFacts = TEN) -> float | None:
    strategy = make_strategy(one)
    return strategy.traffic(one, strategy.layout(one.devices), facts)


def states(one: Cell, facts: ModelFacts = TEN) -> States:
    strategy = make_strategy(one)
    kept = strategy.states(one, strategy.layout(one.devices), facts)
    assert kept is not None
    return kept


def test_scales_are_kept_but_not_broadcast() -> None:
    assert sent(cell("ddp")) == 40 + 40 / 2
    assert sent(cell("zero_redundancy")) == 40 + (40 + 40) / 2
    assert states(cell("horovod", options={"fusion_threshold_mib": 1})).library == 2**20 + 100


@pytest.mark.parametrize("mixed", [False, True])
def test_gathered_parameters_take_their_own_width(mixed: bool) -> None:
    """Without blocks, all gradients follow all parameters, and then their fp32 copy."""
    options = {"reshard_after_forward": False, "mixed_precision": mixed}
    kept = states(cell("fsdp2", precision="bf16", options=options))
    assert kept.transient == (20 + 40 if mixed else 40 + 40)


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_offloaded_shards_are_not_on_the_gpu(strategy: str) -> None:
    kept = states(cell(strategy, device="cuda", options={"cpu_offload": True}))
    assert (kept.parameters, kept.optimizer, kept.library) == (0, 0, 100)


def test_a_starting_point_in_host_memory_is_not_on_the_gpu() -> None:
    on_cpu, on_gpu = (states(cell("diloco", device=device)) for device in ("cpu", "cuda"))
    assert (on_cpu.library, on_gpu.library) == (140, 100)


@pytest.mark.parametrize(
    "one",
    [cell("deepspeed")],
    ids=lambda one: str(one.strategy),
)
def test_half_weights_without_zero_keep_half_moments(one: Cell) -> None:
    """Ten parameters and two moments of each. Gradients, their flat copy and its fp32 copy."""
    half = ModelFacts(("a",), 10, 0, (10,), parameter_bytes=20, trained_bytes=20)
    assert states(one, half) == States(parameters=20, optimizer=40, transient=20 + 20 + 40)


@pytest.mark.parametrize(("engine", "stage"), [("zero2", 2), ("zero3", 3)])
def test_an_engine_sends_what_deepspeed_sends(engine: str, stage: int) -> None:
    by_deepspeed = sent(cell("deepspeed", options={"stage": stage}))
    assert by_deepspeed
    assert sent(cell("accelerate", options={"engine": engine})) == by_deepspeed


def test_biases_in_tiles_may_be_kept_whole() -> None:
    """A bias of 512 elements is above the threshold of 200, and its four tiles are below it.

    Stage 3 gathers them once, after the update. The classifier stays gathered until backward.
    """
    path = "bert.encoder.layer.0.intermediate.dense"
    names = (f"{path}.weight", f"{path}.bias", "classifier.weight")
    sizes = (512 * 128, 512, 10 * 128)
    options = {"persistent_elements": 200, "bucket_elements": 1}
    one = cell("tiled_linear", workload="bert-micro", options=options)
    gathered_or_scattered = 3 * sum(sizes) - 512 - 10 * 128
    assert sent(one, ModelFacts(names, sum(sizes), 0, sizes)) == 4 * gathered_or_scattered / 2


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
            server.sendall(b"y" * 1000)  # outside the measured steps
            client.recv(1000)
            assert (traffic.sent, traffic.steps) == (60_000, 2)
            traffic.start()
    traffic.stop(steps=1)
    assert traffic.sent is None, "the connection was closed: its bytes are no longer known"
    assert tcp_bytes_sent() is not None


def test_unread_bytes_belong_to_the_step_that_sent_them() -> None:
    """The receiver's window is full, and the kernel holds the rest until it reads."""
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
    assert given < 50_000_000, "the kernel took everything, so nothing was left to send"
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
        os.fdatasync(file.fileno())
    after = disk_bytes()
    assert after is not None
    assert folder_bytes(tmp_path) == 1_000_000
    if after[1] == before[1]:
        pytest.skip("the tests' folder is not on a block device")
    assert after[1] - before[1] >= 1_000_000


def test_columns_of_states_and_traffic_are_filled() -> None:
    """Disk bytes are summed over two ranks; the folder, which both share, counts once."""
    disk = Offload(read=5.0, written=7.0, folder_bytes=100)
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


def test_endless_sending_is_not_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter(range(100))
    monkeypatch.setattr("harness.measure.rank_traffic.tcp_bytes_sent", lambda: next(readings))
    traffic = RankTraffic(over_tcp=True)
    traffic.start()
    traffic.stop(1)
    assert traffic.sent == MOST_LOOKS + 2
