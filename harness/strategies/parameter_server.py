"""A parameter server over RPC: workers send it gradients, it holds the optimizer and answers with
new parameters."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from typing import TYPE_CHECKING, Literal

from harness.spec.cell import Cell
from harness.spec.training import EXACT, Batch, Layout, States, Tolerance, TrainStep
from harness.strategy.base import Strategy
from harness.strategy.formulas import model_states
from harness.strategy.job import Job
from harness.strategy.step import loss_scaler

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.amp.grad_scaler import GradScaler
    from torch.optim import Optimizer

    from harness.strategies._parameter_server import Push
    from harness.workloads import Workload
    from harness.workloads.counts import ModelFacts


class ParameterServer(Strategy):
    """A parameter server over torch.distributed.rpc: one worker a device, and one server with the
    optimizer, in host memory.

    The server's arithmetic is all done in its training step; its RPC threads only wait.
    Asynchronously, it updates once for each worker and step, and no worker gets more than a step
    ahead of the slowest. So that the N updates of a step weigh as much as the reference's one, each
    has 1/N of the learning rate and keeps the N-th root of what that one keeps of a moment. What
    remains is staleness: a worker's parameters lack up to (N-1)/N of a step's gradients, so its
    losses lag by part of a step; and AdamW moves by 1/N of a step what only one worker has
    gradients for, such as the embedding of a rare token.
    """

    process_group = False

    mode: Literal["synchronous", "asynchronous"] = "synchronous"
    """Update once a step with the average of all gradients, or with each worker's as they come."""
    transport: Literal["auto", "tcp"] = "auto"
    """What TensorPipe carries bytes by; auto: shared memory within a node, where the bytes sent are
    not known."""

    def layout(self, devices: int) -> Layout:
        return Layout(data=devices, servers=1)

    def tolerance(self, cell: Cell, workload: Workload) -> Tolerance:
        if self.mode == "synchronous" or cell.devices == 1:
            return EXACT
        lacking = 1 - 1 / cell.devices
        return Tolerance(
            0.2 * lacking,
            0.5 + 0.25 * lacking,
            "each worker's gradients are applied alone, to parameters that have moved on",
        )

    def states(self, cell: Cell, layout: Layout, facts: ModelFacts) -> States:
        """The server's: a worker keeps parameters alone.

        Within a step, the server has the gradients of all.
        """
        return dataclasses.replace(
            model_states(cell, facts), transient=float(layout.data * facts.trained_bytes)
        )

    def moved_bytes(self, cell: Cell, layout: Layout, facts: ModelFacts) -> float:
        """All gradients in and all parameters out, through the server."""
        return 2.0 * layout.data * facts.trained_bytes

    def setup(self, job: Job) -> TrainStep:
        from harness.strategies._parameter_server import join, waits

        model = job.model()
        optimizer = self.optimizer(job, model) if job.rank == job.layout.data else None
        job.register(
            model,
            *([optimizer] if optimizer else []),
            over_tcp=self.transport == "tcp",
            waits=waits(),
        )
        join(job, tcp=self.transport == "tcp")
        return self.serve(job, optimizer) if optimizer else self.work(job, model)

    def optimizer(self, job: Job, model: nn.Module) -> Optimizer:
        optimizer = job.optimizer(_trained(model))
        updates = job.layout.data if self.mode == "asynchronous" else 1
        for group in optimizer.param_groups:
            group["lr"] /= updates
            if "betas" in group:
                group["betas"] = tuple(beta ** (1 / updates) for beta in group["betas"])
            else:  # SGD's moment is a sum, which grows with what it keeps
                kept = group["momentum"] ** (1 / updates)
                group["lr"] *= (1 - kept) / (1 - group["momentum"])
                group["momentum"] = kept
        return optimizer

    def work(self, job: Job, model: nn.Module) -> TrainStep:
        import torch
        from torch.distributed import rpc

        from harness.strategies._parameter_server import confirm, push

        parameters, parts, server = (
            _trained(model),
            job.cell.micro_batches,
            f"rank{job.layout.data}",
        )
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
            self.take(parameters, fetched)
            model.zero_grad()
            heard = rpc.rpc_async(server, confirm, (job.rank,))
            if (
                batch.step == job.cell.total_steps - 1
            ):  # this process ends, and must not before its last word is out
                with contextlib.suppress(
                    RuntimeError
                ):  # the server heard it, and ended before it could say so
                    heard.wait()
            return total

        return step

    def take(self, parameters: list[nn.Parameter], fetched: list[Tensor]) -> None:
        for parameter, new in zip(parameters, fetched, strict=True):
            parameter.detach().copy_(new)

    def serve(self, job: Job, optimizer: Optimizer) -> TrainStep:
        import torch

        from harness.strategies._parameter_server import arrivals, confirmations

        workers = job.layout.data
        together = workers if self.mode == "synchronous" else 1
        scaler = loss_scaler(job)
        scaler.scale(
            torch.zeros(())
        )  # it has no scale before a first loss, and the server sees none
        parameters: list[Tensor] = optimizer.param_groups[0]["params"]
        early: list[Push] = []

        def step(batch: Batch) -> None:
            came = arrivals(workers, early)
            while pushes := sorted(itertools.islice(came, together), key=lambda one: one[0]):
                self.update(optimizer, scaler, pushes)
                # The next update may come before a reply is sent, unless it waits for that worker's
                # next gradients.
                answer = [
                    p.detach() if together == workers else p.detach().clone() for p in parameters
                ]
                for _, _, reply in pushes:
                    reply.set_result((answer, scaler.get_scale()))
            confirmations(workers)

        return step

    def update(self, optimizer: Optimizer, scaler: GradScaler, pushes: list[Push]) -> None:
        """One optimizer step with the average of these gradients."""
        parameters: list[Tensor] = optimizer.param_groups[0]["params"]
        for parameter, *gradients in zip(parameters, *(sent for _, sent, _ in pushes), strict=True):
            parameter.grad = sum(gradients[1:], gradients[0]) / len(gradients)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]
