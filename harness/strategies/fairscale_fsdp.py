from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.cell.errors import Refused, Unavailable
from harness.cell.training import Layout, Retained, States, TrainStep
from harness.seam import Capabilities, Cell, Job, ModelFacts, Strategy
from harness.seam.checkpoints import StateDict, StateFiles
from harness.seam.formulas import fsdp_transient, model_states
from harness.seam.job import sharded_loss_scaler, standard_step
from harness.strategies.fairscale_oss import check_recompute, recompute_by_fairscale
from harness.workloads import Workload

if TYPE_CHECKING:
    from fairscale.nn.data_parallel import FullyShardedDataParallel
    from torch import Tensor


class FairscaleFsdp(Strategy):
    """fairscale's FullyShardedDataParallel: each block gathered as one flat tensor when it runs."""

    requires = ("fairscale",)
    capabilities = Capabilities(
        preload=("fairscale.nn.data_parallel",), checkpoints=("sharded",), reshards=False
    )

    reshard_after_forward: bool = True
    """Free gathered parameters between forward and backward (zero_dp_3) or keep them
    (zero_dp_2)."""
    cpu_offload: bool = False
    """Keep shards, their gradients and the optimizer in host memory."""
    no_sync: bool = True
    """Reduce gradients only after the last micro-batch; until then ranks hold them whole."""

    def check(self, cell: Cell, workload: Workload) -> None:
        check_recompute(cell)
        if workload.partly_frozen:
            raise Refused(
                f"{workload.name} freezes some parameters, and a flat parameter is trained or"
                " frozen as a whole: use fsdp1 or fsdp2"
            )
        if cell.decay == "matrices":
            raise Refused(
                "fairscale's flat parameters mix matrices and vectors, which cannot decay"
                " differently: use decay all, or fsdp1 or fsdp2"
            )
        if self.cpu_offload and not self.no_sync and cell.micro_batches > 1:
            raise Refused(
                "fairscale drops the offloaded gradients of earlier micro-batches: use"
                " no_sync=true, or micro_batches 1"
            )
        if cell.device != "cuda":
            raise Unavailable("fairscale's FullyShardedDataParallel needs CUDA streams; use a GPU")

    def setup(self, job: Job) -> TrainStep:
        import torch
        from fairscale.nn.data_parallel import FullyShardedDataParallel

        # Offloaded shards come from a model in host memory.
        home = torch.device("cpu") if self.cpu_offload else job.device
        shard = functools.partial(
            FullyShardedDataParallel,
            reshard_after_forward=self.reshard_after_forward,
            move_params_to_cpu=self.cpu_offload,
            compute_device=job.device,
        )
        at_home = dataclasses.replace(job, device=home)
        whole, job.recomputes = at_home.model(recompute_by_fairscale), at_home.recomputes
        for path in job.workload.block_paths:
            blocks = whole.get_submodule(path)
            for name, block in list(blocks.named_children()):
                setattr(blocks, name, shard(block))
        model = shard(whole)

        def gather() -> Iterator[tuple[str, Tensor]]:
            with model.summon_full_params(volatile=True):
                yield from model.named_parameters()

        job.recipe.clip = model.clip_grad_norm_
        optimizer = job.optimizer(model.parameters())
        files = StateFiles(job, {"model": LocalState(model), "optimizer": optimizer})
        registered = job.register(model, optimizer)
        registered.gather = gather
        registered.library = lambda: pinned_gradients(model)
        job.save_by(files.save, files.load)
        no_sync, scaler = model.no_sync if self.no_sync else None, sharded_loss_scaler(job)
        return standard_step(job, model, optimizer, no_sync=no_sync, scaler=scaler)

    @property
    def recomputes_whole_blocks(self) -> bool:
        return True

    @property
    def shards_parameters(self) -> bool:
        return True

    @property
    def accumulates_whole_gradients(self) -> bool:
        return self.no_sync

    def states(self, cell: Cell, layout: Layout, facts: ModelFacts) -> States:
        shard = model_states(cell, facts, shards=layout.data)
        if self.cpu_offload:
            shard = dataclasses.replace(shard, parameters=0.0, optimizer=0.0)
        whole = cell.micro_batches > 1 and self.accumulates_whole_gradients
        gradients = float(facts.trained_bytes) if whole else shard.transient
        reshards = self.reshard_after_forward
        transient = fsdp_transient(cell, facts, gradients, reshards, flat=True)
        return dataclasses.replace(shard, transient=transient)


@dataclass(frozen=True)
class LocalState:
    model: FullyShardedDataParallel

    def state_dict(self) -> StateDict:
        state: StateDict = self.model.local_state_dict()
        return state

    def load_state_dict(self, state_dict: StateDict) -> None:
        for module in self.model.modules():
            if isinstance(module, type(self.model)):
                module._lazy_init()  # usually done by the first forward; loading fails without it
        self.model.load_local_state_dict(state_dict)


def pinned_gradients(model: FullyShardedDataParallel) -> Iterator[Retained]:
    for parameter in model.parameters():
        if hasattr(parameter, "_cpu_grad"):
            yield "library", "pinned gradients", parameter._cpu_grad
