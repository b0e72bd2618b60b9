"""FSDP2 (`fully_shard`), which shards each parameter as a DTensor along its first dimension."""

from __future__ import annotations

import dataclasses
import functools

from harness.spec.training import EXACT, Layout, States, Tolerance, TrainStep
from harness.strategies import _fsdp
from harness.strategies._accelerate_config import fsdp2_export
from harness.strategy import Capabilities, Cell, CostModel, Export, Job, ModelFacts, Strategy
from harness.strategy.formulas import all_reduced, model_states, passed_once
from harness.strategy.sharding import shard_mesh
from harness.strategy.step import own_precision, standard_step
from harness.workloads import Workload, make_workload


class Fsdp2(Strategy):
    """FSDP2 (`fully_shard`): parameters sharded individually and gathered block by block."""

    capabilities = Capabilities(
        compiles=("block",),
        extra_optimizers=("muon",),
    )

    reshard_after_forward: bool = True
    """Free gathered parameters between forward and backward (ZeRO-3) or keep them (ZeRO-2)."""
    hybrid: bool = False
    """Shard within each of 2 replicas and all-reduce between them."""
    cpu_offload: bool = False
    """Keep shards, their gradients and the optimizer in host memory."""
    prefetch: bool = False
    """Prefetch the neighbouring block while one computes, instead of leaving the order to FSDP."""
    mixed_precision: bool = False
    """Gather parameters in bf16 and reduce gradients in fp32, instead of autocast (bf16 only)."""
    no_sync: bool = True
    """Reduce gradients only after the last micro-batch; until then ranks hold them whole."""

    def check(self, cell: Cell, workload: Workload) -> None:
        _fsdp.check_options(cell, self.hybrid, self.mixed_precision, self.cpu_offload)

    def tolerance(self, cell: Cell, workload: Workload) -> Tolerance:
        return _fsdp.MIXED if self.mixed_precision else EXACT

    def stand_in(self, cell: Cell) -> str | None:
        offload = self.cpu_offload and cell.device == "cpu"
        return "no device to leave: parameters are already in host memory" if offload else None

    def export(self, cell: Cell, to: str) -> Export | None:
        if to == "accelerate":
            own = self.hybrid or self.prefetch or not self.no_sync
            return None if own else fsdp2_export(cell, self.reshard_after_forward, self.cpu_offload)
        values: dict[str, object] = {"autocast": False} if self.mixed_precision else {}
        return Export("fsdp2.py.j2", values) if to in ("torchrun", "slurm") else None

    @property
    def costs(self) -> Fsdp2Costs:
        return Fsdp2Costs(self)

    def setup(self, job: Job) -> TrainStep:
        from torch.distributed.fsdp import fully_shard

        model = job.model()
        policies = _fsdp.policies(job, self.mixed_precision, self.cpu_offload)
        shard = functools.partial(fully_shard, mesh=shard_mesh(job, self.hybrid), **policies)
        shard_block = functools.partial(shard, reshard_after_forward=self.reshard_after_forward)
        blocks = [shard_block(block) for block in job.workload.blocks_of(model)]
        root = shard(model, reshard_after_forward=False)  # backward needs it first
        if self.prefetch:
            _fsdp.prefetch_neighbours(blocks)
        optimizer = job.optimizer_of(model)
        job.register(model, optimizer, gather=lambda: _fsdp.shards_on_device(job, model))
        job = own_precision(job) if self.mixed_precision else job
        no_sync = functools.partial(_fsdp.without_sync, root) if self.no_sync else None
        return standard_step(job, model, optimizer, no_sync=no_sync)


class Fsdp2Costs(CostModel[Fsdp2]):
    @property
    def shards_parameters(self) -> bool:
        return True

    @property
    def zero_stage(self) -> int:
        return 3 if self.strategy.reshard_after_forward else 2

    def states(self, cell: Cell, layout: Layout, facts: ModelFacts) -> States:
        shard = model_states(cell, facts, shards=self._shards(cell))
        if self.strategy.reshard_after_forward:
            return shard
        return dataclasses.replace(shard, transient=4.0 * facts.parameters)

    def traffic(self, cell: Cell, layout: Layout, facts: ModelFacts) -> float | None:
        """Returns bytes of parameter gathers (blocks again for backward) and gradient scatters.

        This is ZeRO-3's 3P minus the root's second gather. Without `no_sync` each micro-batch
        scatters its gradients. Hybrid sharding adds all-reduces between replicas.
        """
        shards, parts = self._shards(cell), cell.micro_batches
        if cell.precision != "fp32" or sum(facts.sizes) != facts.parameters:
            return None
        path = make_workload(cell.workload).block_path
        blocks = sum(
            size
            for name, size in zip(facts.trainable, facts.sizes, strict=True)
            if path and name.startswith(path + ".")
        )
        whole = 4.0 * facts.parameters
        gathered = whole + (4.0 * blocks if self.strategy.reshard_after_forward else 0.0)
        scattered = whole * (1 if self.strategy.no_sync else parts)
        between = all_reduced(2, scattered / shards) if self.strategy.hybrid else 0.0
        return passed_once(shards, parts * gathered + scattered) + between

    def messages(self, cell: Cell, layout: Layout, facts: ModelFacts) -> float | None:
        blocks, chosen = make_workload(cell.workload).blocks, self.strategy
        return _fsdp.sharded_messages(
            cell, blocks, chosen.reshard_after_forward, chosen.hybrid, chosen.no_sync
        )

    def _shards(self, cell: Cell) -> int:
        return cell.devices // 2 if self.strategy.hybrid else cell.devices
