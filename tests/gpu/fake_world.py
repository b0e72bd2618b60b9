"""One rank of a world of any size, which sets up a strategy and takes steps on fake tensors.

Rehearsals use the same rank; harness/planner/rehearsal/world.py lists its substitutions. Tensors
are on the device type in the environment variable BENCH_FAKE_DEVICE, by default `cpu`; `cuda` needs
tests/gpu/fake_cuda.py. Tests substitute two more parts:

- threads of DataParallel on CPUs run one after the other in the thread with the fake mode;
- RPC of a parameter server returns tensors of the right shapes on the host.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed import rpc

from harness.cell.cell import Cell
from harness.planner.rehearsal.world import (
    CompletedWork,
    CopyableFakeMode,
    Patch,
    Substitution,
    fake_batch,
    fake_rank,
    put,
    swap_if_changed,
)
from harness.seam.base import Strategy
from harness.seam.job import Job
from harness.seam.registry import validate
from harness.strategies import data_parallel, parameter_server
from harness.workloads import make_workload

__all__ = ["DEVICE", "CopyableFakeMode", "fake_batch", "one_rank", "swap_if_changed"]

DEVICE = os.environ.get("BENCH_FAKE_DEVICE", "cpu")


@contextlib.contextmanager
def one_rank(
    cell: Cell,
    rank: int,
    scratch: Path,
    strategy: Strategy | None = None,
) -> Iterator[tuple[Strategy, Job]]:
    """Yields the cell's strategy, or the given one, and the job of one of its ranks.

    Raises what `validate` raises.
    """
    workload = make_workload(cell.workload)
    strategy = strategy or validate(cell, workload)[0]
    layout = strategy.layout(cell.devices)
    serves = rank >= layout.processes - layout.servers
    on_gpu = cell.device == "cuda" and not serves
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    drawn_on = torch.device("cuda", 0) if cell.device == "cuda" and serves else device
    job = Job(cell, workload, layout, device, rank, scratch, weights_device=drawn_on)
    with fake_rank(strategy, job, MORE):
        yield strategy, job


def threads(job: Job) -> Iterator[Patch]:
    yield put(data_parallel, "ThreadPoolExecutor", lambda *_, **__: InThisThread())


class InThisThread:
    """Executor that does its work immediately, in the calling thread."""

    def map(self, function: Callable[..., Any], *items: Iterable[Any]) -> list[Any]:
        with torch.enable_grad():  # as in a new thread, whatever the caller's mode is
            return list(map(function, *items))


def server_or_worker(job: Job) -> Iterator[Patch]:
    """Fakes the server for a worker, or two pushes of each worker, one per step, for the server."""
    if not job.layout.servers:
        return

    def whole() -> list[Tensor]:
        assert job.train_state is not None
        return [torch.zeros_like(p, device="cpu") for p in job.train_state.model.parameters()]

    def push(to: str, function: object, arguments: tuple[int, list[Tensor]]) -> Any:
        devices = {gradient.device.type for gradient in arguments[1]}
        assert devices == {"cpu"}, f"RPC without device maps refuses tensors on {devices}"
        return whole(), 1.0

    workers = [*range(job.layout.data)] * 2
    pushes = ((worker, whole(), mock.Mock()) for worker in workers)
    yield put(parameter_server, "join", lambda job, tcp: None)
    yield put(rpc, "rpc_sync", push)
    yield put(rpc, "rpc_async", lambda *_: CompletedWork(torch.zeros(())))
    yield put(parameter_server, "next_push", lambda: next(pushes))
    yield put(parameter_server, "next_confirmation", lambda: 0)


MORE = (
    Substitution("threads of DataParallel", "the thread with the fake mode", threads),
    Substitution("RPC of a parameter server", "tensors of the right shapes", server_or_worker),
)
