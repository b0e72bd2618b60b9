"""Systems of a run: what ran, what did not, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from harness.analysis.cell_result import CellResult
from harness.analysis.setting import System, systems
from harness.record.status import NOT_LAUNCHED
from harness.spec.cell import Cell
from reports.groups import Group, RankedGroup, fairly_timed
from reports.names import STATUS
from reports.ranked import RankedCell
from reports.text import number, percent

NOT_REACHED = "not reached"
_WORDS = {**STATUS, "diverged": "diverged", NOT_REACHED: NOT_REACHED}
_LEFT_OUT = (*NOT_LAUNCHED, NOT_REACHED)
_PARITY = ("exact", "within tolerance", "diverged as expected", "diverged", "unknown")


@dataclass(frozen=True)
class Reason:
    what: str
    reason: str
    """Includes what would change it."""
    names: tuple[str, ...]


@dataclass(frozen=True)
class Missing:
    system: str
    launched: int
    total: int
    kind: str
    """`absent`: this host could run none of it; `none`: nothing ran for another reason; `part`."""
    reasons: tuple[Reason, ...]


@dataclass(frozen=True)
class Best:
    """The fastest cell of a system, in the verdict's setting if possible."""

    row: RankedCell
    value: str
    setting: str
    """Empty if it is the verdict's."""
    share: str
    """Relative to the fastest in the verdict's setting."""


@dataclass(frozen=True)
class Overview:
    name: str
    ok: int
    total: int
    best: Best | None
    parity: str
    kind: str
    """good, part, bad or absent."""
    status: str
    details: tuple[str, ...] = field(default=())


def all_systems(
    cells: Iterable[CellResult], unreached: Iterable[Cell], run_id: str = ""
) -> list[System]:
    """Returns recorded cells, and planned ones without a record, by system."""
    reason = "the run ended before it; resume the run to launch it"
    planned = [planned_cell(cell, run_id, NOT_REACHED, reason) for cell in unreached]
    return systems([*cells, *planned])


def planned_cell(cell: Cell, run_id: str, status: str, reason: str) -> CellResult:
    return CellResult(run_id=run_id, cell=cell, cell_id=cell.id, status=status, reason=reason)


def not_run(systems_: Iterable[System]) -> list[Missing]:
    """Returns systems with cells left out, refused, unavailable or not reached; those that this
    host cannot run first."""
    kinds = ("absent", "none", "part")
    missing = [row for system in systems_ if (row := _missing(system))]
    return sorted(missing, key=lambda system: kinds.index(system.kind))


def _missing(system: System) -> Missing | None:
    """Returns None if all cells were launched."""
    names: dict[tuple[str, str], list[str]] = {}
    for cell in system.cells:
        if cell.status in _LEFT_OUT:
            names.setdefault((_WORDS[cell.status], cell.reason), []).append(cell.cell.name)
    if not names:
        return None
    launched = len(system.cells) - system.count(*_LEFT_OUT)
    kind = "absent" if system.absent else "part" if launched else "none"
    reasons = tuple(Reason(what, why, tuple(cells)) for (what, why), cells in names.items())
    return Missing(system.name, launched, len(system.cells), kind, reasons)


def overview(
    systems_: Sequence[System], groups: Sequence[RankedGroup], leading: RankedGroup | None
) -> list[Overview]:
    """Returns a line per system; empty if no cell belongs to any."""
    if all(not cell.cell.system for system in systems_ for cell in system.cells):
        return []
    return [_line(system, groups, leading) for system in systems_]


def _line(system: System, groups: Sequence[RankedGroup], leading: RankedGroup | None) -> Overview:
    total = len(system.cells)
    not_ok = [cell for cell in system.cells if cell.status != "ok" and not cell.expected]
    ok = total - len(not_ok)
    broken = len(not_ok) - system.count(*_LEFT_OUT, "interrupted")
    counts = Counter(_WORDS[cell.status] for cell in not_ok)
    if system.absent:
        kind, status = "absent", "not on this host"
    elif broken:
        kind, status = "bad", "something failed"
    elif not not_ok:
        kind, status = "good", "all ran"
    else:
        kind, status = "part", "ran in part" if ok else "did not run"
    details = tuple(f"{count} {what}" for what, count in counts.items())
    best, parity = _best(system, groups, leading), _parity(system)
    return Overview(system.name, ok, total, best, parity, kind, status, details)


def _parity(system: System) -> str:
    seen = Counter(
        f"{cell.parity.verdict}{' as expected' if cell.expected else ''}" for cell in system.cells
    )
    return ", ".join(f"{seen[word]} {word}" for word in _PARITY if seen[word])


def _best(
    system: System, groups: Sequence[RankedGroup], leading: RankedGroup | None
) -> Best | None:
    own = {cell.cell_id for cell in system.cells}
    for group in ([leading] if leading else []) + list(groups):
        cells = tuple(cell for cell in group.rows if cell.cell_id in own)
        if not cells:
            continue
        best = fairly_timed(Group(cells))[0]
        rate = group.rate(best)
        half = rate.half_width
        interval = "" if half is None else f" ± {number(half, 2)}"
        value = f"{number(rate.value)}{interval} {group.unit}"
        if group is not leading:
            return Best(best, value, group.full_title, "")
        fastest = group.rate(fairly_timed(group)[0])
        return Best(best, value, "", percent(rate.value / fastest.value))
    return None
