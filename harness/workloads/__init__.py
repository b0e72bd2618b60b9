"""Models, datasets and losses; and what a model must say of itself to be split."""

from harness.workloads.data import DataSource, prepare_data
from harness.workloads.model import Family, Split, Workload, make_workload, workload_names

__all__ = [
    "DataSource",
    "Family",
    "Split",
    "Workload",
    "make_workload",
    "prepare_data",
    "workload_names",
]
