"""Models, datasets and losses; and what a model must say of itself to be split."""

from harness.workloads.data import DataSource, prepare_data
from harness.workloads.registry import make_workload, workload_names
from harness.workloads.workload import Family, Split, Workload

__all__ = [
    "DataSource",
    "Family",
    "Split",
    "Workload",
    "make_workload",
    "prepare_data",
    "workload_names",
]
