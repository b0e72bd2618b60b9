"""Models with their losses, datasets, and the ways to split a model."""

from harness.workloads.catalog import make_workload, workload_names
from harness.workloads.family import Family, Split
from harness.workloads.training_data import DataSource, prepare_data
from harness.workloads.workload import Workload

__all__ = [
    "DataSource",
    "Family",
    "Split",
    "Workload",
    "make_workload",
    "prepare_data",
    "workload_names",
]
