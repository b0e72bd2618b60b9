"""States kept between steps against the formula."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from harness.analysis.cell_result import CellResult
from reports.grid import Column, Grid, device_columns, figure, mebibytes, some_grid, word
from reports.groups import by_setting
from reports.names import named
from reports.stacks import KINDS, Stacks, by_state_bytes, state_stacks
from reports.text import MIB, plural, scaled, signed, size

_SMALL = 1e-3  # Fraction of the states below which a buffer is not named.


@dataclass(frozen=True)
class Buffers:
    """Cells whose library keeps the same buffers."""

    names: tuple[tuple[str, str], ...]
    """(name, size), largest first."""
    rows: tuple[CellResult, ...]


def with_states(cells: Sequence[CellResult]) -> list[CellResult]:
    return [cell for cell in cells if cell.status == "ok" and cell.states.state_bytes is not None]


def charts(cells: Sequence[CellResult]) -> list[Stacks]:
    groups = [group for group in by_setting(with_states(cells)) if len(group.rows) > 1]
    return [
        state_stacks(group.rows, f"states-{i}", group.title_beside(groups[0].workload), named)
        for i, group in enumerate(groups)
    ]


def table(cells: Sequence[CellResult]) -> Grid[CellResult] | None:
    """Returns all cells, with the formula's share by kind and what is kept off the device."""
    rows = [cell for group in by_setting(with_states(cells)) for cell in by_state_bytes(group.rows)]
    columns = [
        Column("Workload", "", "", word("workload")),
        *device_columns(rows),
        *(
            Column(
                kind.capitalize(),
                "MiB",
                f"{kind} of the fullest rank between steps",
                mebibytes(field),
            )
            for kind, field in KINDS.items()
        ),
        Column("Together", "MiB", "", mebibytes("state_bytes")),
        Column(
            "Formula",
            "MiB",
            "for the dtypes and copies that the library keeps",
            mebibytes("formula_bytes"),
        ),
        Column("Off by", "", "measured over formula", figure("formula_deviation", signed)),
        Column(
            "Step adds",
            "MiB",
            "by the formula: gradients, gathered parameters",
            mebibytes("formula_transient_bytes"),
        ),
        Column(
            "Peak",
            "MiB",
            "of the fullest device, everything included",
            mebibytes("peak_memory_bytes"),
        ),
        Column(
            "In host memory",
            "MiB",
            "kept off the device",
            figure("host_state_bytes", lambda value: scaled(value or None, 1 / MIB)),
        ),
    ]
    return some_grid("states-table", "States between steps against the formula", rows, columns)


def buffers(cells: Sequence[CellResult]) -> list[Buffers]:
    """Returns buffers by name, largest first; cells with the same ones together."""
    grouped: dict[tuple[tuple[str, str], ...], tuple[float, list[CellResult]]] = {}
    for cell in with_states(cells):
        sizes = _buffer_sizes(cell.states.library_buffers)
        least = _SMALL * (cell.states.state_bytes or 0.0)
        large = [(name, value) for name, value in sizes if value >= least]
        small = [value for _, value in sizes[len(large) :]]
        if large:
            names = [(name, size(value)) for name, value in large]
            if small:
                names.append((plural(len(small), "smaller one"), size(sum(small))))
            grouped.setdefault(tuple(names), (large[0][1], []))[1].append(cell)
    largest_first = sorted(grouped.items(), key=lambda item: -item[1][0])
    return [Buffers(names, tuple(rows)) for names, (_, rows) in largest_first]


def _buffer_sizes(text: str | None) -> list[tuple[str, float]]:
    """Returns (name, bytes) of each buffer, largest first; empty if the text is no JSON object."""
    try:
        sizes = json.loads(text or "{}")
    except ValueError:
        return []
    if not isinstance(sizes, dict):
        return []
    named_sizes = [(str(name), float(value)) for name, value in sizes.items()]
    return sorted(named_sizes, key=lambda pair: -pair[1])
