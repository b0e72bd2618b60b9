"""Every system of a run: what ran of it, what did not and why."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from harness.analysis.summary import System, systems
from harness.record.status import NOT_LAUNCHED
from harness.spec.cell import Cell
from reports.groups import Group, Row, fairly_timed
from reports.table import STATUS
from reports.text import missing, number, percent, plural

NOT_REACHED = "not reached"
_GO_ON = "the run ended before it; go on with: python -m bench run --resume"
_WORDS = {**STATUS, "diverged": "diverged", NOT_REACHED: NOT_REACHED}
_LEFT_OUT = (*NOT_LAUNCHED, NOT_REACHED)


@dataclass(frozen=True)
class Reason:
    """Cells that were not launched for the same reason."""

    what: str
    reason: str
    """With what would change it."""
    names: tuple[str, ...]


@dataclass(frozen=True)
class Missing:
    """A system of which cells did not run."""

    system: str
    launched: int
    total: int
    kind: str
    """`absent`: this host could run none of it; `none`: it ran nothing for another reason; `part`.
    """
    reasons: tuple[Reason, ...]


@dataclass(frozen=True)
class Best:
    """The fastest cell of a system, in the setting of the verdict where it has one there."""

    row: Row
    value: str
    setting: str
    """Empty where it is the verdict's."""
    share: str
    """Of the fastest of the verdict's setting."""


@dataclass(frozen=True)
class Overview:
    """One line of the table of systems."""

    name: str
    ok: int
    total: int
    best: Best | None
    parity: str
    kind: str
    """good, part, bad or absent."""
    status: str
    details: tuple[str, ...] = field(default=())


def all_systems(cells: Sequence[Row], unreached: Sequence[Cell]) -> list[System]:
    """The recorded cells and the planned ones that have no record, by system."""
    planned = [
        {
            "cell_id": cell.id,
            "cell_name": cell.name,
            "label": cell.label,
            "system": cell.system or None,
            "status": NOT_REACHED,
            "reason": _GO_ON,
            "expected": False,
        }
        for cell in unreached
    ]
    return systems([*cells, *planned])


def not_run(found: Sequence[System]) -> list[Missing]:
    """Systems with cells that were left out, refused, unavailable or not reached: those that this
    host cannot run first."""
    kinds = ("absent", "none", "part")
    result = []
    for system in found:
        reasons: dict[tuple[str, str], list[str]] = {}
        for row in system.cells:
            if row["status"] in _LEFT_OUT:
                reasons.setdefault((_WORDS[row["status"]], str(row["reason"])), []).append(
                    str(row["cell_name"])
                )
        if reasons:
            launched = len(system.cells) - system.count(*_LEFT_OUT)
            kind = "absent" if system.absent else "part" if launched else "none"
            grouped = tuple(
                Reason(what, reason, tuple(names)) for (what, reason), names in reasons.items()
            )
            result.append(Missing(system.name, launched, len(system.cells), kind, grouped))
    return sorted(result, key=lambda one: kinds.index(one.kind))


def overview(
    found: Sequence[System], groups: Sequence[Group], leading: Group | None
) -> list[Overview]:
    """A line per system; nothing where the run files no cell under any."""
    if not any(isinstance(row["system"], str) for system in found for row in system.cells):
        return []
    return [_line(system, groups, leading) for system in found]


def _line(system: System, groups: Sequence[Group], leading: Group | None) -> Overview:
    ok = sum(row["status"] == "ok" or row["expected"] for row in system.cells)
    left = Counter(
        _WORDS[row["status"]]
        for row in system.cells
        if row["status"] != "ok" and not row["expected"]
    )
    details = tuple(f"{count} {what}" for what, count in left.items())
    broken = len(system.cells) - ok - system.count(*_LEFT_OUT, "interrupted")
    if system.absent:
        kind, status = "absent", "not on this host"
    elif broken:
        kind, status = "bad", "something failed"
    elif ok == len(system.cells):
        kind, status = "good", "all ran"
    else:
        kind, status = "part", "ran in part" if ok else "did not run"
    return Overview(
        system.name,
        ok,
        len(system.cells),
        _best(system, groups, leading),
        _parity(system),
        kind,
        status,
        details,
    )


def _parity(system: System) -> str:
    order = ("exact", "within tolerance", "diverged as expected", "diverged", "unknown")
    seen = Counter(
        f"{row['parity_verdict']}{' as expected' if row['expected'] else ''}"
        for row in system.cells
        if isinstance(row.get("parity_verdict"), str)
    )
    return ", ".join(f"{seen[word]} {word}" for word in order if seen[word])


def _best(system: System, groups: Sequence[Group], leading: Group | None) -> Best | None:
    own = {row["cell_id"] for row in system.cells}
    for group in ([leading] if leading else []) + list(groups):
        rows = [row for row in group.rows if row["cell_id"] in own]
        if not rows:
            continue
        row = fairly_timed(dataclasses.replace(group, rows=tuple(rows)))[0]
        low, high = row[f"{group.throughput}_low"], row[f"{group.throughput}_high"]
        interval = "" if missing(low) else f" ± {number((high - low) / 2, 2)}"
        value = f"{number(row[group.throughput])}{interval} {group.unit}"
        same = group is leading
        share = (
            percent(row["samples_per_second"] / fairly_timed(group)[0]["samples_per_second"])
            if same
            else ""
        )
        return Best(row, value, "" if same else f"{group.workload} · {group.title}", share)
    return None


def absent_words(missing_systems: Sequence[Missing]) -> str:
    """`2 systems are not on this host`; empty where all are."""
    count = sum(one.kind == "absent" for one in missing_systems)
    return (
        f"{plural(count, 'system')} {'is' if count == 1 else 'are'} not on this host"
        if count
        else ""
    )
