"""How one cell is run, measured, verified and recorded."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
import warnings
from collections.abc import Sequence

RENAMED = {
    "harness.cell": ("harness.spec.cell",),
    "harness.compare": ("harness.analysis.compare",),
    "harness.errors": ("harness.spec.errors",),
    "harness.history": ("harness.analysis.history",),
    "harness.pipelining": ("harness.strategy.pipelining",),
    "harness.registry": ("harness.strategy.registry",),
    "harness.schema": ("harness.record.schema",),
    "harness.sides": ("harness.analysis.selection",),
    "harness.stats": ("harness.analysis.stats",),
    "harness.summary": ("harness.analysis.summary",),
    "harness.training": (
        "harness.strategy.step",
        "harness.strategy.formulas",
        "harness.strategy.sharding",
        "harness.strategies._ddp",
        "harness.workloads.precision",
    ),
    "harness.workloads.facts": ("harness.workloads.counts",),
    "harness.workloads.model": (
        "harness.workloads.family",
        "harness.workloads.workload",
        "harness.workloads.registry",
    ),
    "harness.workloads.stage": ("harness.strategy.stage",),
}
"""Former modules that strategies and notebooks of other packages may import, and where their names
are now. Importing one still works and warns."""
RENAMED_NAMES = {
    "Deviation": "Tolerance",
    "Exposed": "TrainState",
    "Held": "Retained",
    "Mistake": "UsageError",
    "admit": "validate",
    "complaint": "first_error",
}
"""Former names in these modules, and in harness.strategy."""


def warn_renamed(former: str, name: str) -> None:
    """Says to the author of the code that called the caller that a name has changed."""
    warnings.warn(f"{former} is deprecated, it is {name} now", DeprecationWarning, stacklevel=3)


class _Renamed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes a former module of the names that are elsewhere now."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self) if name in RENAMED else None

    def exec_module(self, module: types.ModuleType) -> None:
        homes = RENAMED[module.__name__]
        warnings.warn(
            f"{module.__name__} is deprecated, its names are now in {', '.join(homes)}",
            DeprecationWarning,
            stacklevel=2,
        )
        for home in map(importlib.import_module, reversed(homes)):
            module.__dict__.update({k: v for k, v in vars(home).items() if not k.startswith("__")})
        for former, name in RENAMED_NAMES.items():
            if name in vars(module):
                setattr(module, former, getattr(module, name))


sys.meta_path.append(_Renamed())
