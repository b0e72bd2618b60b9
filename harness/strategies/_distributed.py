"""transformers' parallel plans, and models that its `DistributedConfig` splits."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from pydantic import Field

from harness.cell.errors import Refused, Unavailable
from harness.cell.training import Layout, Retained, States
from harness.measure.memory_kinds import local_part, retained_by
from harness.seam import Capabilities, Cell, Job, ModelFacts, Strategy
from harness.seam.formulas import fsdp_transient, model_states
from harness.strategies._accelerate import recompute_by_transformers, recompute_elsewhere
from harness.workloads import Workload, make_workload

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer
    from transformers.distributed.configuration_utils import DistributedConfig

ADDED_UP = "replicated_with_grad_allreduce"
"""Style of a whole parameter whose gradients are summed over ranks."""


@dataclass(frozen=True)
class MeshSizes:
    replicas: int
    shards: int
    tensor: int
    expert: int = 1
    """Ranks that share a layer's experts."""

    @property
    def copies(self) -> int:
        """A replica's ranks that shard the same experts."""
        return self.shards * self.tensor // self.expert


@dataclass(frozen=True)
class Plans:
    """A transformers model's plans: style by module or parameter name; `*` matches any block."""

    tensor: Mapping[str, str]
    expert: Mapping[str, str]
    freed: tuple[str, ...]
    """Paths of modules that FSDP2 frees after forward and gathers again."""

    def style(self, name: str) -> str | None:
        """Returns a parameter's tensor-parallel style; None if it is whole on every rank."""
        name = any_block(name)
        return self.tensor.get(name, self.tensor.get(name.rpartition(".")[0]))

    def is_expert(self, name: str) -> bool:
        return any_block(name) in self.expert


def any_block(name: str) -> str:
    """Replaces block numbers: `model.layers.3.mlp` -> `model.layers.*.mlp`."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


@functools.cache
def plans_of(workload: Workload) -> Plans:
    import torch

    with torch.device("meta"):
        model: Any = workload.build(0, saved_weights=False)
    experts = getattr(model, "ep_plan", {})  # from transformers 5.19 on
    # A tied embedding stays gathered with the head.
    tied = model.get_input_embeddings() if workload.tied else None
    freed = [
        path
        for path, module in model.named_modules()
        if model.fsdp_plan.get(any_block(path)) == "free_full_weight" and module is not tied
    ]
    return Plans(dict(model.tp_plan), dict(experts), tuple(freed))


def check_version() -> None:
    installed = version("transformers")
    if tuple(map(int, installed.split(".")[:2])) < (5, 23):
        raise Unavailable(
            f"transformers {installed} cannot divide ranks into replicas, shards and experts;"
            " install transformers 5.23 or newer"
        )


def check_mesh(cell: Cell, workload: Workload, sizes: MeshSizes) -> None:
    """Raises Refused if the model lacks a required plan or the sizes do not match."""
    if cell.devices == 1:
        raise Refused("a mesh needs at least 2 devices, not 1")
    if workload.kind == "image" or workload.suffixes:
        raise Refused(
            f"transformers splits only unmodified language models, and {workload.name} is not one;"
            " use a llama, mixtral or qwen3-moe workload without a suffix"
        )
    if sizes.expert > 1:
        _check_experts(workload, sizes)
    if sizes.tensor > 1:
        plan = plans_of(workload).tensor
        if not plan:
            raise Refused(
                f"transformers has no tensor-parallel plan for {workload.name}; use a llama,"
                " mixtral or qwen3-moe workload, or tensor 1"
            )
        if cell.micro_batches > 1 and ADDED_UP in plan.values():
            raise Refused(
                "after each micro-batch, transformers sums the gradients of norms within heads,"
                " counting earlier micro-batches again; use micro_batches 1, tensor 1, or a model"
                " without such norms"
            )


def _check_experts(workload: Workload, sizes: MeshSizes) -> None:
    if not workload.experts:
        raise Refused(
            f"{workload.name} has no experts; use a mixtral or qwen3-moe workload, or expert 1"
        )
    if workload.experts % sizes.expert:
        raise Refused(
            f"{workload.experts} experts do not divide among {sizes.expert} ranks; use a divisor of"
            f" {workload.experts}"
        )
    if sizes.expert % sizes.tensor or sizes.shards * sizes.tensor % sizes.expert:
        raise Refused(
            f"expert {sizes.expert} must be a multiple of tensor {sizes.tensor} and divide the"
            f" {sizes.shards * sizes.tensor} ranks of a replica"
        )


def load(job: Job, sizes: MeshSizes) -> nn.Module:
    """Saves the job's model and loads it in parts: transformers splits models only while loading.

    Raises RuntimeError if its mesh would use another device type than the job.
    """
    import torch
    import torch.distributed as dist

    model: Any = job.model(recompute_elsewhere)
    if (seen := torch._C._get_accelerator().type) != job.device.type:
        raise RuntimeError(
            f"transformers would make a mesh of {seen} devices for a cell on {job.device.type}:"
            " hide this host's accelerators from the ranks (CUDA_VISIBLE_DEVICES)"
        )
    folder = job.scratch / "saved model"
    if job.rank % job.local_processes == 0:
        model.save_pretrained(folder)
    dist.barrier()
    kind = type(model)
    del model
    loaded: Any = kind.from_pretrained(
        folder, dtype=torch.float32, distributed_config=distributed_config(sizes)
    )
    whole: nn.Module = loaded.train()
    job.follow_recipe(whole)
    if job.cell.recompute != "none":
        recompute_by_transformers(whole, (), job.cell.recompute)
    return whole


def retained_parts(model: nn.Module, optimizer: Optimizer) -> Iterator[Retained]:
    """Yields this rank's retained tensors, with only its parts of parameters.

    On CPUs a part is a view of a memory-mapped file.
    """
    for kind, name, tensor in retained_by(model, [optimizer]):
        if kind == "parameters" and not isinstance(tensor, int):
            yield kind, name, local_part(tensor).nbytes
        else:
            yield kind, name, tensor


def distributed_config(sizes: MeshSizes) -> DistributedConfig:
    """Returns the argument of `from_pretrained`."""
    from transformers.distributed.configuration_utils import DistributedConfig

    return DistributedConfig(
        tp_size=sizes.tensor,
        tp_plan="auto" if sizes.tensor > 1 else None,
        dp_replicate_size=sizes.replicas,
        fsdp_size=sizes.shards,
        ep_size=sizes.expert,
    )


def mesh_states(
    cell: Cell, workload: Workload, sizes: MeshSizes, facts: ModelFacts, whole_gradients: bool
) -> States:
    """Returns a rank's states. `whole_gradients`: whether gradients stay whole, instead of being
    sharded by FSDP2."""
    plans = plans_of(workload)

    def share(sharded: bool) -> float:
        held = 0.0
        for name, size in named_sizes(facts):
            if sizes.expert > 1 and plans.is_expert(name):
                parts, shards = sizes.expert, sizes.copies
            else:
                split = sizes.tensor > 1 and plans.style(name) not in (None, ADDED_UP, "replicate")
                parts, shards = sizes.tensor if split else 1, sizes.shards
            held += size / parts / (shards if sharded else 1)
        return held / sum(facts.sizes)

    states, shard = model_states(cell, facts), share(sharded=True)
    return dataclasses.replace(
        states,
        parameters=shard * states.parameters,
        optimizer=shard * states.optimizer,
        transient=share(sharded=not whole_gradients) * states.transient,
    )


def named_sizes(facts: ModelFacts) -> Iterator[tuple[str, int]]:
    return zip(facts.trainable, facts.sizes, strict=True)


class MeshStrategy(Strategy):
    """Base of strategies with FSDP2 and tensor parallelism by transformers' plans."""

    capabilities = Capabilities(precisions=("fp32", "bf16"))

    tensor: int = Field(default=1, ge=1)
    """Ranks that split weights by the model's own plan (`tp_plan="auto"`)."""
    replicas: int = Field(default=1, ge=1)
    """Replicas that each shard the model separately (HSDP)."""

    def sizes(self, devices: int) -> MeshSizes:
        """Returns the mesh; raises Refused if the devices do not divide evenly."""
        if devices % (self.tensor * self.replicas):
            by = f"tensor {self.tensor} x replicas {self.replicas}"
            raise Refused(f"{devices} devices are not divisible by {by}")
        shards = devices // (self.tensor * self.replicas)
        return MeshSizes(self.replicas, shards, self.tensor)

    def layout(self, devices: int) -> Layout:
        sizes = self.sizes(devices)
        return Layout(data=sizes.replicas * sizes.shards, tensor=sizes.tensor)

    def check(self, cell: Cell, workload: Workload) -> None:
        check_mesh(cell, workload, self.sizes(cell.devices))

    @property
    def shards_parameters(self) -> bool:
        return True

    def states(self, cell: Cell, layout: Layout, facts: ModelFacts) -> States | None:
        sizes = self.sizes(cell.devices)
        whole = cell.micro_batches > 1 and self.accumulates_whole_gradients
        states = mesh_states(cell, make_workload(cell.workload), sizes, facts, whole)
        if sizes.tensor > 1 or sizes.expert > 1:
            # Does not count gathered parts of divided layers.
            return states
        transient = fsdp_transient(cell, facts, states.transient)
        return dataclasses.replace(states, transient=transient)
