"""Where the time goes: the parts of a profiled step, what was sent against theory, and what filled
the memory at the peak."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from harness.record.profile import COMPONENTS, SPLIT
from reports.data import MOST_ROWS, notes_for, rest
from reports.groups import Row, by_setting, named, records
from reports.states import Stack, Stacks
from reports.table import Column, Grid, device_columns, figure, grid, mebibytes, word
from reports.text import DASH, missing, number, plural, scaled, signed

if TYPE_CHECKING:
    import pandas as pd

WORDS = {
    "compute": "compute",
    "communication": "exposed communication",
    "bubble": "pipeline bubble",
    "offload": "offload I/O",
}


def known(cells: Sequence[Row], explained: pd.DataFrame) -> list[Row]:
    """Cells with what their newest explanation found: mean seconds of the ranks, bytes of the
    fullest."""
    found = {row["cell_id"]: row for row in records(explained) if row["status"] == "ok"}
    return [row | _means(found[row["cell_id"]]) for row in cells if row["cell_id"] in found]


def _means(row: Row) -> Row:
    means: Row = {
        f"{name}_ms": _mean(row[f"{name}_seconds"], 1e3)
        for name in (*COMPONENTS, "overlapped", "operators")
    }
    logical, theory = _mean(row["logical_bytes"]), row["theory_bytes"]
    sent, algorithm = _mean(row["sent_bytes"]), _mean(row["algorithm_bytes"])
    means |= {
        f"peak_{kind}": max(row[f"peak_{kind}_bytes"], default=None) for kind in (*SPLIT, "tracked")
    }
    return means | {
        "plain_ms": row["plain_step_seconds"] * 1e3,
        "profiled_ms": row["profiled_step_seconds"] * 1e3,
        "straggler": None if missing(row["straggler"]) else int(row["straggler"]),
        "logical": logical,
        "off_theory": (
            logical / theory - 1 if logical is not None and not missing(theory) and theory else None
        ),
        "off_algorithm": sent / algorithm - 1 if sent is not None and algorithm else None,
        "private": max(row["private_bytes"], default=None),
    }


def _mean(values: Sequence[float], factor: float = 1.0) -> float | None:
    return statistics.fmean(values) * factor if len(values) else None


def charts(rows: Sequence[Row]) -> list[Stacks]:
    """A chart for each setting, the shortest step first."""
    groups = by_setting(rows)
    main = groups[0].workload if groups else ""
    found = []
    for index, group in enumerate(groups):
        ordered = sorted(group.rows, key=lambda row: float(row["profiled_ms"]))
        stacks = []
        for row in ordered[:MOST_ROWS]:
            parts = tuple(max(0.0, float(row[f"{name}_ms"])) for name in COMPONENTS)
            slow = "" if row["straggler"] is None else f" · rank {row['straggler']} slow"
            text = f"{number(row['profiled_ms'])} ms{slow}"
            stacks.append(
                Stack(
                    named(row),
                    parts,
                    text,
                    float(row["plain_ms"]),
                    None,
                    not missing(row["stand_in"]),
                    bool(slow),
                )
            )
        limit = max(max(stack.total, stack.formula or 0.0) for stack in stacks) * 1.04
        title = group.title if group.workload == main else f"{group.workload} · {group.title}"
        words = "; ".join(f"{stack.label} {stack.text}" for stack in stacks[:5])
        summary = (
            f"Parts of a profiled step of {plural(len(ordered), 'cell')}, {title}, shortest first:"
            f" {words}"
        )
        notes = notes_for(ordered) + rest(len(ordered))
        found.append(
            Stacks(
                f"parts-{index}",
                title,
                "mean of the ranks (ms)",
                COMPONENTS,
                tuple(stacks),
                limit,
                summary,
                notes,
            )
        )
    return found


def table(rows: Sequence[Row]) -> Grid | None:
    """The same in numbers, with bytes against theory and algorithm."""
    ordered = [
        row
        for group in by_setting(rows)
        for row in sorted(group.rows, key=lambda row: float(row["profiled_ms"]))
    ]
    columns = [
        Column("Workload", "", "", word("workload")),
        *device_columns(ordered),
        *(
            Column(WORDS.get(name, name).capitalize(), "ms", "", figure(f"{name}_ms", number))
            for name in COMPONENTS
        ),
        Column(
            "Overlapped",
            "ms",
            "communication in flight during the others; not part of the sum",
            figure("overlapped_ms", number),
        ),
        Column(
            "Operators", "ms", "part of the step in which one ran", figure("operators_ms", number)
        ),
        Column("Step", "ms", "profiled, slowest rank", figure("profiled_ms", number)),
        Column("Plain step", "ms", "without the profiler", figure("plain_ms", number)),
        Column(
            "Straggler",
            "rank",
            "slower than the others by more than 15 %",
            figure("straggler", lambda v: DASH if v is None else str(v)),
        ),
        Column(
            "Must send",
            "MiB per rank",
            "by theory, for the collectives it calls",
            mebibytes("logical"),
        ),
        Column("Off the formula", "", "of the strategy", figure("off_theory", signed)),
        Column(
            "Sent, off the algorithm",
            "",
            "bytes on the sockets over those of the backend's algorithm",
            figure("off_algorithm", signed),
        ),
    ]
    return grid("parts-table", "Parts of a step", ordered, columns)


def memory(rows: Sequence[Row]) -> Grid | None:
    """What filled the fullest rank at its peak."""
    ordered = [
        row for group in by_setting(rows) for row in group.rows if not missing(row["peak_tracked"])
    ]
    columns = [
        Column("Workload", "", "", word("workload")),
        *device_columns(ordered),
        *(Column(kind.capitalize(), "MiB", "", mebibytes(f"peak_{kind}")) for kind in SPLIT),
        Column("Tensors", "MiB", "at their peak", mebibytes("peak_tracked")),
        Column(
            "Private memory",
            "MiB",
            "peak of the same step as trials measure it",
            figure("private", lambda v: scaled(v, 1 / 2**20)),
        ),
    ]
    return grid("peak-table", "What fills the memory at the peak", ordered, columns)
