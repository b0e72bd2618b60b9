"""Naive vertical model parallelism: layers split over ranks, which compute one after the other."""

from __future__ import annotations

from harness.strategy import Cell, Job, Layout, Refused, Strategy, TrainStep, Workload


class Vertical(Strategy):
    """Naive vertical model parallelism: layers split over ranks, one rank at work while the others
    wait."""

    precisions = ("fp32", "bf16")

    def layout(self, devices: int) -> Layout:
        return Layout(pipeline=devices)

    def check(self, cell: Cell, workload: Workload) -> None:
        workload.check_split(self.layout(cell.devices))
        if cell.micro_batches > 1:
            raise Refused(
                f"vertical passes the whole batch on, not {cell.micro_batches} micro-batches; use"
                " strategy pipeline for that"
            )

    def setup(self, job: Job) -> TrainStep:
        from harness.strategy.pipelining import Pipe, train_step
        from harness.strategy.stage import Stage

        pipe = Pipe(job, "gpipe", [Stage(job, job.rank, job.layout.pipeline)])
        return train_step(job, pipe, job.optimizer(pipe.parameters))
