"""A GPU rank's cores, batches and synchronisation around its steps."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.cell.cell import Cell
from harness.cell.training import Layout
from harness.host import cores as host_cores
from harness.host.cores import oversubscribed, share_cores
from harness.measure.peak_memory import MemoryMeter
from harness.seam.job import Job
from harness.strategies import data_parallel
from harness.worker import rank_profile
from harness.worker.loop import Loop
from harness.worker.rank_answer import RankAnswer
from harness.worker.spec import TrialSpec
from harness.workloads import make_workload, prepare_data

SOCKETS = [range(16), range(16), range(16, 32), range(16, 32)]


@pytest.mark.parametrize(
    ("devices", "processes", "allowed", "expected"),
    [
        (4, 4, 32, [range(n, n + 8) for n in (0, 8, 16, 24)]),
        (4, 1, 32, [range(32)]),
        (2, 3, 32, [range(8), range(8, 16), range(32)]),
        (4, 4, 4, [range(n, n + 1) for n in range(4)]),
    ],
    ids=["near each rank's GPU", "DataParallel", "a server takes none", "one socket allowed"],
)
def test_each_process_gets_the_cores_near_its_gpus(
    monkeypatch: pytest.MonkeyPatch,
    devices: int,
    processes: int,
    allowed: int,
    expected: list[range],
) -> None:
    """The host has two sockets, each with 16 cores and two GPUs."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(allowed)))
    monkeypatch.setattr(host_cores, "quota_cores", lambda: None)
    monkeypatch.setattr(Path, "exists", lambda _: False)  # no hardware threads
    near = SimpleNamespace(nearby_cores=lambda gpu: tuple(SOCKETS[gpu]))
    monkeypatch.setitem(sys.modules, "harness.host.gpu_inventory", near)  # type: ignore[arg-type]
    cell = Cell(strategy="ddp", workload="llama-nano", devices=devices, device="cuda")
    pinned = host_cores.pin(cell, processes, processes)
    assert pinned == tuple(map(tuple, expected))


def test_hardware_threads_stay_with_their_core() -> None:
    cores = [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert share_cores(cores, [range(8), range(8)]) == [(0, 4, 1, 5), (2, 6, 3, 7)]
    assert share_cores(cores, [()] * 2) == [(0, 4, 1, 5), (2, 6, 3, 7)], "unknown"
    assert share_cores(cores[:1], [()] * 2) == [(0, 4), (0, 4)], "fewer cores than GPUs"


def test_a_rank_on_a_gpu_needs_one_core() -> None:
    cell = Cell(strategy="ddp", devices=8, global_batch=8, threads_per_device=4)
    on_gpus = cell.model_copy(update={"device": "cuda"})
    assert [oversubscribed(cell, there) for there in (31, 32, None)] == [True, False, False]
    assert [oversubscribed(on_gpus, there) for there in (7, 8, None)] == [True, False, False]
    assert oversubscribed(on_gpus, 8, processes=9), "a parameter server"


def loop_on_gpus(monkeypatch: pytest.MonkeyPatch, devices: int, layout: Layout) -> Loop:
    """Returns a rank's loop, for which copies to a GPU stay in host memory."""
    plain: Any = torch.Tensor.to

    def to(tensor: torch.Tensor, *where: Any, **more: Any) -> torch.Tensor:
        return tensor if torch.device("cuda", 0) in where else plain(tensor, *where, **more)

    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    axes = {"sequence_length": 32, "devices": devices, "device": "cuda"}
    cell = Cell(strategy="ddp", workload="llama-nano", **axes)
    workload = make_workload(cell.workload)
    data = prepare_data(cell.data, workload, cell.sequence_length)
    job = Job(cell, workload, layout, torch.device("cuda", 0), 0, Path())
    meter = MemoryMeter(torch.device("cpu"), None)
    return Loop(TrialSpec(cell, data, layout.processes), job, lambda batch: None, meter)


def test_batches_prepared_ahead_are_right_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = loop_on_gpus(monkeypatch, 1, Layout())
    for step in (0, 1, 2, 5, 1):
        batch = loop.batches.fetch(step)
        inputs, labels = loop.spec.data.batch(0, step, 8, slice(0, 8))
        assert batch.step == step
        assert torch.equal(batch.inputs, torch.from_numpy(inputs))
        assert torch.equal(batch.labels, torch.from_numpy(labels))
    assert loop.batches._pool is not None
    loop.batches._pool.shutdown()


def test_a_step_ends_when_all_gpus_of_its_process_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """DataParallel drives several GPUs, and its step ends with the slowest."""
    ended: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", ended.append)
    loop_on_gpus(monkeypatch, 4, Layout(data=4, devices_per_process=4)).synchronize()
    assert ended == [torch.device("cuda", n) for n in range(4)]


@pytest.mark.parametrize(("device", "wire"), [("cuda", "ring"), ("cpu", "gloo")])
def test_collectives_of_nccl_are_counted_as_rings(
    monkeypatch: pytest.MonkeyPatch, device: str, wire: str
) -> None:
    """For a reduce-scatter, gloo sends twice as much as NCCL's ring."""
    monkeypatch.setattr(rank_profile, "_profiled", lambda *_: [])
    monkeypatch.setattr(rank_profile, "_counted", lambda *_: (None, False))
    job = SimpleNamespace(
        cell=Cell(strategy="ddp", warmup_steps=1),
        train_state=SimpleNamespace(wire="gloo"),
        device=torch.device(device),
    )
    nothing = dict.fromkeys(("run_step", "stop_counting", "per_step"), lambda *_: None)
    loop: Any = SimpleNamespace(job=job, steps=[], traffic=SimpleNamespace(sent=None), **nothing)
    answer = rank_profile.profile_rank(loop, RankAnswer(0), None)  # type: ignore[arg-type]
    assert answer.wire == wire


class ThreadedReplica(torch.nn.Module):
    """Calls its module as torch's parallel_apply calls a replica: in a new thread that only knows
    whether autocast is on."""

    def __init__(self, module: torch.nn.Module, device_ids: list[int]) -> None:
        super().__init__()
        self.module = module

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        logits: list[torch.Tensor] = []
        enabled = torch.is_autocast_enabled("cpu")

        def replica() -> None:
            with torch.autocast("cpu", enabled=enabled):
                out = self.module(inputs)
                logits.append(out if isinstance(out, torch.Tensor) else out.logits)

        thread = threading.Thread(target=replica)
        thread.start()
        thread.join()
        return logits[0]


def test_replicas_of_data_parallel_compute_in_the_cells_precision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Replicas' threads get no autocast dtype from torch: they use fp16 on GPUs, bf16 on CPUs."""
    axes = {"sequence_length": 32, "devices": 1, "precision": "fp16"}
    cell = Cell(strategy="data_parallel", workload="llama-nano", **axes)
    job = Job(cell, make_workload(cell.workload), Layout(), torch.device("cpu"), 0, Path())
    models: list[Any] = []
    monkeypatch.setattr(torch.nn, "DataParallel", ThreadedReplica)
    monkeypatch.setattr(
        data_parallel, "standard_step", lambda job, model, optimizer: models.append(model)
    )
    names = ("cell", "model", "optimizer", "register", "autocast", "workload")
    parts = {name: getattr(job, name) for name in names}
    on_gpus: Any = SimpleNamespace(**parts, device=SimpleNamespace(type="cuda"))
    data_parallel.DataParallel().setup(on_gpus)
    with job.autocast():
        logits = job.workload.logits(models[0], torch.zeros(2, 32, dtype=torch.long))
    assert logits.dtype == torch.float16


def test_data_parallel_on_one_gpu_or_a_cpu_is_labelled() -> None:
    for device, devices, labelled in (("cuda", 1, True), ("cuda", 2, False), ("cpu", 2, True)):
        cell = Cell(strategy="data_parallel", device=device, devices=devices)
        strategy = data_parallel.DataParallel()
        assert (strategy.stand_in(cell) is not None) == labelled
