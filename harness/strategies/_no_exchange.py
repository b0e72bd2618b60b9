from __future__ import annotations

from harness.cell.training import TrainStep
from harness.seam import Capabilities, Job, Strategy
from harness.seam.job import standard_step


class NoExchange(Strategy):
    """Data parallelism without communication: each rank trains alone on its share."""

    capabilities = Capabilities(process_group=False, extra_optimizers=("adamw_8bit", "muon"))

    def setup(self, job: Job) -> TrainStep:
        model = job.model()
        optimizer = job.optimizer_of(model)
        job.register(model, optimizer)
        return standard_step(job, model, optimizer)
