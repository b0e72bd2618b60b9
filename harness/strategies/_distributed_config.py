"""transformers' `DistributedConfig`: what a model's own plans say, and how it is loaded by them."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from harness.measure.states import local_part, retained_by
from harness.strategies._accelerate_engine import recompute_by_transformers
from harness.strategy import Cell, Job, Refused, Retained, Unavailable, Workload

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer
    from transformers.distributed.configuration_utils import DistributedConfig

ADDED_UP = "replicated_with_grad_allreduce"
"""Style of a parameter that every rank holds whole and whose gradient the ranks add up."""


@dataclass(frozen=True)
class Sizes:
    """The mesh: ranks along each of its dimensions."""

    replicas: int
    shards: int
    tensor: int
    expert: int = 1
    """Ranks among which the experts of a layer are divided."""

    @property
    def copies(self) -> int:
        """Ranks of a replica that hold the same experts, and shard them between each other."""
        return self.shards * self.tensor // self.expert


@dataclass(frozen=True)
class Plans:
    """A model's own plans: style of each module or parameter by its name, in which `*` stands for
    any block."""

    tensor: Mapping[str, str]
    expert: Mapping[str, str]
    shards: Mapping[str, str]

    def style(self, name: str) -> str | None:
        """How tensor parallelism treats this parameter; None: every rank holds it whole."""
        name = any_block(name)
        return self.tensor.get(name, self.tensor.get(name.rpartition(".")[0]))

    def is_expert(self, name: str) -> bool:
        """Whether expert parallelism divides this parameter among the ranks."""
        return any_block(name) in self.expert

    def gathered_twice(self, name: str) -> bool:
        """Whether FSDP frees this parameter between forward and backward."""
        name = any_block(name)
        return any(
            style == "free_full_weight" and name.startswith(module + ".")
            for module, style in self.shards.items()
        )


def any_block(name: str) -> str:
    """`model.layers.3.mlp` -> `model.layers.*.mlp`."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


@functools.cache
def plans_of(workload: Workload) -> Plans:
    """The plans that the model's class in transformers brings."""
    import torch

    with torch.device("meta"):
        model: Any = workload.build(0, saved_weights=False)
    experts = getattr(model, "ep_plan", {})  # from transformers 5.19 on
    return Plans(dict(model.tp_plan), dict(experts), dict(model.fsdp_plan))


def check_version() -> None:
    """Raises Unavailable if transformers is too old to be handed such a mesh."""
    installed = version("transformers")
    if tuple(map(int, installed.split(".")[:2])) < (5, 23):
        raise Unavailable(
            f"transformers {installed} cannot divide ranks into replicas, shards and experts;"
            " install transformers 5.23 or newer"
        )


def check_mesh(cell: Cell, workload: Workload, sizes: Sizes) -> None:
    """Raises Refused for a model without the plans that this mesh needs, and for sizes that do not
    fit each other or the model."""
    if cell.devices == 1:
        raise Refused("1 device makes no mesh and changes nothing; use 2 devices or more")
    if workload.kind == "image" or workload.suffixes:
        raise Refused(
            f"transformers splits a language model as it is when it loads it, and {workload.name}"
            " is none; use a llama, mixtral or qwen3-moe workload without a suffix"
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
                "transformers adds up the gradients of norms within the heads after each"
                " micro-batch, and with them, once more, those of the micro-batches before; use"
                " micro_batches 1, tensor 1, or a model without such norms"
            )


def _check_experts(workload: Workload, sizes: Sizes) -> None:
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


def load(job: Job, sizes: Sizes) -> nn.Module:
    """The job's model, saved to a folder and loaded from there by every rank in parts: transformers
    splits a model only while it loads one.

    Raises RuntimeError where its mesh would be of other devices than the cell's: transformers takes
    the kind of accelerator that it sees, and asks nobody.
    """
    import torch
    import torch.distributed as dist

    model: Any = job.model(_not_yet)
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
    if job.cell.recompute != "none":
        recompute_by_transformers(whole, (), job.cell.recompute)
    return whole


def retained_parts(model: nn.Module, optimizer: Optimizer) -> Iterator[Retained]:
    """For TrainState: what this rank keeps, of each parameter its part.

    On a CPU that is a view of the file that it was loaded from, which is mapped whole: only the
    pages that are written to are in memory.
    """
    for kind, name, tensor in retained_by(model, [optimizer]):
        if kind == "parameters" and not isinstance(tensor, int):
            yield kind, name, local_part(tensor).nbytes
        else:
            yield kind, name, tensor


def _not_yet(model: nn.Module, blocks: object, recompute: str) -> None:
    """Leaves the blocks of the saved model as they are; those of the loaded one recompute."""


def distributed_config(sizes: Sizes) -> DistributedConfig:
    """What is handed to `from_pretrained`.

    Without tensor parallelism `tp_plan` is left out: an empty plan, by the docstring "no tensor
    parallel rule", raises.
    """
    from transformers.distributed.configuration_utils import DistributedConfig

    return DistributedConfig(
        tp_size=sizes.tensor,
        tp_plan="auto" if sizes.tensor > 1 else None,
        dp_replicate_size=sizes.replicas,
        fsdp_size=sizes.shards,
        ep_size=sizes.expert,
    )
