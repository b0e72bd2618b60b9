"""Half precision throughout instead of autocast, and its reference."""

from __future__ import annotations

from harness.spec.cell import Cell
from harness.spec.training import EXACT, Tolerance

WHOLLY = Tolerance(
    EXACT.loss,
    EXACT.update,
    "norms, residual stream and gradients are in half precision too; only the update is in fp32",
)


def half_throughout(cell: Cell, rounded_masters: bool = False) -> Cell:
    """Returns apex-style O2 in one process; see `Amp.rounded_masters`."""
    rounded = {"rounded_masters": True} if rounded_masters else {}
    return cell.reference("amp", {"opt_level": "O2", **rounded})
