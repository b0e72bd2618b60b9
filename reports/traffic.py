"""Bytes sent between ranks per step, against the bound of a ring all-reduce, and bytes to a
disk."""

from __future__ import annotations

from collections.abc import Sequence

from harness.analysis.cell_result import CellResult
from reports.data import MOST_ROWS, Bar, Bars, first_few, notes_for, rest
from reports.grid import (
    Column,
    Grid,
    Td,
    device_columns,
    figure,
    mebibytes,
    numeral,
    some_grid,
    throughput_column,
    word,
)
from reports.groups import Group, by_setting
from reports.names import marks, named
from reports.text import number, plain, plural

AT_BOUND = 1.02


def with_traffic(cells: Sequence[CellResult]) -> list[CellResult]:
    return [
        cell
        for cell in cells
        if cell.status == "ok"
        and cell.traffic.sent_bytes_per_step is not None
        and (cell.work.trained_parameters or 0) > 0
        and (cell.placement.processes or 1) > 1
    ]


def sent(cell: CellResult) -> float:
    """Returns bytes per step of the rank that sends most, in multiples of the fp32 gradients."""
    return (cell.traffic.sent_bytes_per_step or 0.0) / (4.0 * (cell.work.trained_parameters or 1))


def bound(cell: CellResult) -> float | None:
    """Returns 2 (N - 1) / N, the cost of averaging over N ranks by a ring (Patarasuk and Yuan, JPDC
    69, 2009), if all N have the whole model."""
    ranks = cell.placement.data_parallel or 1
    if ranks != cell.cell.devices or ranks < 2:
        return None
    return 2 * (ranks - 1) / ranks


def charts(cells: Sequence[CellResult]) -> list[Bars]:
    """Returns a chart per setting with several cells, least first."""
    groups = [group for group in by_setting(with_traffic(cells)) if len(group.rows) > 1]
    return [
        _chart(group, f"traffic-{i}", group.title_beside(groups[0].workload))
        for i, group in enumerate(groups)
    ]


def _chart(group: Group[CellResult], name: str, title: str) -> Bars:
    cells = sorted(group.rows, key=sent)
    bars = []
    for cell in cells[:MOST_ROWS]:
        limit, value = bound(cell), sent(cell)
        strong = limit is not None and value <= limit * AT_BOUND
        text = f"{number(value)} x"
        bars.append(Bar(named(cell), value, text, strong=strong, marks=marks(cell), target=limit))
    return Bars(
        name,
        title,
        "sent per step (multiples of the gradients)",
        tuple(bars),
        f"Bytes sent per rank and step in multiples of the gradients, {title}, least first:"
        f" {first_few(bars, 5)}",
        notes_for(cells) + rest(len(cells)),
        False,
        "theory",
    )


def _sent(cell: CellResult) -> Td:
    return numeral(number(sent(cell)), "sent_over_gradients", sent(cell))


def _bound(cell: CellResult) -> Td:
    return numeral(number(bound(cell)), "ring_bound", bound(cell))


def _over(cell: CellResult) -> Td:
    limit = bound(cell)
    share = None if limit is None else sent(cell) / limit
    return numeral(number(share), "sent_over_bound", share)


def table(cells: Sequence[CellResult]) -> Grid[CellResult] | None:
    groups = by_setting(with_traffic(cells))
    rows = [cell for group in groups for cell in sorted(group.rows, key=sent)]
    columns = [
        Column("Workload", "", "", word("workload")),
        Column("Ranks", "", "", figure("processes", plain)),
        Column("Precision", "", "", word("precision")),
        Column(
            "Sent", "MiB per step", "by the rank that sends most", mebibytes("sent_bytes_per_step")
        ),
        Column("Sent", "x gradients", "4 bytes for each trained parameter", _sent),
        Column("Ring bound", "x gradients", "2 (N - 1) / N for N data-parallel ranks", _bound),
        Column("Sent / bound", "", "", _over),
    ]
    return some_grid("traffic-table", "Bytes sent per rank and step", rows, columns)


def offload(cells: Sequence[CellResult]) -> Grid[CellResult] | None:
    rows = [
        cell
        for cell in cells
        if cell.status == "ok" and cell.traffic.offload_kept_bytes is not None
    ]
    columns = [
        Column("Workload", "", "", word("workload")),
        *device_columns(rows),
        Column(
            "Read",
            "MiB per step",
            "from the disk, all ranks",
            mebibytes("offload_read_bytes_per_step"),
        ),
        Column(
            "Written",
            "MiB per step",
            "to the disk, all ranks",
            mebibytes("offload_written_bytes_per_step"),
        ),
        Column("In the folder", "MiB", "size of its files", mebibytes("offload_kept_bytes")),
        Column(
            "In memory", "MiB", "states of the fullest rank between steps", mebibytes("state_bytes")
        ),
        Column("Peak", "MiB", "of the fullest device", mebibytes("peak_memory_bytes")),
        throughput_column(rows),
    ]
    return some_grid("offload-table", "States on a disk", rows, columns)


def bounds_in_words(cells: Sequence[CellResult]) -> str:
    """Returns the bound by number of data-parallel ranks: `1.00 x for 2 ranks, 1.50 x for 4`."""
    limits = {
        cell.placement.data_parallel or 1: limit
        for cell in with_traffic(cells)
        if (limit := bound(cell)) is not None
    }
    return ", ".join(f"{number(limits[n])} x for {plural(n, 'rank')}" for n in sorted(limits))
