"""Parts of a profiled step, bytes sent against theory, and memory at the peak."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from harness.analysis.cell_result import CellResult
from harness.analysis.utilization import GpuTime, gpu_time
from harness.record.profile import COMPONENTS, SPLIT, ProfileRecord
from reports.data import MOST_ROWS, notes_for, rest
from reports.grid import Column, Grid, Td, device_columns, in_mebibytes, numeral, some_grid, word
from reports.groups import Group, by_setting
from reports.names import named
from reports.stacks import Stack, Stacks
from reports.text import DASH, MIB, number, plural, scaled, signed

WORDS = {
    "compute": "compute",
    "communication": "exposed communication",
    "bubble": "pipeline bubble",
    "offload": "offload I/O",
}


@dataclass(frozen=True)
class ProfiledCell(CellResult):
    parts: Mapping[str, float | None] = field(default_factory=dict)
    """Seconds by component of the step, and of overlaps: mean of the ranks."""
    plain_step: float = 0.0
    """Seconds of the slowest rank's step without the profiler."""
    profiled_step: float = 0.0
    straggler: int | None = None
    logical_bytes: float | None = None
    """Bytes that a rank must send per step for its collectives in theory: mean of the ranks."""
    off_theory: float | None = None
    """Those bytes over the strategy's formula, minus 1."""
    off_algorithm: float | None = None
    """Bytes on the sockets over those of the backend's algorithm, minus 1."""
    peak: Mapping[str, int | None] = field(default_factory=dict)
    """Bytes at the peak by kind, and in total (`tracked`), of the fullest rank in each."""
    private: int | None = None
    """Peak bytes of the same step as trials measure it."""
    gpu: GpuTime | None = None
    """None without a GPU."""


def profiled(cells: Iterable[CellResult], profiles: Iterable[ProfileRecord]) -> list[ProfiledCell]:
    newest = {profile.cell_id: profile for profile in profiles if profile.status == "ok"}
    return [_profiled(cell, newest[cell.cell_id]) for cell in cells if cell.cell_id in newest]


def _profiled(cell: CellResult, profile: ProfileRecord) -> ProfiledCell:
    logical, theory = _mean(profile.logical_bytes), profile.theory_bytes
    sent, algorithm = _mean(profile.sent_bytes), _mean(profile.algorithm_bytes)
    parts = (*COMPONENTS, "overlapped", "operators")
    return ProfiledCell(
        **vars(cell),
        parts={name: _mean(getattr(profile, f"{name}_seconds")) for name in parts},
        plain_step=profile.plain_step_seconds or 0.0,
        profiled_step=profile.profiled_step_seconds or 0.0,
        straggler=profile.straggler,
        logical_bytes=logical,
        off_theory=logical / theory - 1 if logical is not None and theory else None,
        off_algorithm=sent / algorithm - 1 if sent is not None and algorithm else None,
        peak={
            kind: max(getattr(profile, f"peak_{kind}_bytes"), default=None)
            for kind in (*SPLIT, "tracked")
        },
        private=max(profile.private_bytes, default=None),
        gpu=gpu_time(
            profile,
            cell.work.flops_per_step and cell.work.flops_per_step / cell.cell.devices,
            cell.work.matmul_flops_per_second,
        ),
    )


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _shortest_first(cells: Iterable[ProfiledCell]) -> list[ProfiledCell]:
    return sorted(cells, key=lambda cell: cell.profiled_step)


def charts(cells: Sequence[ProfiledCell]) -> list[Stacks]:
    """Returns a chart per setting, shortest step first."""
    groups = by_setting(cells)
    return [
        _chart(group, f"parts-{i}", group.title_beside(groups[0].workload))
        for i, group in enumerate(groups)
    ]


def _chart(group: Group[ProfiledCell], name: str, title: str) -> Stacks:
    cells = _shortest_first(group.rows)
    stacks = [_stack(cell) for cell in cells[:MOST_ROWS]]
    words = "; ".join(f"{stack.label} {stack.text}" for stack in stacks[:5])
    return Stacks(
        name,
        title,
        "mean of the ranks (ms)",
        COMPONENTS,
        tuple(stacks),
        max(max(stack.total, stack.formula or 0.0) for stack in stacks) * 1.04,
        f"Parts of a profiled step of {plural(len(cells), 'cell')}, {title}, shortest first:"
        f" {words}",
        notes_for(cells) + rest(len(cells)),
    )


def _stack(cell: ProfiledCell) -> Stack:
    slow = "" if cell.straggler is None else f" · rank {cell.straggler} slow"
    return Stack(
        named(cell),
        tuple(max(0.0, (cell.parts[name] or 0.0) * 1e3) for name in COMPONENTS),
        f"{number(cell.profiled_step * 1e3)} ms{slow}",
        cell.plain_step * 1e3,
        None,
        cell.placement.stand_in is not None,
        bool(slow),
    )


def _part(name: str) -> Column[ProfiledCell]:
    """Returns a column of one part's time in ms, mean of the ranks."""

    def make(cell: ProfiledCell) -> Td:
        seconds = cell.parts[name]
        return numeral(scaled(seconds, 1e3), f"{name}_ms", seconds and seconds * 1e3)

    tips = {
        "overlapped": "communication in flight during the others; not part of the sum",
        "operators": "part of the step in which one ran",
    }
    return Column(WORDS.get(name, name).capitalize(), "ms", tips.get(name, ""), make)


def _bytes(title: str, tip: str, kind: str) -> Column[ProfiledCell]:
    """Returns a column of one kind's bytes at the peak in MiB."""

    def make(cell: ProfiledCell) -> Td:
        return numeral(in_mebibytes(cell.peak[kind]), f"peak_{kind}", cell.peak[kind])

    return Column(title, "MiB", tip, make)


def _straggler(cell: ProfiledCell) -> Td:
    rank = cell.straggler
    return numeral(DASH if rank is None else str(rank), "straggler", rank)


def table(cells: Sequence[ProfiledCell]) -> Grid[ProfiledCell] | None:
    """Returns the parts as a table, with bytes against theory and algorithm."""
    rows = [cell for group in by_setting(cells) for cell in _shortest_first(group.rows)]
    columns: list[Column[ProfiledCell]] = [
        Column("Workload", "", "", word("workload")),
        *device_columns(rows),
        *map(_part, (*COMPONENTS, "overlapped", "operators")),
        Column(
            "Step",
            "ms",
            "profiled, slowest rank",
            lambda c: numeral(scaled(c.profiled_step, 1e3), "profiled_ms", c.profiled_step * 1e3),
        ),
        Column(
            "Plain step",
            "ms",
            "without the profiler",
            lambda c: numeral(scaled(c.plain_step, 1e3), "plain_ms", c.plain_step * 1e3),
        ),
        Column("Straggler", "rank", "slower than the others by more than 15 %", _straggler),
        Column(
            "Must send",
            "MiB per rank",
            "by theory, for the collectives it calls",
            lambda c: numeral(in_mebibytes(c.logical_bytes), "logical", c.logical_bytes),
        ),
        Column(
            "Off the formula",
            "",
            "of the strategy",
            lambda c: numeral(signed(c.off_theory), "off_theory", c.off_theory),
        ),
        Column(
            "Sent, off the algorithm",
            "",
            "bytes on the sockets over those of the backend's algorithm",
            lambda c: numeral(signed(c.off_algorithm), "off_algorithm", c.off_algorithm),
        ),
    ]
    return some_grid("parts-table", "Parts of a step", rows, columns)


def memory(cells: Sequence[ProfiledCell]) -> Grid[ProfiledCell] | None:
    """Returns what filled the fullest rank at its peak."""
    known = [cell for cell in cells if cell.peak["tracked"] is not None]
    rows = [cell for group in by_setting(known) for cell in group.rows]
    columns: list[Column[ProfiledCell]] = [
        Column("Workload", "", "", word("workload")),
        *device_columns(rows),
        *(_bytes(kind.capitalize(), "", kind) for kind in SPLIT),
        _bytes("Tensors", "at their peak", "tracked"),
        Column(
            "Private memory",
            "MiB",
            "peak of the same step as trials measure it",
            lambda cell: numeral(scaled(cell.private, 1 / MIB), "private", cell.private),
        ),
    ]
    return some_grid("peak-table", "What fills the memory at the peak", rows, columns)
