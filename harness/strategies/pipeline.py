from __future__ import annotations

from typing import Any

from pydantic import Field

from harness.cell.errors import Refused
from harness.cell.schedules import V_SHAPED, WEIGHTS_APART, Schedule, stages_of_rank
from harness.cell.training import Layout, States, TrainStep
from harness.seam import Capabilities, Cell, Export, Job, ModelFacts, Strategy
from harness.seam.checkpoints import OF_STAGES
from harness.seam.formulas import (
    check_micro_batches,
    hidden_bytes,
    pipeline_states,
)
from harness.workloads import Workload, make_workload
from harness.workloads.family import Split


class Pipeline(Strategy):
    """Pipeline parallelism (torch.distributed.pipelining): one or more stages per rank."""

    capabilities = Capabilities(precisions=("fp32", "bf16"), checkpoints=OF_STAGES, stages=True)

    schedule: Schedule = "1f1b"
    """Order of forwards and backwards. Zero-bubble schedules and dualpipev defer weight gradients
    to idle slots."""
    stages_per_rank: int = Field(default=2, ge=1)
    """Virtual stages per rank for interleaved schedules and looped_bfs. Always 2 (a V's arms) for
    zbv and dualpipev, 1 for gpipe and 1f1b."""

    def layout(self, devices: int) -> Layout:
        return Layout(pipeline=devices)

    def check(self, cell: Cell, workload: Workload) -> None:
        if "stages_per_rank" in self.model_fields_set and self.stages_per_rank != self._per_rank:
            raise Refused(
                f"schedule {self.schedule} has stages_per_rank={self._per_rank}, not"
                f" {self.stages_per_rank}"
            )
        if cell.recompute != "none" and self.schedule in WEIGHTS_APART:
            raise Refused(
                f"schedule {self.schedule} computes weight gradients in separate passes, and"
                " torch's checkpoint would recompute the block in each; use gpipe, 1f1b,"
                " interleaved_1f1b or looped_bfs"
            )
        workload.check_split(Layout(pipeline=cell.devices * self._per_rank))
        check_micro_batches(self.schedule, cell.devices, cell.micro_batches)

    @property
    def _per_rank(self) -> int:
        return stages_of_rank(self.schedule, self.stages_per_rank)

    def _stages_of(self, rank: int, ranks: int) -> tuple[int, ...]:
        count = ranks * self._per_rank
        if self.schedule in V_SHAPED:
            return rank, count - 1 - rank
        return tuple(range(rank, count, ranks))

    def export(self, cell: Cell, to: str) -> Export | None:
        return pipeline_export(cell, to, self.schedule, self._per_rank)

    def setup(self, job: Job) -> TrainStep:
        from harness.seam.pipelining import Pipe, Stage, train_step

        ranks = job.layout.pipeline
        stages, count = self._stages_of(job.rank, ranks), ranks * self._per_rank
        pipe = Pipe(job, self.schedule, [Stage(job, index, count) for index in stages])
        return train_step(job, pipe, job.optimizer(pipe.parameters))

    @property
    def pipeline_schedule(self) -> Schedule:
        return self.schedule

    def pipeline_stages(self, layout: Layout) -> list[tuple[int, ...]]:
        ranks = layout.pipeline
        return [self._stages_of(rank, ranks) for rank in range(ranks)]

    def states(self, cell: Cell, layout: Layout, facts: ModelFacts) -> States | None:
        return pipeline_states(cell, layout, facts, self.pipeline_stages(layout))

    def traffic(self, cell: Cell, layout: Layout, facts: ModelFacts) -> float | None:
        """Counts hidden states, their gradients and tied gradients.

        A V-shaped schedule has one boundary within a rank.
        """
        hidden = hidden_bytes(cell, layout)
        if hidden is None:
            return None
        ranks, split = layout.pipeline, make_workload(cell.workload).split
        v_shaped = self.schedule in V_SHAPED
        boundaries = 2 * (ranks - 1) if v_shaped else ranks * self._per_rank - 1
        sizes = dict(zip(facts.trainable, facts.sizes, strict=True))
        apart = split is not None and ranks > 1 and not v_shaped
        tied = sum(8.0 * sizes[owner] for owner in split.tied.values()) if split and apart else 0.0
        return (2 * hidden * boundaries + tied) / ranks if ranks > 1 else 0.0


def pipeline_export(
    cell: Cell, to: str, schedule: Schedule, per_rank: int = 1, template: str = "pipeline.py.j2"
) -> Export | None:
    """Returns a script whose stages are transformers' model without other layers."""
    split = make_workload(cell.workload).split
    if to not in ("torchrun", "slurm") or split is None:
        return None
    if split.exported:
        raise Refused(split.exported)
    return Export(template, pipeline_values(split, schedule, cell.devices, per_rank))


def pipeline_values(split: Split, schedule: Schedule, ranks: int, per_rank: int) -> dict[str, Any]:
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle

    from harness.seam.pipelining import SCHEDULES

    kind = SCHEDULES[schedule]
    both_ends = schedule in V_SHAPED or ranks == 1
    return {
        "schedule_class": kind.__name__,
        "single": issubclass(kind, PipelineScheduleSingle),
        "stages": ranks * per_rank,
        "per_rank": per_rank,
        "v_shaped": schedule in V_SHAPED,
        "weights_apart": schedule in WEIGHTS_APART,
        "blocks": split.blocks,
        "embedding": list(split.embedding),
        "head": list(split.head),
        "tied_on_a_rank": split.tied if both_ends and per_rank > 1 else {},
        "tied_across_ranks": split.tied if not both_ends else {},
        "sharded": False,
        "between_ends": ranks - 1,
        "loss_said": "The loss is that of the last stage.",
        "loss_of_all": "total.item()",
    }
