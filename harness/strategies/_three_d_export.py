"""Export of 3D parallelism to standalone scripts."""

from __future__ import annotations

from harness.strategies._pipeline_export import pipeline_values
from harness.strategies._tensor_export import tensor_values
from harness.strategy import Cell, Export, Layout, make_workload
from harness.strategy.schedules import Schedule


def three_d_export(
    cell: Cell, to: str, layout: Layout, axis: str, schedule: Schedule
) -> Export | None:
    """Returns the pipeline's script, with stages split by torch's tensor plan and the data axis
    applied.

    Raises Refused as `tensor_values` does.
    """
    workload = make_workload(cell.workload)
    if to not in ("torchrun", "slurm") or workload.split is None:
        return None
    values = pipeline_values(workload.split, schedule, layout.pipeline, per_rank=1)
    values |= {"plan": {}, "styles": [], "placements": []}
    if layout.tensor > 1:
        values |= tensor_values(workload, workload.split, sequence_parallel=False)
    values |= {
        "axis": axis,
        "shape": (layout.data, layout.pipeline, layout.tensor),
        "sharded": axis == "fsdp2",
        "between_ends": (layout.pipeline - 1) * layout.tensor,
        "loss_said": "The loss is the mean over the ranks that have the last stage.",
        "loss_of_all": f"total.item() / {layout.data * layout.tensor}",
    }
    return Export("three_d.py.j2", values)
