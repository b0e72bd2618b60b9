"""torch.nn.DataParallel: one process copies the model to all devices, runs the parts of the batch, gathers, updates."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from harness.cell import Cell
from harness.strategy import Job, Layout, Strategy, TrainStep
from harness.training import standard_step

if TYPE_CHECKING:
    from torch import Tensor, nn


class DataParallel(Strategy):
    """torch.nn.DataParallel: replicate, scatter, parallel apply, gather, and update on the first device, in one process.

    Without GPUs torch's own is a pass-through: the same five steps then run on one CPU thread per device.
    """

    process_group = False

    def layout(self, devices: int) -> Layout:
        return Layout(data=devices, devices_per_process=devices)

    def stand_in(self, cell: Cell) -> str | None:
        return "CPU threads instead of GPUs, the same five steps" if cell.device == "cpu" else None

    def setup(self, job: Job) -> TrainStep:
        import torch

        first = job.model()
        optimizer = job.optimizer(first.parameters())
        job.expose(first, optimizer)
        if job.device.type == "cuda":
            model: Any = torch.nn.DataParallel(first, device_ids=list(range(job.cell.devices)))
        else:
            model = on_threads(job, first)
        return standard_step(job, model, optimizer)


def on_threads(job: Job, first: nn.Module) -> Callable[[Tensor], Tensor]:
    """The model over CPU threads: logits of the whole batch, forward and backward of each part in a replica's own thread."""
    import torch

    replicas = [first, *(copy.deepcopy(first) for _ in range(job.cell.devices - 1))]
    parameters: list[list[Any]] = [list(replica.parameters()) for replica in replicas]
    everything = [[*replica.parameters(), *replica.buffers()] for replica in replicas]
    # OpenMP's threads belong to the thread that calls them, and so does their number.
    pool = ThreadPoolExecutor(len(replicas), initializer=torch.set_num_threads, initargs=(job.cell.threads_per_device,))

    def forward(replica: nn.Module, inputs: Tensor) -> Tensor:
        with job.autocast():
            return job.workload.logits(replica, inputs)

    class Apply(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, inputs: Tensor, anchor: Tensor) -> Tensor:
            for tensors in everything[1:]:
                torch._foreach_copy_([t.detach() for t in tensors], [t.detach() for t in everything[0]])
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

    anchor = torch.zeros((), requires_grad=True)  # gives the logits a gradient function: the inputs have none
    apply: Any = Apply.apply
    return lambda inputs: apply(inputs, anchor)
