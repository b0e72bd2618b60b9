"""Settings in which a cell differs from what its library's documentation starts with."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.cell.cell import Cell
from harness.cell.yaml_text import adapter, parse_yaml
from harness.seam.base import Strategy

EVERY_STRATEGY = "every strategy"


@dataclass(frozen=True)
class Difference:
    name: str
    """The library's name of the setting."""
    value: str
    documented: str
    why: str
    when: Mapping[str, object] = field(default_factory=dict)
    """Values of options or cell fields, one or several each, at which the difference applies."""


@functools.cache
def declared(folder: Path) -> dict[str, tuple[Difference, ...]]:
    """Returns what differences.yaml in a folder of strategies declares, by strategy file and, for
    all of them, under `EVERY_STRATEGY`."""
    file = folder / "differences.yaml"
    lists = parse_yaml(file.read_text(), str(file)) if file.exists() else {}
    flat = {
        name: [part for entry in v for part in (entry if isinstance(entry, list) else [entry])]
        for name, v in lists.items()
    }
    kind: Any = dict[str, tuple[Difference, ...]]
    found: dict[str, tuple[Difference, ...]] = adapter(kind).validate_python(flat)
    return found


def differences_of(strategy: Strategy, cell: Cell) -> tuple[str, ...]:
    """Returns the strategy's own differences that apply to a cell, such as
    `mpi_yield_when_idle=1 (documented: 0)`."""
    file = Path(inspect.getfile(type(strategy)))
    settings = cell.model_dump() | strategy.model_dump()
    return tuple(
        f"{d.name}={d.value} (documented: {d.documented})"
        for d in declared(file.parent).get(file.stem, ())
        if all(settings[k] in (v if isinstance(v, list) else [v]) for k, v in d.when.items())
    )
