from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from harness.cell.errors import Refused
from harness.cell.training import EXACT, Layout, Retained, States, Tolerance, TrainStep
from harness.measure.memory_kinds import retained_by
from harness.parity.verdict import widest
from harness.seam import Capabilities, Cell, Job, ModelFacts, Strategy
from harness.seam.checkpoints import StateFiles
from harness.seam.formulas import model_states
from harness.seam.job import sharded_loss_scaler, standard_step
from harness.workloads import Workload

if TYPE_CHECKING:
    from fairscale.nn.data_parallel import ShardedDataParallel
    from fairscale.optim import OSS
    from torch import nn

REDUCED = Tolerance(1e-4, 0.03, "gradients travel in fp16")
BROADCAST = Tolerance(
    1e-3,
    0.6,
    "updated parameters travel in fp16 and stay rounded to it: no rank keeps them in fp32",
)


class FairscaleOss(Strategy):
    """fairscale's OSS and ShardedDataParallel (ZeRO-2): ranks update whole parameters.

    torch's sharded loss scaler replaces fairscale's, which is disabled without CUDA.
    """

    requires = ("fairscale",)
    capabilities = Capabilities(
        preload=("fairscale.nn.data_parallel",), checkpoints=("full",), reshards=False
    )

    reduce_buffer_size: int = Field(default=2**23, ge=0)
    """Elements of the persistent bucket that reduces gradients for one rank; 0 for no bucket."""
    reduce_fp16: bool = False
    """Send gradients in fp16; requires reduce_buffer_size=0."""
    broadcast_fp16: bool = False
    """Send updated parameters in fp16."""

    def check(self, cell: Cell, workload: Workload) -> None:
        check_recompute(cell)
        if self.reduce_fp16 and self.reduce_buffer_size and cell.devices > 1:
            raise Refused(
                "fairscale reduces buckets in fp32 and would ignore reduce_fp16: set"
                " reduce_buffer_size to 0"
            )

    def tolerance(self, cell: Cell, workload: Workload) -> Tolerance:
        reduced = REDUCED if self.reduce_fp16 else EXACT
        return widest(reduced, BROADCAST if self.broadcast_fp16 else EXACT)

    def setup(self, job: Job) -> TrainStep:
        from fairscale.nn.data_parallel import ShardedDataParallel
        from fairscale.optim import OSS

        whole = job.model(recompute_by_fairscale)
        factory, kwargs = job.optimizer_class()
        groups = job.parameter_groups(whole.parameters())
        optimizer = OSS(groups, factory, broadcast_fp16=self.broadcast_fp16, **kwargs)
        model = ShardedDataParallel(
            whole,
            optimizer,
            reduce_buffer_size=self.reduce_buffer_size,
            reduce_fp16=self.reduce_fp16,
        )
        files = StateFiles(
            job, {"model": model, "optimizer": optimizer}, gather=optimizer.consolidate_state_dict
        )
        job.register(model, optimizer.optim).states = lambda: retained_by_oss(model, optimizer)
        job.save_by(files.save, files.load)
        job.recipe.clip = optimizer.clip_grad_norm
        return standard_step(
            job,
            model,
            optimizer,
            no_sync=model.no_sync,
            scaler=sharded_loss_scaler(job),
            # OSS's `zero_grad` would detach gradients from ShardedDataParallel's buckets, and later
            # steps would use local gradients.
            clear=functools.partial(model.zero_grad, set_to_none=True),
        )

    @property
    def recomputes_whole_blocks(self) -> bool:
        return True

    @property
    def zero_stage(self) -> int:
        return 2

    def states(self, cell: Cell, layout: Layout, facts: ModelFacts) -> States:
        shares: list[list[int]] = [[] for _ in range(layout.data)]
        for size in facts.sizes:
            min(shares, key=sum).append(size)
        room = min(self.reduce_buffer_size, facts.parameters) if layout.data > 1 else 0
        # Buckets fill up from the smallest gradient, while there is space.
        filled = sum(
            max((end for end in itertools.accumulate(sorted(share)) if end < room), default=0)
            for share in shares
        )
        whole, shard_bytes = model_states(cell, facts), 4.0 * filled
        return dataclasses.replace(
            whole,
            optimizer=whole.optimizer * max(map(sum, shares)) / sum(facts.sizes),
            library=whole.library + shard_bytes,
            transient=whole.transient - shard_bytes,
        )


def retained_by_oss(model: ShardedDataParallel, optimizer: OSS) -> Iterator[Retained]:
    """Yields retained tensors, buckets before their views."""
    for bucket in model._bucket_list:
        yield "library", "reduce buckets of ShardedDataParallel", bucket.buffer
    for device in optimizer.buckets.values():
        for bucket in device.values():
            yield "parameters", "broadcast buckets of OSS", bucket.buffer
    yield from retained_by(model, [optimizer.optim])


def check_recompute(cell: Cell) -> None:
    """Raises Refused if fairscale would recompute differently."""
    if cell.recompute == "selective":
        raise Refused(
            "fairscale's checkpoint_wrapper recomputes whole blocks: use recompute full, or ddp"
            " or fsdp2 for selective"
        )
    if cell.recompute == "full" and cell.precision != "fp32":
        raise Refused(
            "fairscale's checkpoint_wrapper recomputes blocks in CUDA's default autocast"
            " precision, fp16, and on CPUs without autocast: use precision fp32, not"
            f" {cell.precision}"
        )


def recompute_by_fairscale(model: nn.Module, blocks: Sequence[nn.Module], recompute: str) -> None:
    """Recomputes blocks by fairscale's checkpoint_wrapper, which replaces their forward."""
    from fairscale.nn.checkpoint import checkpoint_wrapper

    for block in blocks:
        checkpoint_wrapper(block)
