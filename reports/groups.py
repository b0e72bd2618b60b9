"""Which cells may be compared with which, and what that comparison says."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.analysis.setting import SETTING, setting
from harness.analysis.summary import alike, same
from harness.spec.link import over
from reports.text import MIB, missing, number, percent, plural

if TYPE_CHECKING:
    import pandas as pd

STAND_IN, OVERSUBSCRIBED, DISTURBED = "†", "‡", "¶"

Row = dict[str, Any]


def marks(row: Row) -> str:
    """`†` for a stand-in, `‡` for more ranks than cores; shown behind the label in every chart."""
    measured = not missing(row["samples_per_second"])
    return (STAND_IN if not missing(row["stand_in"]) else "") + (
        OVERSUBSCRIBED if row["oversubscribed"] and measured else ""
    )


def named(row: Row) -> str:
    """The label as a chart shows it: with its nodes and its regime where these are the unusual
    ones, and its marks."""
    nodes = f" · {row['nodes']} nodes" if row["nodes"] > 1 else ""
    nodes += f" · {link}" if (link := link_words(row)) else ""
    return f"{row['label']}{nodes}{' · weak' if row['regime'] == 'weak' else ''}{marks(row)}"


def records(table: pd.DataFrame) -> list[Row]:
    """The rows of a frame as plain dictionaries."""
    return [{str(name): value for name, value in row.items()} for row in table.to_dict("records")]


@dataclass(frozen=True)
class Group:
    """Cells that differ in nothing but the strategy, all ranked, fastest first."""

    setting: Row
    rows: tuple[Row, ...]

    @property
    def workload(self) -> str:
        return str(self.setting["workload"])

    @property
    def devices(self) -> int:
        return int(self.setting["devices"])

    @property
    def throughput(self) -> str:
        """Column of the throughput: tokens where every cell has them, else samples."""
        known = all(not missing(row["tokens_per_second"]) for row in self.rows)
        return "tokens_per_second" if known else "samples_per_second"

    @property
    def unit(self) -> str:
        return unit(self.throughput)

    @property
    def real(self) -> bool:
        """Whether times of some of its cells say something of real hardware."""
        return not all(row["oversubscribed"] for row in self.rows)

    @property
    def title(self) -> str:
        """`2 devices · fp32 · batch 8`, with what sets it apart from the usual."""
        s = self.setting
        optimizer = "" if s["optimizer"] == "adamw" else f" · {s['optimizer']}"
        return f"{device_words(s)} · {s['precision']} · batch {s['global_batch']}{optimizer}"

    @property
    def details(self) -> str:
        """The title with what a reader needs once: tokens of a sample, cores of a device."""
        s = self.setting
        tokens = (
            f" of {s['sequence_length']} tokens" if self.throughput.startswith("tokens") else ""
        )
        cores = (
            ""
            if s["device"] == "cuda"
            else f" · {plural(int(s['threads_per_device']), 'core')} per device"
        )
        alone = ", where nothing is communicated" if self.devices == 1 else ""
        return f"{self.title}{tokens}{cores}{alone}"


def unit(throughput: str) -> str:
    """Unit of a throughput column."""
    return "tokens/s" if throughput.startswith("tokens") else "samples/s"


def device_words(setting: Row) -> str:
    """`2 GPUs`, `2 devices`, `16 GPUs on 2 nodes`, `2 devices on 2 nodes over 1gbit (emulated)`."""
    on = f" on {setting['nodes']} nodes" if setting["nodes"] > 1 else ""
    on += f" {link}" if (link := link_words(setting)) else ""
    return plural(int(setting["devices"]), "GPU" if setting["device"] == "cuda" else "device") + on


def link_words(row: Row) -> str:
    """`over 1gbit (emulated)`; empty where nodes have a network of their own."""
    if missing(row.get("links")):
        return ""
    return over(str(row["links"]))


def find_groups(cells: Sequence[Row]) -> list[Group]:
    """All groups of ranked cells: the workload with most cells first, then by number of devices,
    then the largest group first."""
    sizes = Counter(str(row["workload"]) for row in cells)
    found = [ranking(group) for group in by_setting([row for row in cells if row["ranked"]])]
    return sorted(found, key=lambda g: (-sizes[g.workload], g.workload, g.devices, -len(g.rows)))


def by_setting(rows: Sequence[Row], *more: str) -> list[Group]:
    """Rows that differ in nothing but the strategy (and agree in `more`), as they come; the
    workload with most rows first."""
    sizes = Counter(str(row["workload"]) for row in rows)
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault((*setting(row), *(str(row.get(name)) for name in more)), []).append(row)
    groups = [
        Group({name: rows[0][name] for name in SETTING}, tuple(rows)) for rows in found.values()
    ]
    return sorted(groups, key=lambda g: (-sizes[g.workload], g.workload, g.devices, -len(g.rows)))


def ranking(group: Group) -> Group:
    """The group by throughput, with the places that its cells have among themselves."""
    rows = sorted(group.rows, key=lambda row: -float(row["samples_per_second"]))
    places = [
        row | {"place": place, "same_as_above": same}
        for place, (row, same) in enumerate(zip(rows, alike(rows), strict=True), 1)
    ]
    return dataclasses.replace(group, rows=tuple(places))


def biggest(groups: list[Group]) -> list[Group]:
    """The largest group of each workload and number of devices."""
    chosen: dict[tuple[str, int], Group] = {}
    for group in groups:
        chosen.setdefault((group.workload, group.devices), group)
    return list(chosen.values())


def headline(groups: list[Group]) -> Group | None:
    """The group that the verdict leads with: main workload, something to compare, real hardware,
    several devices, most cells."""
    if not groups:
        return None
    main = [group for group in groups if group.workload == groups[0].workload]
    return max(main, key=lambda g: (len(g.rows) > 1, g.real, g.devices > 1, len(g.rows), g.devices))


def tied_with_fastest(group: Group) -> list[Row]:
    """Cells that cannot be told apart from the fastest one; with one trial nothing can be said."""
    fastest = group.rows[0]
    return [row for row in group.rows[1:] if row["trials"] > 1 and same(row, fastest)]


@dataclass(frozen=True)
class Pick:
    """The best cell in one respect, as text."""

    row: Row
    value: str
    """With its unit."""
    interval: str
    tied: tuple[Row, ...]
    """Cells that cannot be told apart from it."""
    then: str = ""
    """What choosing it means for the other respect."""


@dataclass(frozen=True)
class FastestVerdict:
    group: Group
    fastest: Pick
    frugal: Pick | None
    balanced: Pick | None
    """The most throughput for its peak memory."""
    faster: Pick | None
    """A stand-in, or a cell with more ranks than cores, that was faster still: it says nothing of
    the real thing, so it does not lead."""


def verdict(group: Group) -> FastestVerdict:
    """Fastest and most memory-frugal of a group, each with its interval; of the real things where
    there are any.

    More ranks than cores change a cell's times, not its memory.
    """
    genuine, timed = _real_things(group), fairly_timed(group)
    best, first = timed[0], group.rows[0]
    tied = tuple(tied_with_fastest(dataclasses.replace(group, rows=tuple(timed))))
    ahead = _fast(group, first, ()) if best is not first else None
    return FastestVerdict(
        group,
        _fast(group, best, tied),
        _frugal(genuine, best),
        _balanced(group, timed, best),
        ahead,
    )


def _real_things(group: Group) -> list[Row]:
    return [row for row in group.rows if missing(row["stand_in"])] or list(group.rows)


def fairly_timed(group: Group) -> list[Row]:
    """Real things with a core for each rank, fastest first; where there are none, the next best."""
    genuine = _real_things(group)
    return [row for row in genuine if not row["oversubscribed"]] or genuine


def _fast(group: Group, row: Row, tied: tuple[Row, ...]) -> Pick:
    low, high = row[f"{group.throughput}_low"], row[f"{group.throughput}_high"]
    known = f"95 % interval {number(low)} to {number(high)}, {plural(row['trials'], 'trial')}"
    return Pick(
        row,
        f"{number(row[group.throughput])} {group.unit}",
        "1 trial: no interval" if missing(low) else known,
        tied,
    )


def _frugal(genuine: Sequence[Row], fastest: Row) -> Pick | None:
    rows = [row for row in genuine if not missing(row["peak_memory_bytes"])]
    if not rows:
        return None
    row = min(rows, key=lambda r: (r["peak_memory_bytes"], -r["samples_per_second"]))
    peak, low = row["peak_memory_bytes"], row["peak_memory_bytes_low"]
    between = (
        f"largest of {plural(row['trials'], 'trial')}, smallest {number(low / MIB)} MiB"
        if row["trials"] > 1
        else "1 trial: no range"
    )
    tied = tuple(r for r in rows if r is not row and r["peak_memory_bytes_low"] <= peak)
    then = ""
    if row is not fastest and not missing(fastest["peak_memory_bytes"]):
        less = percent(1 - peak / fastest["peak_memory_bytes"])
        speed = percent(row["samples_per_second"] / fastest["samples_per_second"])
        comparable = bool(row["oversubscribed"]) == bool(fastest["oversubscribed"])
        then = f"{less} less than the fastest needs" + (
            f", at {speed} of its throughput" if comparable else ""
        )
    return Pick(row, f"{number(peak / MIB)} MiB", between, tied, then)


def _balanced(group: Group, timed: Sequence[Row], fastest: Row) -> Pick | None:
    """The cell with the most throughput for its peak memory, and those whose interval of that
    reaches it."""
    rows = [row for row in timed if not missing(row["peak_memory_bytes"])]
    if not rows:
        return None

    def worth(row: Row, end: str = "") -> float:
        figure = row[f"{group.throughput}{end}"]
        return float(
            (row[group.throughput] if missing(figure) else figure) * MIB / row["peak_memory_bytes"]
        )

    row = max(rows, key=worth)
    between = (
        f"95 % interval {number(worth(row, '_low'))} to {number(worth(row, '_high'))}"
        if row["trials"] > 1
        else "1 trial: no interval"
    )
    tied = tuple(
        r
        for r in rows
        if r is not row and row["trials"] > 1 and worth(r, "_high") >= worth(row, "_low")
    )
    then = ""
    if row is not fastest and not missing(fastest["peak_memory_bytes"]):
        speed = percent(row[group.throughput] / fastest[group.throughput])
        then = (
            f"{speed} of the fastest's throughput in"
            f" {percent(row['peak_memory_bytes'] / fastest['peak_memory_bytes'])} of its memory"
        )
    return Pick(row, f"{number(worth(row))} {group.unit} per MiB", between, tied, then)


def pareto(group: Group) -> list[Row]:
    """Cells that no other beats in both throughput and peak memory, fastest first."""
    front: list[Row] = []
    for row in group.rows:
        if not missing(row["peak_memory_bytes"]) and all(
            row["peak_memory_bytes"] < better["peak_memory_bytes"] for better in front
        ):
            front.append(row)
    return front
