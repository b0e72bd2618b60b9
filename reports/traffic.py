"""What ranks send to each other in a step, against the bound of a ring all-reduce, and what goes to
a disk."""

from __future__ import annotations

from collections.abc import Sequence

from reports.data import MOST_ROWS, Bar, Bars, notes_for, rest
from reports.groups import Row, by_setting, marks, named
from reports.table import (
    Column,
    Grid,
    Part,
    Td,
    device_columns,
    figure,
    grid,
    mebibytes,
    throughput_column,
    word,
)
from reports.text import exact, missing, number, plain, plural

AT_BOUND = 1.02


def gradient_bytes(row: Row) -> float:
    """Size of the gradients in fp32: the unit of traffic."""
    return 4.0 * float(row["trained_parameters"])


def known(cells: Sequence[Row]) -> list[Row]:
    """Cells of several ranks whose bytes were counted."""
    return [
        row
        for row in cells
        if row["status"] == "ok"
        and not missing(row.get("sent_bytes_per_step"))
        and not missing(row["trained_parameters"])
        and row["trained_parameters"] > 0
        and not missing(row["processes"])
        and row["processes"] > 1
    ]


def sent(row: Row) -> float:
    """Bytes that the rank which sends most sends in a step, in multiples of the gradients."""
    return float(row["sent_bytes_per_step"]) / gradient_bytes(row)


def bound(row: Row) -> float | None:
    """2 (N - 1) / N: what averaging over N ranks takes by a ring (Patarasuk and Yuan, JPDC 69,
    2009); where all N have the whole model."""
    if row["data_parallel"] != row["devices"] or row["data_parallel"] < 2:
        return None
    return 2 * (float(row["data_parallel"]) - 1) / float(row["data_parallel"])


def charts(cells: Sequence[Row]) -> list[Bars]:
    """A chart for each setting with several cells, least first."""
    groups = [group for group in by_setting(known(cells)) if len(group.rows) > 1]
    main = groups[0].workload if groups else ""
    found = []
    for index, group in enumerate(groups):
        rows = sorted(group.rows, key=sent)
        bars = []
        for row in rows[:MOST_ROWS]:
            limit = bound(row)
            text = f"{number(sent(row))} x"
            bars.append(
                Bar(
                    named(row),
                    sent(row),
                    text,
                    strong=limit is not None and sent(row) <= limit * AT_BOUND,
                    marks=marks(row),
                    target=limit,
                )
            )
        title = group.title if group.workload == main else f"{group.workload} · {group.title}"
        words = "; ".join(f"{bar.label} {bar.text}" for bar in bars[:5])
        summary = (
            f"Bytes sent per rank and step in multiples of the gradients, {title}, least first:"
            f" {words}"
        )
        notes = notes_for(rows) + rest(len(rows))
        found.append(
            Bars(
                f"traffic-{index}",
                title,
                "sent per step (multiples of the gradients)",
                tuple(bars),
                summary,
                notes,
                False,
                "theory",
            )
        )
    return found


def _sent(row: Row) -> Td:
    return Td((Part(number(sent(row)), "sent_over_gradients", exact(sent(row))),))


def _bound(row: Row) -> Td:
    return Td((Part(number(bound(row)), "ring_bound", exact(bound(row))),))


def _over(row: Row) -> Td:
    limit = bound(row)
    share = None if limit is None else sent(row) / limit
    return Td((Part(number(share), "sent_over_bound", exact(share)),))


def table(cells: Sequence[Row]) -> Grid | None:
    """The same of all cells, in bytes."""
    rows = [row for group in by_setting(known(cells)) for row in sorted(group.rows, key=sent)]
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
    return grid("traffic-table", "Bytes sent per rank and step", rows, columns)


def offload(cells: Sequence[Row]) -> Grid | None:
    """Cells that keep states on a disk."""
    rows = [
        row for row in cells if row["status"] == "ok" and not missing(row.get("offload_kept_bytes"))
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
    return grid("offload-table", "States on a disk", rows, columns)


def ranks(cells: Sequence[Row]) -> str:
    """The bound in words for the numbers of data-parallel ranks that occur: `1.00 x for 2 ranks,
    1.50 x for 4`."""
    limits = {
        int(row["data_parallel"]): limit
        for row in known(cells)
        if (limit := bound(row)) is not None
    }
    return ", ".join(f"{number(limits[n])} x for {plural(n, 'rank')}" for n in sorted(limits))
