from __future__ import annotations

from harness.cell.errors import Refused
from harness.cell.training import Layout, States, TrainStep
from harness.seam import Capabilities, Cell, Export, Job, ModelFacts, Strategy
from harness.seam.checkpoints import OF_STAGES
from harness.seam.formulas import pipeline_states
from harness.strategies.pipeline import pipeline_export
from harness.workloads import Workload


class Vertical(Strategy):
    """Naive vertical model parallelism: layers split over ranks, which compute one at a time."""

    capabilities = Capabilities(precisions=("fp32", "bf16"), checkpoints=OF_STAGES, stages=True)

    def layout(self, devices: int) -> Layout:
        return Layout(pipeline=devices)

    def check(self, cell: Cell, workload: Workload) -> None:
        workload.check_split(self.layout(cell.devices))
        if cell.micro_batches > 1:
            raise Refused(
                f"vertical passes on the whole batch, not {cell.micro_batches} micro-batches; use"
                " strategy pipeline for that"
            )

    def export(self, cell: Cell, to: str) -> Export | None:
        return pipeline_export(cell, to, "gpipe")

    def setup(self, job: Job) -> TrainStep:
        from harness.seam.pipelining import Pipe, Stage, train_step

        pipe = Pipe(job, "gpipe", [Stage(job, job.rank, job.layout.pipeline)])
        return train_step(job, pipe, job.optimizer(pipe.parameters))

    def states(self, cell: Cell, layout: Layout, facts: ModelFacts) -> States | None:
        return pipeline_states(cell, layout, facts, self.pipeline_stages(layout))
