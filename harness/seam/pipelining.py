from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from harness.seam.checkpoints import load_by_torch, moments_of, save_by_torch
from harness.seam.formulas import blocks_of_stage
from harness.seam.job import TrainState
from harness.seam.recipe import clip_gradients

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from harness.cell.training import Batch, Retained, TrainStep
    from harness.seam.job import Job

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "looped_bfs": ScheduleLoopedBFS,
    "interleaved_zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}


class Stage(nn.Module):
    """Stage `index` of `count`: its blocks, plus the embedding if first and the head if last.

    Placeholders preserve parameter names. For tied parameters, see `Pipe.sum_tied`.
    """

    def __init__(self, job: Job, index: int = 0, count: int = 1) -> None:
        super().__init__()
        split = job.workload.split
        assert split is not None
        self.index, self.count, self.split = index, count, split
        self.autocast, self.tokens = job.autocast, job.cell.sequence_length
        self.masks = job.recipe.masks
        model = job.model()
        self.all_blocks = len(model.get_submodule(split.blocks))  # type: ignore[arg-type]
        for block in set(range(self.all_blocks)) - set(self.own_blocks):
            self._remove(model, f"{split.blocks}.{block}")
        for path in (() if self.first else split.embedding) + (() if self.last else split.head):
            self._remove(model, path)
        self.model = model

    def _remove(self, model: nn.Module, path: str) -> None:
        model.set_submodule(path, self.split.absent(model.get_submodule(path)))

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def last(self) -> bool:
        return self.index == self.count - 1

    @property
    def own_blocks(self) -> range:
        return blocks_of_stage(self.all_blocks, self.index, self.count)

    @property
    def blocks(self) -> list[nn.Module]:
        return [
            self.model.get_submodule(f"{self.split.blocks}.{block}") for block in self.own_blocks
        ]

    def forward(self, hidden: Tensor, keys: Tensor | None = None) -> Tensor:
        """Maps token ids or hidden states to hidden states, or on the last stage to logits. `keys`:
        keys of dropout masks, if they are not set yet."""
        if keys is not None:
            self.masks.keys = keys
        with self.autocast():
            return self.split.stage(
                self.model, self.blocks, hidden, self.tokens, first=self.first, last=self.last
            )


def split_tensors(
    stage: Stage, mesh: DeviceMesh, sequence_parallel: bool = False
) -> dict[str, Callable[[Tensor], Tensor]]:
    """Splits weights over a tensor-parallel mesh in place; returns functions that restore them."""
    from torch.distributed.tensor.parallel import parallelize_module

    restore = stage.split.prepare_tensor(stage.model, mesh.size())
    plan = stage.split.tensor_plan(sequence_parallel)
    splits = [
        name for name, module in stage.model.named_modules() if not isinstance(module, nn.Identity)
    ]
    parallelize_module(
        stage.model,
        mesh,
        {name: style for name in splits for path, style in plan.items() if fnmatch(name, path)},
    )
    return restore


class Pipe:
    """A rank's stages under a torch schedule.

    `wrap` adds a data-parallel wrapper, which may hide names.
    """

    def __init__(
        self,
        job: Job,
        schedule: str,
        stages: Sequence[Stage],
        group: dist.ProcessGroup | None = None,
        wrap: Callable[[Stage], nn.Module] = lambda stage: stage,
    ) -> None:
        self.job, self.stages, self.group, self.parts = job, stages, group, job.cell.micro_batches
        _tie_on_one_rank(stages)
        self.named = [pair for stage in stages for pair in stage.model.named_parameters()]
        self.torch_stages = [
            PipelineStage(wrap(stage), stage.index, stage.count, job.device, group=group)
            for stage in stages
        ]
        self.parameters = list(
            dict.fromkeys(p for stage in self.torch_stages for p in stage.submod.parameters())
        )
        kind = SCHEDULES[schedule]
        # torch 2.10 rejects fewer micro-batches than stages, which GPipe can run.
        least = stages[0].count if schedule == "gpipe" else 1
        self.schedule = kind(
            self.torch_stages[0] if issubclass(kind, PipelineScheduleSingle) else self.torch_stages,
            n_microbatches=max(self.parts, least),
            # Looked up late, since the harness may wrap `loss` to time it.
            loss_fn=lambda logits, labels: self.loss(logits, labels),
            scale_grads=False,
        )
        self.schedule._n_microbatches = self.parts
        self.label_tokens: float | None = None
        """`Batch.label_tokens` of the current step's micro-batches."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return self.job.workload.loss(logits, labels, self.label_tokens) / self.parts

    @property
    def ranks(self) -> dist.ProcessGroup | None:
        """Group of the ranks with the pipeline's stages; None for a single rank."""
        group = self.group or dist.group.WORLD
        return group if group is not None and group.size() > 1 else None

    def forward_backward(self, batch: Batch) -> Tensor | None:
        """Runs the schedule; returns the mean loss on the last stage's rank, else None."""
        inputs = [batch.inputs] if any(stage.first for stage in self.stages) else []
        losses: list[Tensor] = []
        self.label_tokens = batch.label_tokens and batch.label_tokens / self.parts
        keys = {} if batch.keys is None else {"keys": batch.keys}
        self.schedule.step(
            *inputs, target=batch.labels, losses=losses, return_outputs=False, **keys
        )
        return torch.stack(losses).detach().sum() if losses else None

    @property
    def copies(self) -> list[Tensor]:
        """This rank's parameters tied to those of the first stage on another rank."""
        last = self.stages[-1]
        if last.count == 1 or not last.last or any(stage.first for stage in self.stages):
            return []
        return [last.model.get_parameter(name) for name in last.split.tied]

    def receive_buffers(self) -> Iterator[Retained]:
        for stage in self.torch_stages:
            for name, received in (
                ("hidden states", stage.args_recv_info),
                ("gradients", stage.grad_recv_info),
            ):
                for info in (info_of for infos in received.values() for info_of in infos):
                    if (buffer := getattr(info, "buffer", None)) is not None:
                        yield "library", f"received {name}", buffer

    @torch.no_grad()
    def sum_tied(self) -> None:
        """Sums the gradients of parameters tied across two ranks, so that the copies stay equal: a
        + b and b + a are bitwise equal."""
        ranks = self.torch_stages[0].stage_index_to_group_rank
        first, last = ranks[0], ranks[self.stages[0].count - 1]
        for stage in self.stages:
            if first == last or not (stage.first or stage.last):
                continue
            for name, owner in stage.split.tied.items():
                mine = _local(stage.model.get_parameter(owner if stage.first else name).grad)
                other, peer = torch.empty_like(mine), last if stage.first else first
                send = dist.P2POp(dist.isend, mine, group=self.group, group_peer=peer)
                receive = dist.P2POp(dist.irecv, other, group=self.group, group_peer=peer)
                for work in dist.batch_isend_irecv([send, receive]):
                    work.wait()
                mine += other


def _module_of(named: Iterable[tuple[str, nn.Parameter]]) -> nn.Module:
    root = nn.Module()
    for name, parameter in named:
        module = root
        *path, leaf = name.split(".")
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(leaf, parameter)
    return root


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def _tie_on_one_rank(stages: Sequence[Stage]) -> None:
    """Shares parameters tied on one rank, so that autograd sums their gradients."""
    first, last = stages[0], stages[-1]
    if len(stages) > 1 and first.first and last.last:
        for name, owner in first.split.tied.items():
            module, _, leaf = name.rpartition(".")
            setattr(last.model.get_submodule(module), leaf, first.model.get_parameter(owner))


def train_step(
    job: Job,
    pipe: Pipe,
    optimizer: Optimizer,
    average_over: dist.ProcessGroup | None = None,
    restore: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
    library: Callable[[], Iterable[Retained]] = tuple,
) -> TrainStep:
    """Registers the pipe; returns a step: schedule, gradient averaging, tied gradients, update."""
    compute: list[tuple[object, str]] = [(pipe, "loss"), (optimizer, "step")]
    for stage in pipe.torch_stages:
        compute += [
            (stage, name)
            for name in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")
        ]
    # ZeroRedundancyOptimizer keeps its states in the optimizer it wraps.
    states: Optimizer = getattr(optimizer, "optim", optimizer)
    scheduler, max_norm = job.scheduler(optimizer), job.cell.clip_norm
    named = TrainState(_module_of(pipe.named), [states])
    registered = job.register(nn.ParameterList(pipe.parameters), states)
    registered.compute = compute
    registered.gather = lambda: iter(pipe.named)
    registered.moments = lambda: moments_of(pipe.named, [states])
    registered.library = lambda: [*pipe.receive_buffers(), *library()]
    registered.restore = restore or {}
    job.save_by(
        functools.partial(save_by_torch, job, named), functools.partial(load_by_torch, job, named)
    )

    def clip(largest: float) -> Tensor:
        return clip_gradients(pipe.parameters, largest, pipe.ranks, pipe.copies)

    def step(batch: Batch) -> Tensor | None:
        loss = pipe.forward_backward(batch)
        if average_over is not None:
            for parameter in pipe.parameters:
                assert parameter.grad is not None
                parameter.grad /= average_over.size()
                dist.all_reduce(parameter.grad, group=average_over)
        pipe.sum_tied()
        if max_norm is not None:
            job.recipe.gradient_norm = clip(max_norm)
        optimizer.step()
        if scheduler:
            scheduler.step()
        optimizer.zero_grad()
        return loss

    return step
