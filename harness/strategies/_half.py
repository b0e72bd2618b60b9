from __future__ import annotations

from typing import Literal

from harness.cell.cell import Cell
from harness.cell.training import EXACT, Layout, Tolerance
from harness.seam.registry import HALF_RANKS

Order = Literal["ranks", "micro_batches", "fp32"]
WHOLLY = Tolerance(
    EXACT.loss,
    EXACT.update,
    "norms, residual stream and gradients are in half precision too; only the update is in fp32",
)


def half_throughout(
    cell: Cell, layout: Layout, rounded_masters: bool = False, order: Order = "ranks"
) -> Cell:
    """Returns the reference of half-precision cells: AMP's O2 in one process. See `Amp` for
    `rounded_masters`, and `HalfRanks` for `order`."""
    options: dict[str, object] = {"opt_level": "O2", "ranks": layout.data}
    options |= {"rounded_masters": True} if rounded_masters else {}
    if order == "fp32" or cell.micro_batches > 1:
        options["order"] = order
    reference = cell.reference(HALF_RANKS, options)
    return reference.model_copy(update={"micro_batches": layout.data * cell.micro_batches})
