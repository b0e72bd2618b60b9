"""The index of all reports of a folder: what each run found, and what changed against the run
before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from harness.analysis.compare import RunComparison, compare_sides
from harness.analysis.selection import RunSelection, side
from harness.spec.errors import UsageError
from reports import facts
from reports.groups import FastestVerdict, Row, headline, named, verdict
from reports.largest import largest
from reports.run_report import RunReport, only, ran
from reports.text import listed, plain, plural

if TYPE_CHECKING:
    from harness.record.store import Store

INDEX = "index.html"


@dataclass(frozen=True)
class Entry:
    """One run. `link`: of its report relative to the index, empty where there is none."""

    run: Row
    link: str
    hardware: str
    verdict: str
    details: str
    failures: int
    """Launched cells that are no good, expected divergences aside."""
    cells: int
    before: str
    """The run that it is compared with; empty: none before it has a cell in common on the same
    matrix."""
    change: str
    regressions: int


def entries(store: Store, folder: Path) -> list[Entry]:
    """Every run of the store, newest first; `folder`: where the index and the reports lie."""
    found: list[Entry] = []
    earlier: list[tuple[Row, RunSelection]] = []
    whole = store.load(steps=False)
    for run_id in whole.runs["run_id"]:
        one = ran(only(whole, [run_id]))
        now = side(run_id, one.results)
        found.append(_entry(one, folder, *_against(earlier, one, now)))
        earlier.append((one.run, now))
    return found[::-1]


def _against(
    earlier: Sequence[tuple[Row, RunSelection]], one: RunReport, now: RunSelection
) -> tuple[str, RunComparison | None]:
    """The newest earlier run of the same matrix on equal hardware, and the comparison with it."""
    for row, was in reversed(earlier):
        alike = any(
            not a.hardware.difference(b.hardware, b.device)
            for a in was.cells[:1]
            for b in now.cells[:1]
        )
        if row["matrix"] == one.run["matrix"] and alike:
            try:
                return was.name, compare_sides(was, now)
            except UsageError:  # no cell in common
                continue
    return "", None


def _entry(one: RunReport, folder: Path, before: str, change: RunComparison | None) -> Entry:
    said, details = _verdict(one)
    file = f"{one.run_id}.html"
    link = quote(file) if (folder / file).is_file() else ""
    told = change.headline if change else ""
    bad = len(change.regressions) if change else 0
    return Entry(
        one.run,
        link,
        facts.hardware(one.run),
        said,
        details,
        len(one.failures),
        len(one.cells),
        before,
        told,
        bad,
    )


def _verdict(one: RunReport) -> tuple[str, str]:
    if search := largest(one.results):
        best = search.winner
        return (f"largest: {named(best)}" if best else "nothing fits yet"), (
            f"{plain(best['reached'])} parameters" if best else ""
        )
    if (group := headline(list(one.groups))) is None:
        return "nothing is ranked", ""
    found: FastestVerdict = verdict(group)
    tied = [named(row) for row in found.fastest.tied]
    alike = f"; cannot be told apart from {listed(tied, 3)}" if tied else ""
    return (
        f"fastest: {named(found.fastest.row)}",
        f"{found.fastest.value}, {found.fastest.interval}{alike}; {group.workload}, {group.title}",
    )


def page(store: Store, folder: Path) -> str:
    """One HTML page with a relative link to each report; reports of runs that the store lacks are
    listed after the runs."""
    from reports.page import fill

    found = entries(store, folder)
    known = {f"{entry.run['run_id']}.html" for entry in found} | {INDEX}
    others = sorted(
        path.name
        for path in folder.glob("*.html")
        if path.name not in known and not path.name.endswith(".print.html")
    )
    more = [(name, quote(name)) for name in others]
    return fill(
        "index.html.j2",
        entries=found,
        others=more,
        failing=_count(found, lambda entry: entry.failures > 0),
    )


def _count(found: Sequence[Entry], chosen: Callable[[Entry], bool]) -> str:
    return plural(sum(map(chosen, found)), "run")
