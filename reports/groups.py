from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from harness.analysis.answer import Answer, answer
from harness.analysis.cell_result import CellResult
from harness.analysis.setting import GroupSize, Setting, heading, timed
from harness.analysis.stats import Estimate
from harness.cell.errors import plural
from harness.record.profile_record import ProfileRecord
from reports.names import device_words, unit


@dataclass(frozen=True)
class Group:
    """Cells that differ only in strategy."""

    rows: tuple[CellResult, ...]
    profiles: Sequence[ProfileRecord] = ()
    """Profiles of the run, which may explain the advice."""

    @functools.cached_property
    def advised(self) -> Answer | None:
        """Advice for this setting; None if there is nothing to choose."""
        return answer(self.rows, {profile.cell_id: profile for profile in self.profiles})

    @property
    def fair(self) -> Sequence[CellResult]:
        """Cells that have places, fastest first."""
        return [cell for cell in self.rows if cell.relative.place is not None]

    @property
    def workload(self) -> str:
        return self.rows[0].cell.workload_name

    @property
    def devices(self) -> int:
        return self.rows[0].cell.devices

    @property
    def throughput(self) -> str:
        """Name of the throughput column: tokens if every cell has them, else samples."""
        tokens = all(cell.speed.tokens_per_second is not None for cell in self.rows)
        return "tokens_per_second" if tokens else "samples_per_second"

    def rate(self, cell: CellResult) -> Estimate:
        rate = cell.throughput(self.throughput)
        assert rate is not None, "a ranked cell has a throughput"
        return rate

    @property
    def unit(self) -> str:
        return unit(self.throughput)

    @property
    def real(self) -> bool:
        """Whether at least one cell has a core or GPU per rank."""
        return not all(cell.placement.oversubscribed for cell in self.rows)

    @property
    def title(self) -> str:
        """`2 devices · fp32 · batch 8`, plus unusual settings."""
        cell, devices = self.rows[0].cell, device_words(self.rows[0])
        optimizer = "" if cell.optimizer == "adamw" else f" · {cell.optimizer}"
        return f"{devices} · {cell.precision} · batch {cell.global_batch}{optimizer}"

    @property
    def full_title(self) -> str:
        return f"{self.workload} · {self.title}"

    def short_title(self, workload: str) -> str:
        """Returns the title without `workload`."""
        return self.title if self.workload == workload else self.full_title

    @property
    def details(self) -> str:
        cell = self.rows[0]
        tokens = f" of {cell.cell.sequence_length} tokens" if self.unit == "tokens/s" else ""
        cores = f" · {plural(cell.cell.threads_per_device, 'core')} per device"
        alone = ", where nothing is communicated" if self.devices == 1 else ""
        return f"{self.title}{tokens}{'' if cell.cell.device == 'cuda' else cores}{alone}"


def find_groups(cells: Sequence[CellResult], profiles: Sequence[ProfileRecord] = ()) -> list[Group]:
    """Groups ranked cells, in their order; workloads with most cells come first."""
    sizes = Counter(cell.cell.workload_name for cell in cells)
    ranked = [cell for cell in cells if cell.ranked]
    groups = [Group(group.rows, profiles) for group in by_setting(ranked)]
    return sorted(groups, key=lambda g: (-sizes[g.workload], g.workload, g.devices, -len(g.rows)))


def by_setting(cells: Iterable[CellResult], *more: str) -> list[Group]:
    """Groups cells, in their order, that differ only in strategy and agree in `more`."""
    cells = list(cells)
    sizes = Counter(cell.cell.workload_name for cell in cells)
    by_key: dict[tuple[object, ...], list[CellResult]] = {}
    for cell in cells:
        key = (Setting.of(cell.cell), *(getattr(cell.cell, name) for name in more))
        by_key.setdefault(key, []).append(cell)
    groups = [Group(tuple(rows)) for rows in by_key.values()]
    return sorted(groups, key=lambda g: (-sizes[g.workload], g.workload, g.devices, -len(g.rows)))


def biggest(groups: Sequence[Group]) -> list[Group]:
    """Returns the largest group per workload, number of devices and link."""
    chosen: dict[tuple[str, int, str | None], Group] = {}
    for group in groups:
        chosen.setdefault((group.workload, group.devices, group.rows[0].cell.links), group)
    return list(chosen.values())


def headline(groups: Sequence[Group], not_compared: Collection[str] = ()) -> Group | None:
    """Returns the leading group; see `heading`. `not_compared`: cells that ran only for parity."""
    sizes = [
        GroupSize(bool(timed(g.rows, not_compared)), g.workload, len(g.rows), g.real, g.devices)
        for g in groups
    ]
    index = heading(sizes)
    return None if index is None else groups[index]


def pareto(group: Group) -> list[CellResult]:
    """Returns the fairly timed cells that none beats in both throughput and peak memory, fastest
    first."""
    front: list[CellResult] = []
    least: float | None = None
    for cell in group.fair:
        peak = cell.memory.peak_memory_bytes
        if peak is not None and (least is None or peak < least):
            front.append(cell)
            least = peak
    return front
