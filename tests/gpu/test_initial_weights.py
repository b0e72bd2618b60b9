"""CPU and GPU generators give different weights, so every rank of a GPU cell draws on a GPU."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from harness.cell.cell import Cell
from harness.cell.training import Layout
from harness.seam.registry import make_strategy
from harness.worker import worker
from harness.worker.rank_answer import RankAnswer
from harness.worker.reporting import Heartbeat
from harness.worker.spec import TrialSpec
from harness.workloads import Workload, make_workload, prepare_data

KEEPS_ELSEWHERE = [
    ("ddp", {}),
    ("parameter_server", {}),
    ("fairscale_fsdp", {"cpu_offload": True}),
    ("fsdp2", {"cpu_offload": True}),
]
"""Strategies that keep weights on the GPU, on a server, or in host memory."""


class Drawn(Exception):
    def __init__(self, device: torch.device | None) -> None:
        self.device = device


def draws_on(
    cell: Cell,
    rank: int,
    layout: Layout,
    scratch: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> torch.device | None:
    """Returns where a rank set up by the worker draws its weights, on a machine without GPUs."""

    def build(
        workload: Workload,
        seed: int,
        device: torch.device | None = None,
        saved_weights: bool = True,
        drawn_on: torch.device | None = None,
    ) -> None:
        raise Drawn(drawn_on or device)

    def join(*_: Any, rank: int, world_size: int, **__: Any) -> None:
        start(backend="fake", store=FakeStore(), rank=rank, world_size=world_size)

    start = dist.init_process_group
    world = layout.processes
    monkeypatch.setenv("LOCAL_RANK", str(min(rank, layout.devices - 1)))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(worker, "_require_cuda", lambda: None, raising=False)
    monkeypatch.setattr(worker, "MemoryMeter", lambda *_: SimpleNamespace())
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    meet = lambda where: iter([(dist.HashStore(), rank, world)])  # noqa: E731
    monkeypatch.setattr(rendezvous, "rendezvous", meet)
    monkeypatch.setattr(dist, "init_process_group", join)
    monkeypatch.setattr(Workload, "build", build)
    data = prepare_data(cell.data, make_workload(cell.workload), cell.sequence_length)
    spec = TrialSpec(cell, data, world, scratch=str(scratch))
    try:
        worker._train(spec, RankAnswer(rank), worker.RankProgress(Heartbeat(scratch, rank)))
    except Drawn as drawn:
        return drawn.device
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    raise AssertionError("the rank built no model")


@pytest.mark.filterwarnings("ignore")  # warnings of libraries
@pytest.mark.parametrize(("name", "options"), KEEPS_ELSEWHERE, ids=str)
def test_every_rank_draws_its_weights_on_a_gpu(
    name: str,
    options: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This includes parameter servers and offloading ranks, which keep them in host memory."""
    axes = {"workload": "llama-nano", "devices": 2, "device": "cuda"}
    cell = Cell(strategy=name, options=options, **axes)
    strategy = make_strategy(cell)
    for package in strategy.requires:
        pytest.importorskip(package)
    layout = strategy.layout(2)
    for rank in range(layout.processes):
        with monkeypatch.context() as patched:
            device = draws_on(cell, rank, layout, tmp_path, patched)
        assert device is not None
        assert device.type == "cuda", f"rank {rank} of {layout.processes} draws on {device}"


def test_no_strategy_bypasses_the_job() -> None:
    """A model built without the job, in any strategy, would choose its own generator."""
    files = [*(Path(worker.__file__).parents[1] / "strategies").glob("*.py")]
    assert files
    for file in files:
        assert "job.workload.build(" not in file.read_text(), file.name
