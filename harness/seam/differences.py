"""Settings in which a cell differs from what its library's documentation starts with."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.cell.cell import Cell
from harness.cell.yaml_text import adapter, parse_yaml
from harness.seam.base import Strategy

FILE, EVERY_STRATEGY = "differences.yaml", "every strategy"
"""File next to a strategy's own, and its key for settings of all strategies in that folder."""


@dataclass(frozen=True)
class Difference:
    name: str
    """The library's name of the setting."""
    value: str
    documented: str
    why: str
    when: Mapping[str, Any] = field(default_factory=dict)
    """Values of options or cell fields, one or several each, at which the difference applies."""

    def applies(self, settings: Mapping[str, Any]) -> bool:
        """`settings`: a cell's fields and its strategy's options."""
        asked = {name: v if isinstance(v, list) else [v] for name, v in self.when.items()}
        return all(settings[name] in values for name, values in asked.items())


@functools.cache
def declared(folder: Path) -> dict[str, tuple[Difference, ...]]:
    """Returns the differences that a folder of strategies declares, by strategy file."""
    file = folder / FILE
    lists = parse_yaml(file.read_text(), str(file)) if file.exists() else {}
    kind: Any = tuple[Difference, ...]
    return {name: adapter(kind).validate_python([*_flat(v)]) for name, v in lists.items()}


def _flat(entries: list[Any]) -> Iterator[Any]:
    for entry in entries:
        yield from entry if isinstance(entry, list) else [entry]


def differences_of(strategy: Strategy, cell: Cell) -> tuple[str, ...]:
    """Returns the strategy's own differences that apply to a cell, such as
    `mpi_yield_when_idle=1 (documented: 0)`."""
    file = Path(inspect.getfile(type(strategy)))
    settings = cell.model_dump() | strategy.model_dump()
    found = declared(file.parent).get(file.stem, ())
    return tuple(
        f"{d.name}={d.value} (documented: {d.documented})" for d in found if d.applies(settings)
    )
