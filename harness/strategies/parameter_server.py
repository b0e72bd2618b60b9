from __future__ import annotations

import contextlib
import dataclasses
import itertools
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TYPE_CHECKING, Literal

from harness.cell.errors import Refused
from harness.cell.training import EXACT, Batch, Layout, States, Tolerance, TrainStep
from harness.seam import Capabilities, Cell, Job, ModelFacts, Strategy
from harness.seam.formulas import model_states
from harness.seam.job import Wait, loss_scaler, parameters_of, trained_parameters
from harness.seam.recipe import clip_gradients
from harness.workloads import Workload

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.amp.grad_scaler import GradScaler
    from torch.optim import Optimizer


Reply = tuple[list["Tensor"], float]
"""New parameters, and the scale of the next loss."""
Push = tuple[int, list["Tensor"], "Future[Reply]"]
"""A worker's rank, its gradients, and the future of its reply."""
_PUSHED: SimpleQueue[Push] = SimpleQueue()
_HEARD: SimpleQueue[int] = SimpleQueue()


class ParameterServer(Strategy):
    """A parameter server over torch.distributed.rpc, with its optimizer in host memory.

    Each device has a worker. In asynchronous mode the server updates once per worker and step
    (`server_optimizer`), and no worker gets more than a step ahead of another. Losses lag: a
    worker's parameters lack up to (N-1)/N of a step's gradients. Parameters with one worker's
    gradients only move by 1/N of an AdamW step.
    """

    capabilities = Capabilities(
        process_group=False,
        # A worker must know its last step to wait for its last message.
        fixed_steps=True,
    )

    mode: Literal["synchronous", "asynchronous"] = "synchronous"
    """Update once per step with the average of all gradients, or once per worker as its gradients
    arrive."""
    transport: Literal["auto", "tcp"] = "auto"
    """Transport of TensorPipe. `auto` uses shared memory within a node, where bytes sent are
    unknown."""

    def layout(self, devices: int) -> Layout:
        return Layout(data=devices, servers=1)

    def check(self, cell: Cell, workload: Workload) -> None:
        if cell.checkpoint != "none":
            raise Refused(
                "torch.distributed.rpc has no checkpoints: use ddp, or leave the checkpoint out"
            )
        if self.mode == "asynchronous" and cell.precision == "fp16" and cell.devices > 1:
            raise Refused(
                "an asynchronous server may change the loss scale while gradients of another scale"
                " are on their way: use bf16, or mode synchronous"
            )

    def tolerance(self, cell: Cell, workload: Workload) -> Tolerance:
        if self.mode == "synchronous" or cell.devices == 1:
            return EXACT
        lacking = 1 - 1 / cell.devices
        return Tolerance(
            0.2 * lacking,
            0.5 + 0.25 * lacking,
            "each worker's gradients are applied separately, to parameters that others have"
            " updated meanwhile",
        )

    def setup(self, job: Job) -> TrainStep:
        model, tcp = job.model(), self.transport == "tcp"
        together = job.layout.data if self.mode == "synchronous" else 1
        if job.rank < job.layout.data:
            registered = job.register(model)
            registered.over_tcp = tcp
            registered.waits = waits()
            join(job, tcp)
            return work(job, model)
        optimizer = server_optimizer(job, model, updates=job.layout.data // together)
        registered = job.register(model, optimizer)
        registered.over_tcp = tcp
        registered.waits = waits()
        join(job, tcp)
        return serve(job, optimizer, trained_parameters(model), together)

    def states(self, cell: Cell, layout: Layout, facts: ModelFacts) -> States:
        """Returns the server's states with all workers' gradients; workers keep only parameters."""
        return dataclasses.replace(
            model_states(cell, facts), transient=float(layout.data * facts.trained_bytes)
        )


def join(job: Job, tcp: bool) -> None:
    from torch.distributed import rpc

    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=job.layout.data + 1,  # on the server, each worker's push blocks a thread
        rpc_timeout=job.cell.time_limit_seconds,
        _transports=["uv"] if tcp else None,
        _channels=["basic"] if tcp else None,
    )
    rpc.init_rpc(
        f"rank{job.rank}",
        rank=job.rank,
        world_size=job.layout.processes,
        rpc_backend_options=options,
    )


def push(worker: int, gradients: list[Tensor]) -> Reply:
    """Hands gradients to the training step and waits for its reply; runs on the server."""
    reply: Future[Reply] = Future()
    _PUSHED.put((worker, gradients, reply))
    return reply.result()


def confirm(worker: int) -> None:
    """Records that the worker has its reply; runs on the server."""
    _HEARD.put(worker)


def next_push() -> Push:
    return _PUSHED.get()


def next_confirmation() -> int:
    return _HEARD.get()


def arrivals(workers: int, early: list[Push]) -> Iterator[Push]:
    """Yields one push per worker as they arrive. A worker's second push is kept in `early` for the
    next step."""
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


def waits() -> list[Wait]:
    from torch.distributed import rpc

    here = sys.modules[__name__]
    return [
        (rpc, "rpc_sync", "communication"),
        (here, "next_push", "communication"),
        (here, "next_confirmation", "communication"),
    ]


def server_optimizer(job: Job, model: nn.Module, updates: int) -> Optimizer:
    """Returns the cell's optimizer, scaled for this many updates per step. Each of N updates uses
    1/N of the learning rate and the N-th root of each moment's decay factor."""
    optimizer = job.optimizer(trained_parameters(model))
    for group in optimizer.param_groups:
        group["lr"] /= updates
        if "betas" in group:
            group["betas"] = tuple(beta ** (1 / updates) for beta in group["betas"])
        else:  # SGD's moment is a sum, which grows with its decay factor
            momentum = group["momentum"] ** (1 / updates)
            group["lr"] *= (1 - momentum) / (1 - group["momentum"])
            group["momentum"] = momentum
    return optimizer


def work(job: Job, model: nn.Module) -> TrainStep:
    import torch
    from torch.distributed import rpc

    parameters, parts = trained_parameters(model), job.cell.micro_batches
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


def serve(
    job: Job, optimizer: Optimizer, parameters: list[nn.Parameter], together: int
) -> TrainStep:
    """Returns the server's step: one update per `together` workers' gradients as they arrive."""
    import torch

    workers, scaler = job.layout.data, loss_scaler(job)
    scaler.scale(torch.zeros(()))  # sets the scale, since the server sees no loss
    scheduler = job.scheduler(optimizer)
    early: list[Push] = []

    def step(batch: Batch) -> None:
        came = arrivals(workers, early)
        while pushes := sorted(itertools.islice(came, together), key=lambda pushed: pushed[0]):
            average(parameters, pushes)
            update(job, optimizer, scaler)
            # The next update may change an uncloned reply before it is sent, unless it needs this
            # worker's gradients.
            answer = [p.detach() if together == workers else p.detach().clone() for p in parameters]
            for _, _, reply in pushes:
                reply.set_result((answer, scaler.get_scale()))
        if scheduler:
            scheduler.step()
        for _ in range(workers):
            next_confirmation()

    return step


def average(parameters: list[nn.Parameter], pushes: list[Push]) -> None:
    for parameter, *gradients in zip(parameters, *(sent for _, sent, _ in pushes), strict=True):
        parameter.grad = sum(gradients[1:], gradients[0]) / len(gradients)


def update(job: Job, optimizer: Optimizer, scaler: GradScaler) -> None:
    if job.cell.clip_norm is not None:
        scaler.unscale_(optimizer)
        job.recipe.gradient_norm = clip_gradients(parameters_of(optimizer), job.cell.clip_norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
