"""One run as formats beside the HTML page read it: its row, its cells and their groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.analysis.summary import cell_rows
from harness.record.status import NO_RESULT
from reports import groups, largest
from reports.groups import Group, Row

if TYPE_CHECKING:
    import pandas as pd

    from harness.record.store import Results


@dataclass(frozen=True)
class RunReport:
    """A run and what was found of its cells."""

    run: Row
    trials: pd.DataFrame
    """Without a search's probes."""
    cells: tuple[Row, ...]
    groups: tuple[Group, ...]
    results: Results

    @property
    def run_id(self) -> str:
        return str(self.run["run_id"])

    @property
    def failures(self) -> list[Row]:
        """Cells that were launched and are no good, without those that the matrix expects to
        diverge."""
        return [row for row in self.cells if row["status"] in NO_RESULT and not row["expected"]]


def ran(results: Results) -> RunReport:
    """Of one run's frames; ValueError where they are not of one."""
    if len(results.runs) != 1:
        raise ValueError(f"a report is of one run, not of {len(results.runs)}")
    run = groups.records(results.runs)[0]
    trials = largest.verified(results.trials) if largest.is_search(run) else results.trials
    rows = cell_rows(trials)
    lowest = trials.groupby("cell_id")["peak_memory_bytes"].min().to_dict()
    for row in rows:
        row["peak_memory_bytes_low"] = lowest.get(row["cell_id"])
    return RunReport(run, trials, tuple(rows), tuple(groups.find_groups(rows)), results)


def each(results: Results) -> list[RunReport]:
    """Every run of frames of several, as they come."""
    return [ran(only(results, [run_id])) for run_id in results.runs["run_id"]]


def only(results: Results, run_ids: Sequence[str]) -> Results:
    """The frames of some of their runs."""
    names = ("runs", "trials", "steps", "explained")
    frames = {name: getattr(results, name) for name in names}
    kept = {
        name: frame[frame["run_id"].isin(run_ids)] if "run_id" in frame else frame
        for name, frame in frames.items()
    }
    return dataclasses.replace(results, **kept)
