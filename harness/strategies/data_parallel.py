from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeAlias

from harness.cell.training import Layout, TrainStep, of_each_tensor
from harness.seam import Capabilities, Cell, Job, Strategy
from harness.seam.job import standard_step

if TYPE_CHECKING:
    from torch import Tensor, nn


Tree: TypeAlias = Any
"""Tensors in lists, tuples and dicts."""


class DataParallel(Strategy):
    """torch.nn.DataParallel: replicate, scatter, apply, gather and update in one process.

    Without GPUs each device is a CPU thread. Replicas enter autocast themselves: their threads
    inherit whether it is enabled, but not its dtype, and would use fp16 in bf16 cells.
    """

    capabilities = Capabilities(process_group=False)

    def layout(self, devices: int) -> Layout:
        return Layout(data=devices, devices_per_process=devices)

    def stand_in(self, cell: Cell) -> str | None:
        if cell.device == "cpu":
            return "CPU threads instead of GPUs, the same five steps"
        if cell.devices == 1:
            return "one GPU: torch.nn.DataParallel only calls the model, as `single` does"
        return None

    def setup(self, job: Job) -> TrainStep:
        import torch

        first = job.model()
        optimizer = job.optimizer(first.parameters())
        job.register(first, optimizer)
        if job.device.type == "cuda":
            model: Any = torch.nn.DataParallel(
                in_autocast(job, first), device_ids=list(range(job.cell.devices))
            )
        else:
            model = on_threads(job, first)
        return standard_step(job, model, optimizer)


def in_autocast(job: Job, inner: nn.Module) -> nn.Module:
    """Makes the model return logits in the cell's precision from any thread."""
    from torch import nn

    class InAutocast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, *inputs: object, **named: object) -> Tensor:
            with job.autocast():
                return job.workload.logits_of(self.inner(*inputs, **named))

    return InAutocast()


def on_threads(job: Job, first: nn.Module) -> Callable[..., Tree]:
    """Returns a function from inputs to outputs, with one replica and CPU thread per part."""
    import torch
    from torch.utils import _pytree as pytree

    from harness.workloads.dropout import masks_of

    replicas = [first, *(copy.deepcopy(first) for _ in range(job.cell.devices - 1))]
    parameters: list[list[Tree]] = [list(replica.parameters()) for replica in replicas]
    everything = [[*replica.parameters(), *replica.buffers()] for replica in replicas]
    # Each calling thread has its own OpenMP threads and thread count.
    pool = ThreadPoolExecutor(
        len(replicas), initializer=torch.set_num_threads, initargs=(job.threads,)
    )

    def forward(replica: nn.Module, part: Tree, keys: Tensor | None) -> tuple[list[Tree], Tree]:
        if keys is not None:
            masks_of(replica).keys = keys
        inputs, named = part
        with job.autocast():
            return pytree.tree_flatten(job.workload.logits_of(replica(*inputs, **named)))

    class Apply(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Tree, given: Tree, anchor: Tensor) -> tuple[Tree, ...]:
            for tensors in everything[1:]:
                torch._foreach_copy_(
                    [t.detach() for t in tensors], [t.detach() for t in everything[0]]
                )
            count, keys = len(replicas), job.recipe.masks.keys
            parts_keys = [None] * count if keys is None else keys.chunk(count)
            outputs = list(pool.map(forward, replicas, parts_of(given, count), parts_keys))
            structure[:] = [outputs[0][1]]
            ctx.outputs = [leaves for leaves, _ in outputs]
            return tuple(joined(same) for same in zip(*ctx.outputs, strict=True))

        @staticmethod
        def backward(ctx: Tree, *gradients: Tensor | None) -> Tree:
            trained = [
                number
                for number, leaf in enumerate(ctx.outputs[0])
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad
            ]
            outputs = [[leaves[number] for number in trained] for leaves in ctx.outputs]
            parts = parts_of([gradients[number] for number in trained], len(replicas))
            list(pool.map(torch.autograd.backward, outputs, parts))
            for others in parameters[1:]:
                for mine, theirs in zip(parameters[0], others, strict=True):
                    if theirs.grad is not None:
                        mine.grad += theirs.grad
                        theirs.grad = None
            return None, None

    # Gives the outputs a gradient function; the inputs have none.
    anchor = torch.zeros((), requires_grad=True)
    apply: Tree = Apply.apply
    structure: list[Tree] = []
    return lambda *inputs, **named: pytree.tree_unflatten(
        apply((inputs, named), anchor), structure[0]
    )


def joined(parts: Sequence[Tree]) -> Tree:
    """Joins parts of a tensor by its first dimension; returns the first of other values."""
    import torch

    is_tensor = isinstance(parts[0], torch.Tensor)
    return torch.cat([part.detach() for part in parts]) if is_tensor else parts[0]


def parts_of(nested: Tree, count: int) -> list[Tree]:
    """Cuts each tensor into parts by its first dimension."""

    def part(number: int) -> Tree:
        return of_each_tensor(lambda tensor: tensor.chunk(count)[number], nested)

    return [part(number) for number in range(count)]
