from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple, TypeVar

from harness.analysis.cell_result import WORST_VERDICT_FIRST, CellResult
from harness.cell.cell import TECHNIQUES, Cell, over, without_folder
from harness.cell.errors import plural
from harness.cell.training import (
    HALF_PRECISIONS,
    WIDEST_BY_NOISE,
    emulated,
    half_precision,
    rounding_alone,
)
from harness.record.trial import NOT_LAUNCHED

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
    """Whether the setting ran on real hardware: False if all cells have more ranks than cores."""
    devices: int


def heading(groups: Sequence[GroupSize]) -> int | None:
    """Returns the index of the group of cells that leads a run's report; None if there are no
    groups. Prefers timed groups, then the main workload (in `groups[0]`), several cells, real
    hardware, several devices, most cells."""
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
    """Cells of one system, as the matrix numbers them; a cell without a system forms its own."""

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


_SIZES = ("workload", "data", "sequence_length", "global_batch", "micro_batches", "nodes", "links")
"""Fields in which an fp32 twin may differ, such as the model's size."""


def with_same_training(cells: Sequence[CellResult]) -> list[CellResult]:
    """Fills in `same_training` and `fp32_twin`. `cells` must include the fp32 twins."""
    judged = [cell for cell in cells if cell.parity.verdict is not None]
    twins = grouped((cell for cell in judged if not _half_precision(cell)), _key)
    return [_judged(cell, twins.get(_key(cell), ())) for cell in cells]


def _key(result: CellResult) -> tuple[object, ...]:
    cell = result.cell.model_copy(update={"micro_batches": 1})
    model, *suffixes = cell.workload.split("+")
    alike = (*series(cell), *setting(cell, (*_SIZES, "precision")))
    adapters = tuple(suffix for suffix in suffixes if suffix not in HALF_PRECISIONS)
    return (result.run_id, *alike, model.partition("-")[0], adapters)


def _half_precision(result: CellResult) -> str:
    return half_precision(result.cell.precision, result.cell.workload)


def _judged(cell: CellResult, twins: Iterable[CellResult]) -> CellResult:
    parity, half, twin = cell.parity, _half_precision(cell), ""
    same = parity.verdict == "exact"
    if half:
        twin = _verdict_of_nearest(cell, twins)
        # Noise widens declared limits of at most CAPPED_ABOVE up to this.
        narrow = (parity.update_tolerance or 0.0) <= WIDEST_BY_NOISE[half][1]
        rounded = parity.verdict == "within tolerance" and rounding_alone(half, parity.reason or "")
        same |= rounded and (narrow or twin == "exact")
        same &= twin in ("", "exact")
    same &= not emulated(parity.reason or "")
    parity = dataclasses.replace(parity, fp32_twin=twin, same_training=same)
    return dataclasses.replace(cell, parity=parity)


def _verdict_of_nearest(cell: CellResult, twins: Iterable[CellResult]) -> str:
    """Returns the worst parity of the twins closest in size; empty if there are no twins."""
    by_nearness: dict[int, list[str]] = {}
    for twin in twins:
        shared = sum(getattr(cell.cell, name) == getattr(twin.cell, name) for name in _SIZES)
        by_nearness.setdefault(shared, []).append(twin.parity.verdict or "unknown")
    if not by_nearness:
        return ""
    return min(by_nearness[max(by_nearness)], key=WORST_VERDICT_FIRST.index)
