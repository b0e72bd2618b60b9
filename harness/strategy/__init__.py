"""The one seam: a strategy is a frozen set of options with one method, `setup(job) -> TrainStep`.

This package is what a strategy of one's own imports; see docs/extending.md.
"""

from harness import RENAMED_NAMES, warn_renamed
from harness.spec.training import (
    EXACT,
    Batch,
    Layout,
    Retained,
    StateKind,
    States,
    Tolerance,
    TrainStep,
)
from harness.strategy.base import Export, Strategy
from harness.strategy.job import Job, TrainState
from harness.strategy.step import loss_scaler, own_precision, standard_step

__all__ = [
    "EXACT",
    "Batch",
    "Export",
    "Job",
    "Layout",
    "Retained",
    "StateKind",
    "States",
    "Strategy",
    "Tolerance",
    "TrainState",
    "TrainStep",
    "loss_scaler",
    "own_precision",
    "standard_step",
]


def __getattr__(name: str) -> object:
    """A former name of the seam, which still works and warns."""
    if (now := RENAMED_NAMES.get(name, "")) not in globals():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warn_renamed(f"{__name__}.{name}", now)
    return globals()[now]
