"""FSDP2 (`fully_shard`): every parameter is a DTensor, sharded over the ranks along its first
dimension."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from harness.spec.cell import Cell
from harness.spec.errors import Refused
from harness.spec.training import EXACT, Layout, States, Tolerance, TrainStep
from harness.strategies._accelerate_config import accelerate_export, fsdp2_settings
from harness.strategy.base import Export, Strategy
from harness.strategy.formulas import all_reduced, model_states, passed_once
from harness.strategy.job import Job
from harness.strategy.sharding import blocks_of, check_hybrid, shard_mesh
from harness.strategy.step import own_precision, standard_step
from harness.workloads import make_workload

if TYPE_CHECKING:
    from harness.workloads import Workload
    from harness.workloads.counts import ModelFacts

MIXED = Tolerance(
    5e-2, 1.0, "the residual stream and the norms are bf16 too, which autocast keeps in fp32"
)


class Fsdp2(Strategy):
    """FSDP2 (`fully_shard`): parameters sharded one by one, gathered block by block when they are
    needed."""

    reshard_after_forward: bool = True
    """Free a block's gathered parameters between forward and backward (ZeRO-3); otherwise keep them
    (ZeRO-2)."""
    hybrid: bool = False
    """Shard within each of 2 replicas and all-reduce between them."""
    cpu_offload: bool = False
    """Keep shards, their gradients and the optimizer in host memory."""
    prefetch: bool = False
    """Say explicitly which block to gather while another computes, instead of leaving the order to
    FSDP."""
    mixed_precision: bool = False
    """Gather parameters in bf16 and reduce gradients in fp32, instead of autocast.

    The cell's precision must be bf16.
    """
    no_sync: bool = True
    """Reduce gradients after the last micro-batch only; until then each rank holds them whole."""

    def check(self, cell: Cell, workload: Workload) -> None:
        if self.hybrid:
            check_hybrid(cell)
        if self.mixed_precision and cell.precision != "bf16":
            raise Refused(
                "mixed_precision of fsdp2 is bf16: set the cell's precision to bf16, it is"
                f" {cell.precision}"
            )
        if self.cpu_offload and cell.device == "cuda" and cell.precision == "fp16":
            raise Refused(
                "loss scaling would have to reduce infinities of gradients in host memory over"
                " NCCL, which cannot; use bf16"
            )

    def tolerance(self, cell: Cell, workload: Workload) -> Tolerance:
        return MIXED if self.mixed_precision else EXACT

    @property
    def shards_parameters(self) -> bool:
        return True

    def stand_in(self, cell: Cell) -> str | None:
        offload = self.cpu_offload and cell.device == "cpu"
        return "no device to leave: parameters are already in host memory" if offload else None

    def states(self, cell: Cell, layout: Layout, facts: ModelFacts) -> States:
        shard = model_states(cell, facts, shards=cell.devices // 2 if self.hybrid else cell.devices)
        return (
            shard
            if self.reshard_after_forward
            else dataclasses.replace(shard, transient=4.0 * facts.parameters)
        )

    def traffic(self, cell: Cell, layout: Layout, facts: ModelFacts) -> float | None:
        """Parameters gathered for forward, a block's again for backward, gradients scattered:
        ZeRO-3's 3P less what the root keeps.

        Embedding and head stay gathered between forward and backward. Without `no_sync` each
        micro-batch scatters its gradients; hybrid sharding also all-reduces the shards' between the
        replicas.
        """
        shards, parts = cell.devices // 2 if self.hybrid else cell.devices, cell.micro_batches
        if cell.precision != "fp32" or sum(facts.sizes) != facts.parameters:
            return None
        path = make_workload(cell.workload).block_path
        blocks = sum(
            size
            for name, size in zip(facts.trainable, facts.sizes, strict=True)
            if path and name.startswith(path + ".")
        )
        whole = 4.0 * facts.parameters
        gathered = whole + (4.0 * blocks if self.reshard_after_forward else 0.0)
        scattered = whole * (1 if self.no_sync else parts)
        between = all_reduced(2, scattered / shards) if self.hybrid else 0.0
        return passed_once(shards, parts * gathered + scattered) + between

    def export(self, cell: Cell, to: str) -> Export | None:
        """Accelerate's FSDP2 has no prefetch and no hybrid of its own, computes wholly in half, and
        offloads on GPUs only."""
        beyond = (
            self.hybrid
            or self.prefetch
            or not self.no_sync
            or cell.precision != "fp32"
            or (self.cpu_offload and cell.device == "cpu")
        )
        if to == "accelerate" and not beyond:
            workload = make_workload(cell.workload)
            settings = fsdp2_settings(
                workload,
                reshard_after_forward=self.reshard_after_forward,
                offload_params=self.cpu_offload,
            )
            return accelerate_export(cell, fsdp=settings) if workload.kind != "image" else None
        return (
            Export("fsdp2.py.j2", {"autocast": False} if self.mixed_precision else {})
            if to in ("torchrun", "slurm")
            else None
        )

    def setup(self, job: Job) -> TrainStep:
        import torch
        from torch.distributed.fsdp import (
            CPUOffloadPolicy,
            FSDPModule,
            MixedPrecisionPolicy,
            OffloadPolicy,
            fully_shard,
        )

        model = job.model()
        mesh = shard_mesh(job, self.hybrid)
        policy = (
            MixedPrecisionPolicy(torch.bfloat16, torch.float32)
            if self.mixed_precision
            else MixedPrecisionPolicy()
        )
        offload = (
            CPUOffloadPolicy(pin_memory=job.device.type == "cuda")
            if self.cpu_offload
            else OffloadPolicy()
        )
        shard = functools.partial(fully_shard, mesh=mesh, mp_policy=policy, offload_policy=offload)
        blocks: list[FSDPModule] = [
            shard(b, reshard_after_forward=self.reshard_after_forward)
            for b in blocks_of(job, model)
        ]
        root: FSDPModule = shard(model, reshard_after_forward=False)  # backward needs it first
        if self.prefetch:
            for block, after in itertools.pairwise(blocks):
                block.set_modules_to_forward_prefetch([after])
                after.set_modules_to_backward_prefetch([block])

        @contextlib.contextmanager
        def no_sync() -> Iterator[None]:
            root.set_requires_gradient_sync(False)
            yield
            root.set_requires_gradient_sync(True)

        optimizer = job.optimizer(model.parameters())
        # Offloaded shards must be on the device to be gathered over its process group.
        job.register(
            model,
            optimizer,
            gather=lambda: ((n, p.detach().to(job.device)) for n, p in model.named_parameters()),
        )
        job = own_precision(job) if self.mixed_precision else job
        return standard_step(job, model, optimizer, no_sync=no_sync if self.no_sync else None)
