"""One process on one device: the reference of every parity check and of scaling efficiency."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.cell import Cell
from harness.strategy import Export, Job, Layout, States, Strategy, TrainStep
from harness.training import model_states, standard_step

if TYPE_CHECKING:
    from harness.workloads.facts import ModelFacts


class Single(Strategy):
    """One process on one device."""

    process_group = False
    max_devices = 1

    def states(self, cell: Cell, layout: Layout, facts: ModelFacts) -> States:
        return model_states(cell, facts)

    def export(self, cell: Cell, to: str) -> Export | None:
        return Export("single.py.j2") if to in ("torchrun", "slurm") else None

    def setup(self, job: Job) -> TrainStep:
        model = job.model()
        optimizer = job.optimizer(model.parameters())
        job.expose(model, optimizer)
        return standard_step(job, model, optimizer)
