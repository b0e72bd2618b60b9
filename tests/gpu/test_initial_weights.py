"""CPU and GPU generators give different weights, so every rank of a GPU cell draws on a GPU."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from harness.cell.cell import Cell
from harness.cell.training import Layout
from harness.seam.registry import make_strategy, strategies
from harness.worker import worker
from harness.worker.rank_answer import RankAnswer
from harness.worker.reporting import Heartbeat
from harness.worker.spec import TrialSpec
from harness.workloads import Workload, make_workload, prepare_data

OFFLOADED = [("fairscale_fsdp", {"cpu_offload": True}), ("fsdp2", {"cpu_offload": True})]
JOINS_FIRST = {
    "accelerate",
    "deepspeed",
    "deepspeed_moe",
    "deepspeed_pipeline",
    "horovod",
    "tiled_linear",
    "trainer",
    "ulysses",
    "ulysses_zero",
}
"""Strategies whose libraries join the other ranks before a model exists."""


class Drawn(Exception):
    def __init__(self, device: torch.device | None) -> None:
        self.device = device


def own_strategies() -> list[tuple[str, dict[str, Any]]]:
    """Returns the suite's installed strategies that build their model before joining ranks."""
    found = []
    for name, kind in strategies().items():
        here = all(importlib.util.find_spec(package) for package in kind.requires)
        if kind.__module__.startswith("harness.") and here and name not in JOINS_FIRST:
            found.append((name, {}))
    return found + [(name, options) for name, options in OFFLOADED if (name, {}) in found]


def cell_of(name: str, options: dict[str, Any]) -> tuple[Cell, Layout]:
    workload = "resnet-micro" if name == "sync_batch_norm" else "llama-nano"
    devices = {"single": 1, "three_d": 4}.get(name, 2)
    cell = Cell(strategy=name, options=options, workload=workload, devices=devices, device="cuda")
    return cell, make_strategy(cell).layout(devices)


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
@pytest.mark.parametrize(("name", "options"), own_strategies(), ids=str)
def test_every_rank_draws_its_weights_on_a_gpu(
    name: str,
    options: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This includes parameter servers and offloading ranks, which keep them in host memory."""
    cell, layout = cell_of(name, options)
    for rank in range(layout.processes):
        with monkeypatch.context() as patched:
            device = draws_on(cell, rank, layout, tmp_path, patched)
        assert device is not None
        assert device.type == "cuda", f"rank {rank} of {layout.processes} draws on {device}"


def test_no_strategy_bypasses_the_job() -> None:
    """A model built without the job would choose its own generator."""
    files = [*(Path(worker.__file__).parents[1] / "strategies").glob("*.py")]
    assert files
    for file in files:
        assert "job.workload.build(" not in file.read_text(), file.name


class Watch(TorchDispatchMode):
    """Records the devices on which random numbers are drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.devices: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.devices.add(args[0].device.type)
        return func(*args, **kwargs or {})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("keeps_on", ["cuda", "cpu"])
def test_random_numbers_come_from_the_gpu(keeps_on: str) -> None:
    """Wherever the model is kept, its weights are drawn on a GPU, here with fake CUDA tensors."""
    if os.environ.get("BENCH_FAKE_DEVICE") != "cuda":
        pytest.skip("needs torch's CUDA build: python -m tests.gpu.fake_cuda")
    from tests.gpu.fake_world import CopyableFakeMode, swap_if_changed

    workload, gpu = make_workload("llama-nano"), torch.device("cuda", 1)
    home = gpu if keeps_on == "cuda" else torch.device("cpu")
    with pytest.MonkeyPatch.context() as patch, CopyableFakeMode(), Watch() as watch:
        patch.setattr(torch.utils, "swap_tensors", swap_if_changed)
        model = workload.build(0, home, drawn_on=gpu)
    assert watch.devices == {"cuda"}
    assert {p.device.type for p in model.parameters()} == {keeps_on}
