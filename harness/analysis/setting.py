from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple, TypeVar

from harness.analysis.cell_result import CellResult
from harness.record.trial_status import NOT_LAUNCHED
from harness.spec.cell import TECHNIQUES, Cell, without_folder
from harness.spec.link import over
from harness.spec.text import plural

Item = TypeVar("Item")
Key = TypeVar("Key")


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


@dataclass(frozen=True)
class Setting:
    """Training and hardware; throughputs are comparable only within a setting."""

    workload: str
    data: str
    sequence_length: int
    device: str
    devices: int
    nodes: int
    links: str
    precision: str
    global_batch: int
    optimizer: str
    threads_per_device: int
    recipe: str

    @classmethod
    def of(cls, cell: Cell) -> Setting:
        return cls(*(getattr(cell, name) for name in SETTING))

    @property
    def text(self) -> str:
        """Readable form, such as `gpt2-mini in fp32 on 2 ranks, 8 samples of 64 tokens a step`."""
        ranks = plural(self.devices, "rank")
        on = f" on {self.nodes} nodes {over(self.links)}" if self.links else ""
        threads = f" of {self.threads_per_device} cores" if self.threads_per_device > 1 else ""
        optimizer = f" with {self.optimizer}" if self.optimizer != "adamw" else ""
        data = f" of {self.data}" if self.data not in ("stdlib", "images") else ""
        recipe = f" ({self.recipe})" if self.recipe else ""
        workload = without_folder(self.workload)
        return (
            f"{workload} in {self.precision}{optimizer}{recipe} on {ranks}{threads}{on},"
            f" {self.global_batch} samples of {self.sequence_length} tokens{data} a step"
        )


SETTING = tuple(field.name for field in fields(Setting))
SCALED = ("devices", "nodes", "links", "global_batch")
"""Fields that change along a scaling curve."""
SERIES = ("strategy", "options", "launcher", *TECHNIQUES)
"""Fields that stay constant along a scaling curve."""


def setting(cell: Cell, without: Collection[str] = ()) -> tuple[object, ...]:
    return tuple(getattr(cell, name) for name in SETTING if name not in without)


def by_setting(results: Iterable[CellResult]) -> list[list[CellResult]]:
    return list(grouped(results, lambda result: Setting.of(result.cell)).values())


def timed(results: Iterable[CellResult], not_compared: Collection[str]) -> list[CellResult]:
    """Drops cells that ran only for parity, `not_compared`."""
    return [result for result in results if result.cell_id not in not_compared]


class GroupSize(NamedTuple):
    """Criteria for choosing the group that a report shows first."""

    timed: bool
    workload: str
    cells: int
    real: bool
    """False if all cells have more ranks than cores."""
    devices: int


def heading(groups: Sequence[GroupSize]) -> int | None:
    """Returns the index of a run's leading group, if any.

    Prefers timed groups, then the main workload (in `groups[0]`), several cells, real hardware,
    several devices, most cells.
    """
    main = next((g.workload for g in groups if g.timed), groups[0].workload if groups else "")
    order = [
        (g.timed, g.workload == main, g.cells > 1, g.real, g.devices > 1, g.cells, g.devices)
        for g in groups
    ]
    return max(range(len(order)), key=order.__getitem__, default=None)


def series(cell: Cell) -> tuple[object, ...]:
    options = json.dumps({**(cell.defaults or {}), **cell.options}, sort_keys=True)
    return tuple(options if name == "options" else getattr(cell, name) for name in SERIES)


def batch(cell: Cell, regime: str | None = None) -> int:
    """Returns samples per step: in total (strong scaling) or per device (weak)."""
    weak = (regime or cell.regime) == "weak"
    return cell.global_batch // cell.devices if weak else cell.global_batch


@dataclass(frozen=True)
class System:
    """Cells of one system; a cell without one forms its own."""

    name: str
    cells: tuple[CellResult, ...]

    def count(self, *statuses: str) -> int:
        return sum(cell.status in statuses for cell in self.cells)

    @property
    def absent(self) -> bool:
        return self.count("unavailable") > 0 and self.count(*NOT_LAUNCHED) == len(self.cells)


def systems(cells: Sequence[CellResult]) -> list[System]:
    """Returns systems in the order of their leading numbers."""
    by_name = grouped(cells, lambda cell: cell.cell.system or cell.cell.label)

    def number(name: str) -> int:
        digits = re.match(r"\d{1,9}", name)
        return int(digits.group()) if digits else 10**9

    return [System(name, tuple(by_name[name])) for name in sorted(by_name, key=number)]
