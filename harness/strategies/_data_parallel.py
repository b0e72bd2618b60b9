"""What DataParallel's replicas run: in torch's threads on GPUs, in this module's otherwise."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from harness.strategy import Job


def in_autocast(job: Job, inner: nn.Module) -> nn.Module:
    """Wraps the model to return logits in the cell's precision from any thread."""

    class InAutocast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, inputs: Tensor) -> Tensor:
            with job.autocast():
                return job.workload.logits(self.inner, inputs)

    return InAutocast()


def on_threads(job: Job, first: nn.Module) -> Callable[[Tensor], Tensor]:
    """Returns a function from batch to logits, with one replica and CPU thread per part."""
    replicas = [first, *(copy.deepcopy(first) for _ in range(job.cell.devices - 1))]
    parameters: list[list[Any]] = [list(replica.parameters()) for replica in replicas]
    everything = [[*replica.parameters(), *replica.buffers()] for replica in replicas]
    # Each calling thread has its own OpenMP threads and thread count.
    pool = ThreadPoolExecutor(
        len(replicas), initializer=torch.set_num_threads, initargs=(job.threads,)
    )

    def forward(replica: nn.Module, inputs: Tensor) -> Tensor:
        with job.autocast():
            return job.workload.logits(replica, inputs)

    class Apply(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, inputs: Tensor, anchor: Tensor) -> Tensor:
            for tensors in everything[1:]:
                torch._foreach_copy_(
                    [t.detach() for t in tensors], [t.detach() for t in everything[0]]
                )
            ctx.outputs = list(pool.map(forward, replicas, inputs.chunk(len(replicas))))
            return torch.cat([output.detach() for output in ctx.outputs])

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            list(pool.map(torch.autograd.backward, ctx.outputs, gradients[0].chunk(len(replicas))))
            for others in parameters[1:]:
                for mine, theirs in zip(parameters[0], others, strict=True):
                    if theirs.grad is not None:
                        mine.grad += theirs.grad
                        theirs.grad = None
            return None, None

    # Gives the logits a gradient function; the inputs have none.
    anchor = torch.zeros((), requires_grad=True)
    apply: Any = Apply.apply
    return lambda inputs: apply(inputs, anchor)
