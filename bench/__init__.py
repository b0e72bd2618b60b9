"""What to run: the command line, its matrices, and their Python interface.

Names are imported on first use, so `import bench` is quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.api import RecordedRuns, fits, load, plan, run
    from harness.cell.cell import Cell
    from harness.cell.errors import UsageError

__all__ = ["Cell", "RecordedRuns", "UsageError", "fits", "load", "plan", "run"]

_ELSEWHERE = {"Cell": "harness.cell.cell", "UsageError": "harness.cell.errors"}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_ELSEWHERE.get(name, "bench.api")), name)
