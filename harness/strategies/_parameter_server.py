"""Worker and server steps of a parameter server, and the RPC calls between them."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypedDict

import torch
from torch import Tensor, nn

from harness.strategy import Batch, Job, TrainStep, loss_scaler
from harness.strategy.job import Wait

if TYPE_CHECKING:
    from torch.amp.grad_scaler import GradScaler
    from torch.optim import Optimizer

Reply = tuple[list[Tensor], float]
"""New parameters, and the scale of the next loss."""
Push = tuple[int, list[Tensor], "Future[Reply]"]
"""A worker's rank, its gradients, and the future of its reply."""

_PUSHED: SimpleQueue[Push] = SimpleQueue()
_HEARD: SimpleQueue[int] = SimpleQueue()


class TensorPipe(TypedDict, total=False):
    """Transports and channels of RPC; TensorPipe chooses those left out."""

    _transports: list[str]
    _channels: list[str]


def join(job: Job, tcp: bool) -> None:
    """Connects all processes by RPC, named by rank."""
    from torch.distributed import rpc

    only_tcp: TensorPipe = {"_transports": ["uv"], "_channels": ["basic"]} if tcp else {}
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=job.layout.data + 1,  # on the server, each worker's push blocks one
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
    """Passes gradients to the training step and waits for its reply; runs on the server."""
    reply: Future[Reply] = Future()
    _PUSHED.put((worker, gradients, reply))
    return reply.result()


def confirm(worker: int) -> None:
    """Records that the worker has its reply; runs on the server."""
    _HEARD.put(worker)


def next_push() -> Push:
    """Waits for a worker's push; runs in the server's training step."""
    return _PUSHED.get()


def next_confirmation() -> int:
    """Waits for a worker's confirmation; runs in the server's training step."""
    return _HEARD.get()


def arrivals(workers: int, early: list[Push]) -> Iterator[Push]:
    """Yields one push per worker in order of arrival; keeps second pushes in `early` for the next
    step."""
    waiting = early.copy()
    seen: set[int] = set()
    early.clear()
    while len(seen) < workers:
        pushed = waiting.pop(0) if waiting else next_push()
        if pushed[0] in seen:
            early.append(pushed)
        else:
            seen.add(pushed[0])
            yield pushed


def confirmations(workers: int) -> None:
    for _ in range(workers):
        next_confirmation()


def waits() -> list[Wait]:
    """Returns waits for TrainState: torch.distributed does not see RPC threads."""
    from torch.distributed import rpc

    here = sys.modules[__name__]
    return [
        (rpc, "rpc_sync", "communication"),
        (here, "next_push", "communication"),
        (here, "next_confirmation", "communication"),
    ]


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def server_optimizer(job: Job, model: nn.Module, updates: int) -> Optimizer:
    """Returns the cell's optimizer, scaled for this many updates per step.

    To match one reference update, each of N uses 1/N of the learning rate and the N-th root of each
    moment's decay factor.
    """
    optimizer = job.optimizer(trained(model))
    for group in optimizer.param_groups:
        group["lr"] /= updates
        if "betas" in group:
            group["betas"] = tuple(beta ** (1 / updates) for beta in group["betas"])
        else:  # SGD's moment is a sum, which grows with its decay factor
            kept = group["momentum"] ** (1 / updates)
            group["lr"] *= (1 - kept) / (1 - group["momentum"])
            group["momentum"] = kept
    return optimizer


def work(job: Job, model: nn.Module) -> TrainStep:
    """Returns a worker's step: forward, backward, send gradients, receive parameters."""
    from torch.distributed import rpc

    parameters, parts = trained(model), job.cell.micro_batches
    server = f"rank{job.layout.data}"
    scale = loss_scaler(job).get_scale()

    def step(batch: Batch) -> Tensor:
        nonlocal scale
        total = torch.zeros((), device=job.device)
        for part in batch.split(parts):
            loss = job.loss(model, part) / parts
            (loss * scale).backward()
            total += loss.detach()
        gradients = [
            torch.zeros_like(p, device="cpu") if p.grad is None else p.grad.cpu()
            for p in parameters
        ]
        fetched, scale = rpc.rpc_sync(server, push, (job.rank, gradients))
        take(parameters, fetched)
        model.zero_grad()
        confirmed = rpc.rpc_async(server, confirm, (job.rank,))
        if batch.step == job.cell.total_steps - 1:
            # Send the last message before exiting; the server may exit without answering it.
            with contextlib.suppress(RuntimeError):
                confirmed.wait()
        return total

    return step


def take(parameters: list[nn.Parameter], fetched: list[Tensor]) -> None:
    for parameter, new in zip(parameters, fetched, strict=True):
        parameter.detach().copy_(new)


def serve(job: Job, optimizer: Optimizer, together: int) -> TrainStep:
    """Returns the server's step: one update per `together` workers' gradients, in order of
    arrival."""
    workers, scaler = job.layout.data, loss_scaler(job)
    scaler.scale(torch.zeros(()))  # sets the scale, since the server sees no loss
    parameters: list[Tensor] = optimizer.param_groups[0]["params"]
    early: list[Push] = []

    def step(batch: Batch) -> None:
        came = arrivals(workers, early)
        while pushes := sorted(itertools.islice(came, together), key=lambda pushed: pushed[0]):
            update(optimizer, scaler, pushes)
            # Without cloning, the next update may change a reply before it is sent, unless that
            # update needs this worker's gradients.
            answer = [p.detach() if together == workers else p.detach().clone() for p in parameters]
            for _, _, reply in pushes:
                reply.set_result((answer, scaler.get_scale()))
        confirmations(workers)

    return step


def update(optimizer: Optimizer, scaler: GradScaler, pushes: list[Push]) -> None:
    """Takes one optimizer step with the average of these gradients."""
    parameters: list[Tensor] = optimizer.param_groups[0]["params"]
    for parameter, *gradients in zip(parameters, *(sent for _, sent, _ in pushes), strict=True):
        parameter.grad = sum(gradients[1:], gradients[0]) / len(gradients)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
