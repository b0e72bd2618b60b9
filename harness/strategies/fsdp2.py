from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from harness.cell.errors import Refused
from harness.cell.training import EXACT, Layout, States, Tolerance, TrainStep
from harness.seam import Capabilities, Cell, Export, Job, ModelFacts, Strategy
from harness.seam.formulas import (
    all_reduced,
    fsdp_transient,
    model_states,
    passed_once,
    unit_sizes,
)
from harness.seam.job import own_precision, standard_step
from harness.seam.optimizers import OVER_SHARDS
from harness.strategies._accelerate_config import fsdp2_export
from harness.strategies._half import WHOLLY, half_throughout
from harness.workloads import Workload, make_workload
from harness.workloads.low_precision import store_as_floats

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule


class Fsdp2(Strategy):
    """FSDP2 (`fully_shard`): parameters sharded individually and gathered block by block."""

    capabilities = Capabilities(compiles=("block",), extra_optimizers=("muon",), fused_loss=True)

    reshard_after_forward: bool = True
    """Free gathered parameters between forward and backward (ZeRO-3) or keep them (ZeRO-2)."""
    hybrid: bool = False
    """Shard within each of several replicas and all-reduce between them (HSDP)."""
    replicas: int = Field(default=2, ge=2)
    """Number of replicas of hybrid sharding."""
    cpu_offload: bool = False
    """Keep shards, their gradients and the optimizer in host memory."""
    prefetch: bool = False
    """Prefetch the neighbouring block during compute, instead of leaving the order to FSDP."""
    mixed_precision: bool = False
    """Gather parameters in bf16 and reduce gradients in fp32, instead of autocast (bf16 only)."""
    no_sync: bool = True
    """Reduce gradients only after the last micro-batch; until then ranks hold them whole."""

    def check(self, cell: Cell, workload: Workload) -> None:
        if self.hybrid:
            check_hybrid(cell, self.replicas)
        elif "replicas" in cell.options:
            raise Refused("replicas has no effect without hybrid: set hybrid=true, or leave it out")
        if self.mixed_precision and cell.precision != "bf16":
            raise Refused(
                "mixed_precision of fsdp2 is bf16: set the cell's precision to bf16, not"
                f" {cell.precision}"
            )
        if self.mixed_precision and cell.optimizer == "muon":
            raise Refused(
                "the reference of mixed_precision has no master weights by name, which Muon needs:"
                " use optimizer adamw, or leave mixed_precision out"
            )
        if self.cpu_offload and cell.device == "cuda" and cell.precision == "fp16":
            raise Refused("NCCL cannot reduce the loss scaler's flag in host memory; use bf16")
        if self.cpu_offload and cell.device == "cuda" and cell.clip_norm is not None:
            raise Refused(
                "NCCL cannot reduce norms in host memory; leave out clip_norm or cpu_offload"
            )

    def tolerance(self, cell: Cell, workload: Workload) -> Tolerance:
        return WHOLLY if self.mixed_precision else OVER_SHARDS.get(cell.optimizer, EXACT)

    def reference(self, cell: Cell) -> Cell:
        return (
            half_throughout(cell, self.layout(cell.devices), order="fp32")
            if self.mixed_precision
            else cell.reference()
        )

    def stand_in(self, cell: Cell) -> str | None:
        offload = self.cpu_offload and cell.device == "cpu"
        return "nothing to offload: parameters are already in host memory" if offload else None

    def export(self, cell: Cell, to: str) -> Export | None:
        if to == "accelerate":
            only_here = self.hybrid or self.prefetch or not self.no_sync
            return (
                None
                if only_here
                else fsdp2_export(cell, self.reshard_after_forward, self.cpu_offload)
            )
        values = {"saves": True} | ({"autocast": False} if self.mixed_precision else {})
        return Export("fsdp2.py.j2", values) if to in ("torchrun", "slurm") else None

    def setup(self, job: Job) -> TrainStep:
        import torch
        from torch.distributed import fsdp

        model = job.model()
        store_as_floats(model, torch.bfloat16 if self.mixed_precision else torch.float32)
        mixed = fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        host = fsdp.CPUOffloadPolicy(pin_memory=job.device.type == "cuda")
        shard = functools.partial(
            fsdp.fully_shard,
            mesh=shard_mesh(job, self.replicas if self.hybrid else 1),
            mp_policy=mixed if self.mixed_precision else fsdp.MixedPrecisionPolicy(),
            offload_policy=host if self.cpu_offload else fsdp.OffloadPolicy(),
        )
        shard_block = functools.partial(shard, reshard_after_forward=self.reshard_after_forward)
        blocks = [shard_block(block) for block in job.workload.blocks_of(model)]
        root = shard(model, reshard_after_forward=False)  # backward starts with its parameters
        if self.prefetch:
            prefetch_neighbours(blocks)
        optimizer = job.optimizer_of(model)
        # Only the device's process group can gather offloaded shards.
        job.register(model, optimizer).gather = lambda: (
            (name, p.detach().to(job.device)) for name, p in model.named_parameters()
        )
        job = own_precision(job) if self.mixed_precision else job
        no_sync = functools.partial(without_sync, root) if self.no_sync else None
        return standard_step(job, model, optimizer, no_sync=no_sync)

    @property
    def shards_parameters(self) -> bool:
        return True

    @property
    def accumulates_whole_gradients(self) -> bool:
        return self.no_sync

    @property
    def zero_stage(self) -> int:
        return 3 if self.reshard_after_forward else 2

    def states(self, cell: Cell, layout: Layout, facts: ModelFacts) -> States:
        chosen, shard = self, model_states(cell, facts, shards=self._shards(cell))
        if chosen.cpu_offload and cell.device == "cuda":
            shard = dataclasses.replace(shard, parameters=0.0, optimizer=0.0, transient=0.0)
        whole = cell.micro_batches > 1 and self.accumulates_whole_gradients
        gradients = float(facts.trained_bytes) if whole else shard.transient
        transient = fsdp_transient(
            cell, facts, gradients, chosen.reshard_after_forward, chosen.mixed_precision
        )
        return dataclasses.replace(shard, transient=transient)

    def traffic(self, cell: Cell, layout: Layout, facts: ModelFacts) -> float | None:
        """Returns bytes of parameter gathers (blocks again for backward) and gradient scatters:
        ZeRO-3's 3P minus the root's second gather.

        Without `no_sync` each micro-batch scatters. Hybrid sharding adds all-reduces between
        replicas.
        """
        shards, parts = self._shards(cell), cell.micro_batches
        if cell.precision != "fp32" or sum(facts.sizes) != facts.parameters:
            return None
        blocks = facts.parameters - unit_sizes(make_workload(cell.workload), facts)[""]
        whole = float(facts.parameter_bytes)
        again = whole * blocks / facts.parameters if self.reshard_after_forward else 0.0
        gathered = whole + again
        scattered = whole * (1 if self.no_sync else parts)
        between = all_reduced(self.replicas, scattered / shards) if self.hybrid else 0.0
        return passed_once(shards, parts * gathered + scattered) + between

    def _shards(self, cell: Cell) -> int:
        return cell.devices // (self.replicas if self.hybrid else 1)


def shard_by_block(root: nn.Module, blocks: Iterable[nn.Module], mesh: DeviceMesh) -> None:
    """Shards each block, and the rest with `root`, over a mesh, in place."""
    from torch.distributed.fsdp import fully_shard

    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(root, mesh=mesh, reshard_after_forward=False)


def prefetch_neighbours(blocks: Sequence[FSDPModule]) -> None:
    for block, after in itertools.pairwise(blocks):
        block.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([block])


@contextlib.contextmanager
def without_sync(root: FSDPModule, within_replicas: bool = False) -> Iterator[None]:
    """Defers the reduction of gradients, or with `within_replicas` only the all-reduce between
    replicas."""
    if within_replicas:
        root.set_requires_all_reduce(False)
    else:
        root.set_requires_gradient_sync(False)
    yield
    root.set_requires_gradient_sync(True)


def check_hybrid(cell: Cell, replicas: int = 2) -> None:
    if cell.devices < 2 * replicas or cell.devices % replicas:
        raise Refused(
            f"hybrid sharding makes {replicas} replicas of at least 2 shards each: it needs a"
            f" multiple of {replicas} devices, at least {2 * replicas}, not {cell.devices}"
        )


def shard_mesh(job: Job, replicas: int = 1) -> DeviceMesh:
    """Returns a mesh of shards or, with several replicas, (replicas, shards)."""
    from torch.distributed.device_mesh import init_device_mesh

    devices, kind = job.cell.devices, job.device.type
    if replicas > 1:
        shape = (replicas, devices // replicas)
        return init_device_mesh(kind, shape, mesh_dim_names=("replicate", "shard"))
    return init_device_mesh(kind, (devices,), mesh_dim_names=("shard",))
