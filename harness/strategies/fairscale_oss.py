"""fairscale's OSS and ShardedDataParallel."""

from __future__ import annotations

import dataclasses
import itertools

from pydantic import Field

from harness.parity.verdict import widest
from harness.spec.errors import Refused
from harness.spec.training import EXACT, Layout, States, Tolerance, TrainStep
from harness.strategies import _fairscale
from harness.strategy import Capabilities, Cell, CostModel, Job, ModelFacts, Strategy, Workload
from harness.strategy.formulas import BESIDE_BACKWARD, model_states
from harness.strategy.step import sharded_loss_scaler, standard_step


class FairscaleOss(Strategy):
    """fairscale's OSS and ShardedDataParallel (zero_dp_1): ranks update whole parameters.

    Gradients must be cleared through the model, not the optimizer: see `clear` in _fairscale.py. In
    fp16 all ranks must skip the same steps. torch's sharded loss scaler works on both devices;
    fairscale's ShardedGradScaler is disabled without CUDA.
    """

    requires = ("fairscale",)
    capabilities = Capabilities(preload=("fairscale.nn.data_parallel",))

    reduce_buffer_size: int = Field(default=2**23, ge=0)
    """Elements of the persistent bucket that reduces gradients for one rank; 0: no bucket."""
    reduce_fp16: bool = False
    """Send gradients in fp16; requires reduce_buffer_size=0."""
    broadcast_fp16: bool = False
    """Send updated parameters in fp16."""

    def check(self, cell: Cell, workload: Workload) -> None:
        _fairscale.check_recompute(cell)
        if self.reduce_fp16 and self.reduce_buffer_size and cell.devices > 1:
            raise Refused(
                "fairscale reduces buckets in fp32 and would ignore reduce_fp16: set"
                " reduce_buffer_size to 0"
            )

    def tolerance(self, cell: Cell, workload: Workload) -> Tolerance:
        reduced = _fairscale.REDUCED if self.reduce_fp16 else EXACT
        return widest(reduced, _fairscale.BROADCAST if self.broadcast_fp16 else EXACT)

    @property
    def costs(self) -> FairscaleOssCosts:
        return FairscaleOssCosts(self)

    def setup(self, job: Job) -> TrainStep:
        from fairscale.nn.data_parallel import ShardedDataParallel
        from fairscale.optim import OSS

        whole = job.model(_fairscale.recompute_by_fairscale)
        factory, kwargs = job.optimizer_class()
        optimizer = OSS(whole.parameters(), factory, broadcast_fp16=self.broadcast_fp16, **kwargs)
        model = ShardedDataParallel(
            whole,
            optimizer,
            reduce_buffer_size=self.reduce_buffer_size,
            reduce_fp16=self.reduce_fp16,
        )
        job.register(
            model, optimizer.optim, states=lambda: _fairscale.retained_by_oss(model, optimizer)
        )
        return standard_step(
            job,
            model,
            optimizer,
            no_sync=model.no_sync,
            scaler=sharded_loss_scaler(job),
            clear=lambda: _fairscale.clear(model, optimizer),
        )


class FairscaleOssCosts(CostModel[FairscaleOss]):
    @property
    def recomputes_whole_blocks(self) -> bool:
        return True

    @property
    def zero_stage(self) -> int:
        return 2

    def states(self, cell: Cell, layout: Layout, facts: ModelFacts) -> States:
        """Returns whole parameters, gradient buckets, and the fullest rank's optimizer state."""
        shares: list[list[int]] = [[] for _ in range(layout.data)]
        for size in facts.sizes:
            min(shares, key=sum).append(size)
        room = min(self.strategy.reduce_buffer_size, facts.parameters) if layout.data > 1 else 0
        # Buckets fill from the smallest gradient on, while space remains.
        filled = sum(
            max((end for end in itertools.accumulate(sorted(share)) if end < room), default=0)
            for share in shares
        )
        whole, kept = model_states(cell, facts), 4.0 * filled
        return dataclasses.replace(
            whole,
            optimizer=whole.optimizer * max(map(sum, shares)) / sum(facts.sizes),
            library=whole.library + kept,
            transient=whole.transient - kept,
        )

    def messages(self, cell: Cell, layout: Layout, facts: ModelFacts) -> float | None:
        """Counts a reduction per rank (per gradient if unbucketed) and a broadcast per rank."""
        reduced = layout.data if self.strategy.reduce_buffer_size else len(facts.sizes)
        return layout.data + BESIDE_BACKWARD * reduced
