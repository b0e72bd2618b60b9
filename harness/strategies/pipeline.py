"""Pipeline parallelism: layers split over ranks, micro-batches keep them all at work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from harness.cell import Cell
from harness.errors import Refused
from harness.strategy import Job, Layout, Strategy, TrainStep

if TYPE_CHECKING:
    from harness.workloads import Workload


class Pipeline(Strategy):
    """Pipeline parallelism (torch.distributed.pipelining): layers split over ranks, micro-batches keep them at work."""

    precisions = ("fp32", "bf16")

    schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv"] = "1f1b"
    """Order of forwards and backwards; the zero-bubble ones compute weight gradients apart, where a rank would wait."""
    stages_per_rank: int = Field(default=2, ge=2)
    """Virtual stages of a rank under an interleaved schedule; zbv has 2, gpipe and 1f1b have 1 whatever is said here."""

    def layout(self, devices: int) -> Layout:
        return Layout(pipeline=devices)

    def check(self, cell: Cell, workload: Workload) -> None:
        from harness.pipelining import check_micro_batches

        if self.schedule == "zbv" and self.stages_per_rank != 2:
            raise Refused(f"schedule zbv has 2 stages per rank, not {self.stages_per_rank}")
        workload.check_split(Layout(pipeline=cell.devices * self._per_rank))
        check_micro_batches(self.schedule, cell.devices, cell.micro_batches)

    @property
    def _per_rank(self) -> int:
        return 1 if self.schedule in ("gpipe", "1f1b") else self.stages_per_rank

    def setup(self, job: Job) -> TrainStep:
        from harness.pipelining import Pipe, stage_indices, train_step
        from harness.workloads.stage import Stage

        ranks = job.layout.pipeline
        indices = stage_indices(self.schedule, job.rank, ranks, self._per_rank)
        pipe = Pipe(job, self.schedule, [Stage(job, index, ranks * self._per_rank) for index in indices])
        return train_step(job, pipe, job.optimizer(pipe.parameters))
