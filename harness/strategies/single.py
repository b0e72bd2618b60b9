from __future__ import annotations

from harness.cell.training import Layout, States, TrainStep
from harness.seam import Capabilities, Cell, Export, Job, ModelFacts, Strategy
from harness.seam.formulas import model_states
from harness.seam.job import standard_step


class Single(Strategy):
    """One process on one device."""

    capabilities = Capabilities(
        process_group=False,
        max_devices=1,
        compiles=("block", "block_cudagraphs"),
        extra_optimizers=("adamw_8bit", "muon"),
        fused_loss=True,
    )

    def export(self, cell: Cell, to: str) -> Export | None:
        return Export("single.py.j2", {"saves": True}) if to in ("torchrun", "slurm") else None

    def setup(self, job: Job) -> TrainStep:
        model = job.model()
        optimizer = job.optimizer_of(model)
        job.register(model, optimizer)
        return standard_step(job, model, optimizer)

    def states(self, cell: Cell, layout: Layout, facts: ModelFacts) -> States:
        return model_states(cell, facts)
