"""Pipeline parallelism: layers split over ranks, micro-batches keep them all at work."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from harness.spec.errors import Refused
from harness.strategy import Cell, Job, Layout, ModelFacts, Strategy, TrainStep
from harness.strategy.formulas import hidden_bytes
from harness.strategy.schedules import check_micro_batches
from harness.workloads import Workload, make_workload


class Pipeline(Strategy):
    """Pipeline parallelism (torch.distributed.pipelining): layers split over ranks, micro-batches
    keep them at work."""

    precisions = ("fp32", "bf16")

    schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv"] = (
        "1f1b"
    )
    """Order of forwards and backwards; the zero-bubble ones compute weight gradients apart, where a
    rank would wait."""
    stages_per_rank: int = Field(default=2, ge=1)
    """Virtual stages of a rank under an interleaved schedule; zbv always has 2 (down and up its V),
    gpipe and 1f1b 1."""

    def layout(self, devices: int) -> Layout:
        return Layout(pipeline=devices)

    def check(self, cell: Cell, workload: Workload) -> None:
        if "stages_per_rank" in self.model_fields_set and self.stages_per_rank != self._per_rank:
            raise Refused(
                f"schedule {self.schedule} has stages_per_rank={self._per_rank}, not"
                f" {self.stages_per_rank}"
            )
        if cell.recompute != "none" and self.schedule in ("interleaved_zero_bubble", "zbv"):
            raise Refused(
                f"schedule {self.schedule} computes gradients of weights in passes of their own, in"
                " each of which torch's checkpoint would compute the block again; use gpipe, 1f1b"
                " or interleaved_1f1b"
            )
        workload.check_split(Layout(pipeline=cell.devices * self._per_rank))
        check_micro_batches(self.schedule, cell.devices, cell.micro_batches)

    @property
    def _per_rank(self) -> int:
        return {"gpipe": 1, "1f1b": 1, "zbv": 2}.get(self.schedule, self.stages_per_rank)

    def traffic(self, cell: Cell, layout: Layout, facts: ModelFacts) -> float | None:
        """Hidden states forward and their gradients back over each boundary between ranks, and tied
        gradients between the ends.

        Mean of the ranks: the first and the last have one neighbour only. Of zbv's boundaries one
        is within a rank.
        """
        hidden = hidden_bytes(cell, layout)
        if hidden is None:
            return None
        ranks, split = layout.pipeline, make_workload(cell.workload).split
        boundaries = 2 * (ranks - 1) if self.schedule == "zbv" else ranks * self._per_rank - 1
        sizes = dict(zip(facts.trainable, facts.sizes, strict=True))
        apart = split is not None and ranks > 1 and self.schedule != "zbv"
        tied = sum(8.0 * sizes[owner] for owner in split.tied.values()) if split and apart else 0.0
        return (2 * hidden * boundaries + tied) / ranks if ranks > 1 else 0.0

    def setup(self, job: Job) -> TrainStep:
        from harness.strategy.pipelining import Pipe, train_step
        from harness.strategy.stage import Stage

        ranks, count = job.layout.pipeline, job.layout.pipeline * self._per_rank
        own = (
            [job.rank, count - 1 - job.rank]
            if self.schedule == "zbv"
            else range(job.rank, count, ranks)
        )
        pipe = Pipe(job, self.schedule, [Stage(job, index, count) for index in own])
        return train_step(job, pipe, job.optimizer(pipe.parameters))
