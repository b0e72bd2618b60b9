"""Everything a strategy needs, without importing torch."""

from harness.cell.cell import Cell
from harness.cell.errors import Refused, Unavailable
from harness.cell.training import (
    EXACT,
    Batch,
    Layout,
    Retained,
    StateKind,
    States,
    Tolerance,
    TrainStep,
)
from harness.seam.base import Capabilities, CostModel, Emulation, Export, OwnLauncher, Strategy
from harness.seam.formulas import all_reduced, model_states, passed_once, whole_model_states
from harness.seam.job import Job, TrainState, loss_scaler, own_precision, standard_step
from harness.workloads import Workload, make_workload
from harness.workloads.counts import ModelFacts, model_facts

__all__ = [
    "EXACT",
    "Batch",
    "Capabilities",
    "Cell",
    "CostModel",
    "Emulation",
    "Export",
    "Job",
    "Layout",
    "ModelFacts",
    "OwnLauncher",
    "Refused",
    "Retained",
    "StateKind",
    "States",
    "Strategy",
    "Tolerance",
    "TrainState",
    "TrainStep",
    "Unavailable",
    "Workload",
    "all_reduced",
    "loss_scaler",
    "make_workload",
    "model_facts",
    "model_states",
    "own_precision",
    "passed_once",
    "standard_step",
    "whole_model_states",
]
