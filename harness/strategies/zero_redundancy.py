from __future__ import annotations

from harness.cell.training import Layout, States, TrainStep
from harness.seam import Capabilities, Cell, Job, ModelFacts, Strategy
from harness.seam.checkpoints import StateFiles
from harness.seam.formulas import (
    all_reduced,
    dealt_out_states,
    passed_once,
    whole_model_states,
)
from harness.seam.job import standard_step
from harness.strategies.ddp import ddp_buckets, wrap_in_ddp


class ZeroRedundancy(Strategy):
    """DDP with ZeroRedundancyOptimizer (ZeRO-1): optimizer state is sharded by whole parameters.

    `overlap_with_ddp` is not offered, as it skips the first updates.
    """

    capabilities = Capabilities(reshards=False, skips_parameters=True)

    parameters_as_bucket_view: bool = False
    """Store a rank's parameters in one tensor, sent by a single broadcast."""

    def setup(self, job: Job) -> TrainStep:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        model = wrap_in_ddp(job, job.model())
        factory, kwargs = job.optimizer_class()
        # ZeroRedundancyOptimizer would also broadcast the frozen parameters.
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = ZeroRedundancyOptimizer(
            job.parameter_groups(trained),
            factory,
            parameters_as_bucket_view=self.parameters_as_bucket_view,
            **kwargs,
        )
        files = StateFiles(
            job,
            {"model": model, "optimizer": optimizer},
            gather=lambda: optimizer.consolidate_state_dict(to=0),
        )
        job.register(model, optimizer.optim).library = lambda: ddp_buckets(model)
        # The library saves one file; torch can also save each rank's inner optimizer as a shard.
        if job.cell.checkpoint == "full":
            job.save_by(files.save, files.load)
        return standard_step(job, model, optimizer, no_sync=model.no_sync)

    @property
    def zero_stage(self) -> int:
        return 1

    def states(self, cell: Cell, layout: Layout, facts: ModelFacts) -> States:
        return dealt_out_states(whole_model_states(cell, facts), facts, layout.data)

    def traffic(self, cell: Cell, layout: Layout, facts: ModelFacts) -> float:
        """Counts DDP's all-reduce and the parameter broadcasts. ZeRO-1 as published scatters
        gradients instead."""
        ranks, size = layout.data, float(facts.trained_bytes)
        buffers = facts.buffer_bytes - facts.scale_bytes
        return all_reduced(ranks, size) + passed_once(ranks, size + buffers)
