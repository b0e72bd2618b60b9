"""A GPU rank's cores, batches and synchronisation around its steps."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.cell.cell import Cell
from harness.cell.training import Layout
from harness.measure.peak_memory import MemoryMeter
from harness.seam.job import Job
from harness.worker.loop import Loop
from harness.worker.spec import TrialSpec
from harness.workloads import make_workload, prepare_data

SOCKETS = [range(16), range(16), range(16, 32), range(16, 32)]


def spec_of(cell: Cell, processes: int) -> TrialSpec:
    data = prepare_data(cell.data, make_workload(cell.workload), cell.sequence_length)
    return TrialSpec(cell, data, processes)


def pinned(
    monkeypatch: pytest.MonkeyPatch, devices: int, processes: int, cores: int = 32
) -> list[tuple[int, ...]]:
    """Returns each process's cores on a host of two sockets, each with 16 cores and two GPUs."""
    from harness.host import cores as module

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(Path, "exists", lambda _: False)  # no hardware threads
    near = SimpleNamespace(nearby_cores=lambda gpu: tuple(SOCKETS[gpu]))
    monkeypatch.setitem(sys.modules, "harness.host.gpu_inventory", near)  # type: ignore[arg-type]
    cell = Cell(strategy="ddp", workload="llama-nano", devices=devices, device="cuda")
    return list(module.pin(cell, processes, processes))  # type: ignore[arg-type]


def test_each_rank_gets_the_cores_near_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank is pinned to cores of its GPU's socket."""
    assert pinned(monkeypatch, 4, 4) == [tuple(range(n, n + 8)) for n in (0, 8, 16, 24)]


def test_a_process_that_drives_all_gpus_gets_the_cores_of_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert pinned(monkeypatch, 4, 1) == [tuple(range(32))]


def test_a_server_may_use_all_cores_and_takes_none_from_the_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert pinned(monkeypatch, 2, 3) == [tuple(range(8)), tuple(range(8, 16)), tuple(range(32))]


def test_cores_that_are_not_allowed_are_not_near(monkeypatch: pytest.MonkeyPatch) -> None:
    """If only one socket's cores are allowed, GPUs of both sockets share them."""
    assert pinned(monkeypatch, 4, 4, cores=4) == [(0,), (1,), (2,), (3,)]


def test_hardware_threads_stay_with_their_core() -> None:
    from harness.host.cores import share_cores

    cores = [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert share_cores(cores, [range(8), range(8)]) == [(0, 4, 1, 5), (2, 6, 3, 7)]
    assert share_cores(cores, [()] * 2) == [(0, 4, 1, 5), (2, 6, 3, 7)], "unknown"
    assert share_cores(cores[:1], [()] * 2) == [(0, 4), (0, 4)], "fewer cores than GPUs"


class Copies:
    """Stand-in for a GPU: copies to it stay in host memory, and their kind is recorded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pinned: set[int] = set()
        self.copies: list[tuple[bool, bool]] = []
        self.synchronized: list[torch.device] = []
        plain: Any = torch.Tensor.to

        def to(
            tensor: torch.Tensor, *where: Any, non_blocking: bool = False, **more: Any
        ) -> torch.Tensor:
            if not where or not isinstance(where[0], torch.device) or where[0].type != "cuda":
                return plain(tensor, *where, non_blocking=non_blocking, **more)
            self.copies.append((tensor.data_ptr() in self.pinned, non_blocking))
            return tensor

        def pin(tensor: torch.Tensor) -> torch.Tensor:
            copy = tensor.clone()
            self.pinned.add(copy.data_ptr())
            return copy

        monkeypatch.setattr(torch.Tensor, "to", to)
        monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
        monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronized.append)


def loop_on_gpus(devices: int, layout: Layout) -> Loop:
    cell = Cell(
        strategy="ddp", workload="llama-nano", sequence_length=32, devices=devices, device="cuda"
    )
    workload = make_workload(cell.workload)
    job = Job(cell, workload, layout, torch.device("cuda", 0), 0, Path())
    meter = MemoryMeter(torch.device("cpu"), None)
    return Loop(spec_of(cell, layout.processes), job, lambda batch: None, meter)


def test_batches_are_prepared_ahead_and_copied_from_pinned_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Copies do not block, and batches are right even if steps are fetched out of order."""
    gpu = Copies(monkeypatch)
    loop = loop_on_gpus(1, Layout())
    batches = [loop.batches.fetch(step) for step in (0, 1, 2, 5, 1)]
    assert gpu.copies == [(True, True)] * 10
    for batch, step in zip(batches, (0, 1, 2, 5, 1), strict=True):
        inputs, labels = loop.spec.data.batch(0, step, 8, slice(0, 8))
        assert batch.step == step
        assert torch.equal(batch.inputs, torch.from_numpy(inputs))
        assert torch.equal(batch.labels, torch.from_numpy(labels))


def test_a_step_ends_when_all_gpus_of_its_process_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """DataParallel drives several GPUs, and its step ends with the slowest."""
    gpu = Copies(monkeypatch)
    loop = loop_on_gpus(4, Layout(data=4, devices_per_process=4))
    loop.synchronize()
    assert gpu.synchronized == [torch.device("cuda", n) for n in range(4)]


def test_collectives_of_nccl_are_counted_as_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a reduce-scatter, gloo sends twice as much as NCCL's ring."""
    from harness.worker import rank_profile as module
    from harness.worker.rank_answer import RankAnswer

    monkeypatch.setattr(module, "_profiled", lambda *_: [])
    monkeypatch.setattr(module, "_counted", lambda *_: (None, False))
    train_state = SimpleNamespace(wire="gloo")
    for kind, wire in (("cuda", "ring"), ("cpu", "gloo")):
        job = SimpleNamespace(
            cell=Cell(strategy="ddp", warmup_steps=1),
            train_state=train_state,
            device=torch.device(kind),
        )
        loop = SimpleNamespace(job=job, steps=[], traffic=SimpleNamespace(sent=None))
        loop.run_step, loop.stop_counting, loop.per_step = (
            (lambda _: None),
            (lambda: None),
            (lambda _: None),
        )
        answer = module.profile_rank(loop, RankAnswer(0), None)  # type: ignore[arg-type]
        assert answer.wire == wire


def test_horovod_built_for_the_cpu_leaves_gpu_cells_unavailable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On CUDA tensors, a CPU build's background thread throws and shuts down."""
    from harness.cell.errors import Unavailable
    from harness.strategies import _horovod
    from harness.strategies.horovod import Horovod

    cell = Cell(strategy="horovod", workload="llama-nano", device="cuda")
    monkeypatch.setattr(_horovod, "built", lambda part: part != b"NCCLAllreduce")
    with pytest.raises(Unavailable, match="CPU"):
        Horovod().check(cell, make_workload(cell.workload))
    monkeypatch.setattr(_horovod, "built", lambda part: True)
    Horovod().check(cell, make_workload(cell.workload))
    assert Horovod().stand_in(cell) is None


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
    from harness.strategies import data_parallel

    cell = Cell(
        strategy="data_parallel",
        workload="llama-nano",
        sequence_length=32,
        devices=1,
        precision="fp16",
    )
    job = Job(cell, make_workload(cell.workload), Layout(), torch.device("cpu"), 0, Path())
    step_parts: dict[str, Any] = {}
    monkeypatch.setattr(torch.nn, "DataParallel", ThreadedReplica)
    monkeypatch.setattr(
        data_parallel, "standard_step", lambda job, model, optimizer: step_parts.update(model=model)
    )
    on_gpus = SimpleNamespace(
        **{
            name: getattr(job, name)
            for name in ("cell", "model", "optimizer", "register", "autocast", "workload")
        }
    )
    on_gpus.device = SimpleNamespace(type="cuda")
    data_parallel.DataParallel().setup(on_gpus)  # type: ignore[arg-type]
    with job.autocast():
        logits = job.workload.logits(step_parts["model"], torch.zeros(2, 32, dtype=torch.long))
    assert logits.dtype == torch.float16


@pytest.mark.parametrize(("device", "visible"), [("cpu", ""), ("cuda", "0,1")])
def test_ranks_of_cpu_cells_see_no_gpu(device: str, visible: str, tmp_path: Path) -> None:
    """On a GPU host, a library that chooses its device would take a GPU for a CPU cell."""
    code = f"""
import os
import subprocess
import sys
import threading
from pathlib import Path
from harness.cell.cell import Cell
from harness.worker.spec import TrialSpec
from harness.worker.worker import _prepare_process

cell = Cell(strategy="single", workload="llama-nano", device={device!r})
_prepare_process(TrialSpec(cell, None, 1, scratch={str(tmp_path)!r}, cores=((0,),)), 0)
Path({str(tmp_path / "visible")!r}).write_text(os.environ["CUDA_VISIBLE_DEVICES"])
"""
    place = {"RANK": "0", "LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "0,1"}
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        env={**os.environ, **place},
        cwd=Path(__file__).parents[2],
    )
    assert (tmp_path / "visible").read_text() == visible
