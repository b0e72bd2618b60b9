"""Export of torch's pipelines to standalone scripts."""

from __future__ import annotations

from typing import Any

from harness.strategy import Cell, Export, make_workload
from harness.strategy.schedules import V_SHAPED, WEIGHTS_APART, Schedule
from harness.workloads.family import Split


def pipeline_export(cell: Cell, to: str, schedule: Schedule, per_rank: int) -> Export | None:
    """Returns a script whose stages are transformers' model without other stages' layers.

    Parameters tied across ranks have two copies, whose gradients are summed. `per_rank`: stages of
    a rank.
    """
    split = make_workload(cell.workload).split
    if to not in ("torchrun", "slurm") or split is None:
        return None
    return Export("pipeline.py.j2", pipeline_values(split, schedule, cell.devices, per_rank))


def pipeline_values(split: Split, schedule: Schedule, ranks: int, per_rank: int) -> dict[str, Any]:
    """Returns the template's values for a pure pipeline of this many ranks."""
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle

    from harness.strategy.pipelining import SCHEDULES

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
