"""The one seam: a strategy is a frozen set of options with one method, `setup(job) -> TrainStep`.

This package is what a strategy of one's own imports; see docs/extending.md.
"""

from harness.spec.training import (
    EXACT,
    Batch,
    Deviation,
    Held,
    Layout,
    StateKind,
    States,
    TrainStep,
)
from harness.strategy.base import Export, Strategy
from harness.strategy.job import Exposed, Job
from harness.strategy.step import loss_scaler, own_precision, standard_step

__all__ = [
    "EXACT",
    "Batch",
    "Deviation",
    "Export",
    "Exposed",
    "Held",
    "Job",
    "Layout",
    "StateKind",
    "States",
    "Strategy",
    "TrainStep",
    "loss_scaler",
    "own_precision",
    "standard_step",
]
