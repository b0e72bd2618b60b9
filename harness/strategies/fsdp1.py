from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Literal

from harness.cell.errors import Refused, Unavailable
from harness.cell.training import Layout, States, TrainStep
from harness.seam import Capabilities, Cell, Export, Job, ModelFacts, Strategy
from harness.seam.checkpoints import moments_by_torch, plain_name
from harness.seam.formulas import fsdp_transient, model_states
from harness.seam.job import sharded_loss_scaler, standard_step
from harness.strategies.fsdp2 import check_hybrid, shard_mesh
from harness.workloads import Workload
from harness.workloads.low_precision import store_as_floats
from harness.workloads.structure import tied_parameters

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel


class Fsdp1(Strategy):
    """FullyShardedDataParallel (FSDP1): each module gathered as one flat tensor when it runs."""

    capabilities = Capabilities(fused_loss=True)

    sharding: Literal["full_shard", "shard_grad_op", "hybrid_shard"] = "full_shard"
    """Free parameters after forward (ZeRO-3), keep them until backward (ZeRO-2), or shard within
    each of 2 replicas."""
    auto_wrap: bool = True
    """Wrap each block instead of the whole model. Without named blocks, wrap modules by size,
    unless they share parameters."""
    backward_prefetch: Literal["pre", "post", "none"] = "pre"
    """Gather the next module before or after the current one's backward, or when needed."""
    cpu_offload: bool = False
    """Keep shards in host memory while no module uses them."""
    use_orig_params: bool = True
    """Give the optimizer the model's original parameters instead of flattened parameters."""

    def check(self, cell: Cell, workload: Workload) -> None:
        if workload.partly_frozen and not self.use_orig_params:
            reason = "freezes some parameters, and a flat parameter is trained or frozen as a whole"
            raise Refused(f"{workload.name} {reason}: set use_orig_params=true")
        if cell.decay == "matrices" and not self.use_orig_params:
            raise Refused(
                "FSDP1's flat parameters mix matrices and vectors, which cannot decay differently:"
                " set use_orig_params=true, or decay all"
            )
        if self.sharding == "hybrid_shard":
            check_hybrid(cell)
        if self.cpu_offload and cell.device == "cpu":
            reason = "FSDP1's CPU offload pins shards in host memory for a GPU;"
            raise Unavailable(f"{reason} without one, use fsdp2")

    def export(self, cell: Cell, to: str) -> Export | None:
        return Export("fsdp1.py.j2", {"saves": True}) if to in ("torchrun", "slurm") else None

    def setup(self, job: Job) -> TrainStep:
        import torch
        from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, ShardingStrategy

        whole = job.model()
        store_as_floats(whole, torch.float32)
        shapes = {name: p.ndim for name, p in whole.named_parameters()}
        model = FullyShardedDataParallel(
            whole,
            device_mesh=shard_mesh(job, 2 if self.sharding == "hybrid_shard" else 1),
            device_id=job.device,
            sharding_strategy=ShardingStrategy[self.sharding.upper()],
            auto_wrap_policy=wrap_policy(job, whole) if self.auto_wrap else None,
            backward_prefetch=backward_prefetch(self.backward_prefetch),
            cpu_offload=CPUOffload(offload_params=self.cpu_offload),
            use_orig_params=self.use_orig_params,
        )

        job.recipe.clip = model.clip_grad_norm_
        optimizer = job.optimizer(model.parameters(), matrices_of(model, shapes))
        registered = job.register(model, optimizer)
        registered.gather = lambda: summoned_parameters(model)
        registered.moments = lambda: moments_by_torch(model, optimizer)
        scaler = sharded_loss_scaler(job)
        return standard_step(job, model, optimizer, no_sync=model.no_sync, scaler=scaler)

    @property
    def accumulates_whole_gradients(self) -> bool:
        return True

    def states(self, cell: Cell, layout: Layout, facts: ModelFacts) -> States:
        """Counts the gradients of flat parameters, including their frozen parts. With several
        micro-batches, gradients are unsharded (torch 2.13, measured on two ranks)."""
        shards = cell.devices // 2 if self.sharding == "hybrid_shard" else cell.devices
        chosen, whole = self, cell.micro_batches > 1
        states = model_states(cell, facts, shards)
        model_bytes = float(facts.parameter_bytes)
        gradients = model_bytes / (1 if whole else shards)
        if chosen.cpu_offload and cell.device == "cuda":
            states = dataclasses.replace(states, parameters=0.0, optimizer=0.0)
            gradients = gradients if whole else 0.0
        reshards = chosen.auto_wrap and chosen.sharding != "shard_grad_op"
        transient = fsdp_transient(cell, facts, gradients, reshards, whole=model_bytes, flat=True)
        return dataclasses.replace(states, transient=transient)

    @property
    def shards_parameters(self) -> bool:
        return True

    @property
    def zero_stage(self) -> int:
        return 2 if self.sharding == "shard_grad_op" else 3


def matrices_of(model: nn.Module, shapes: Mapping[str, int]) -> dict[Tensor, bool]:
    """Returns which parameters are matrices, by their numbers of dimensions in the plain model.
    Shards are flat, whatever the parameter's shape."""
    return {p: shapes.get(plain_name(name), 0) >= 2 for name, p in model.named_parameters()}


def wrap_policy(job: Job, model: nn.Module) -> Callable[..., bool]:
    """Wraps by block or, if blocks have no names, modules with at least an eighth of the
    parameters. Modules that share a parameter must be in one unit, so without blocks a model with
    shared parameters is one unit."""
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy

    if blocks := job.workload.blocks_of(model):
        return ModuleWrapPolicy({type(block) for block in blocks})
    if tied_parameters(model):
        return lambda **_: False
    parameters = sum(p.numel() for p in model.parameters())
    return functools.partial(size_based_auto_wrap_policy, min_num_params=parameters // 8)


def backward_prefetch(when: str) -> BackwardPrefetch | None:
    from torch.distributed.fsdp import BackwardPrefetch

    return None if when == "none" else BackwardPrefetch[f"BACKWARD_{when.upper()}"]


def summoned_parameters(model: FullyShardedDataParallel) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields whole parameters by name; iterate on all ranks."""
    with type(model).summon_full_params(model, writeback=False):
        yield from model.named_parameters()
