"""The calls between workers and a parameter server: what workers send waits here, on the server,
for its training step."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Literal

from torch import Tensor

from harness.strategy.job import Job

Reply = tuple[list[Tensor], float]
"""New parameters, and the scale of the next loss."""
Push = tuple[int, list[Tensor], "Future[Reply]"]
"""A worker's rank, its gradients, and where it waits for the reply."""

_PUSHED: SimpleQueue[Push] = SimpleQueue()
_HEARD: SimpleQueue[int] = SimpleQueue()


def join(job: Job, tcp: bool) -> None:
    """Every process gets to know every other one; they are named by rank."""
    from torch.distributed import rpc

    if job.interface:
        os.environ["TP_SOCKET_IFNAME"] = job.interface
    only_tcp: dict[str, Any] = {"_transports": ["uv"], "_channels": ["basic"]} if tcp else {}
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=job.layout.data + 1,  # on the server, each worker's push waits in one
        rpc_timeout=job.cell.time_limit_seconds,
        **only_tcp,
    )
    rpc.init_rpc(
        f"rank{job.rank}",
        rank=job.rank,
        world_size=job.layout.processes,
        rpc_backend_options=options,
    )


def push(worker: int, gradients: list[Tensor]) -> Reply:
    """Called on the server: hands gradients to the training step and waits for its reply."""
    reply: Future[Reply] = Future()
    _PUSHED.put((worker, gradients, reply))
    return reply.result()


def confirm(worker: int) -> None:
    """Called on the server: the worker has its reply."""
    _HEARD.put(worker)


def next_push() -> Push:
    """Called by the server's training step: waits for a worker."""
    return _PUSHED.get()


def next_confirmation() -> int:
    return _HEARD.get()


def arrivals(workers: int, early: list[Push]) -> Iterator[Push]:
    """One push of each worker, as they come; a second one of a worker waits in `early` for the next
    step."""
    waiting = early.copy()
    seen: set[int] = set()
    early.clear()
    while len(seen) < workers:
        one = waiting.pop(0) if waiting else next_push()
        if one[0] in seen:
            early.append(one)
        else:
            seen.add(one[0])
            yield one


def confirmations(workers: int) -> None:
    """Waits until each worker has its reply."""
    for _ in range(workers):
        next_confirmation()


def waits() -> list[tuple[Any, str, Literal["communication"]]]:
    """Where worker and server wait for each other, for TrainState: RPC's threads are not
    torch.distributed's."""
    from torch.distributed import rpc

    here = sys.modules[__name__]
    return [
        (rpc, "rpc_sync", "communication"),
        (here, "next_push", "communication"),
        (here, "next_confirmation", "communication"),
    ]
