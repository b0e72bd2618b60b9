"""One run as every format reads it: its row, trials, cells and groups."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.analysis.baseline import Choice
from harness.analysis.cell_result import CellResult
from harness.analysis.control import Adjustment
from harness.analysis.setting import System
from harness.analysis.summary import adjustment_of, summarised
from harness.record.profile import ProfileRecord
from harness.record.run import RunRecord
from harness.record.status import NO_RESULT
from harness.record.trial import TrialRecord
from reports.facts import plan_of
from reports.failures import unreached
from reports.groups import RankedGroup, find_groups, headline
from reports.largest import Largest, is_search, largest, verified
from reports.profile import ProfiledCell, profiled
from reports.systems import all_systems

if TYPE_CHECKING:
    from harness.record.store import Results


@dataclass(frozen=True)
class RunReport:
    run: RunRecord
    trials: tuple[TrialRecord, ...]
    """Trials without a search's probes."""
    cells: tuple[CellResult, ...]
    groups: tuple[RankedGroup, ...]
    results: Results

    @property
    def run_id(self) -> str:
        return self.run.run_id

    @property
    def failed(self) -> list[CellResult]:
        """Launched cells without a valid result, except expected divergences."""
        return [cell for cell in self.cells if cell.status in NO_RESULT and not cell.expected]

    @property
    def ranked(self) -> int:
        return sum(len(group.rows) for group in self.groups)

    @functools.cached_property
    def adjustment(self) -> Adjustment:
        return adjustment_of(self.trials)

    @functools.cached_property
    def largest(self) -> Largest | None:
        """Outcome of a search; None for other runs."""
        return largest(self.results) if is_search(self.run) else None

    @functools.cached_property
    def leading(self) -> RankedGroup | None:
        """Group of the verdict; models of a search are not compared by speed."""
        once = plan_of(self.run).get("once", ())
        return None if self.largest else headline(self.groups, once)

    @functools.cached_property
    def profiled(self) -> list[ProfiledCell]:
        profiles = [] if is_search(self.run) else self.profiles
        return profiled(self.cells, profiles)

    @functools.cached_property
    def profiles(self) -> list[ProfileRecord]:
        return ProfileRecord.from_frame(self.results.explained)

    @functools.cached_property
    def systems(self) -> list[System]:
        """Recorded and planned cells by system; a search plans none."""
        planned = [] if self.largest else unreached(self.run, self.cells)
        return all_systems(self.cells, planned, self.run_id)


def ran(results: Results, baseline: Choice | None = None) -> RunReport:
    """Builds the report from one run's tables; raises ValueError if they are not of one.

    `baseline`: the cell that others of its setting are compared with; by default `baseline_of`.
    """
    if len(results.runs) != 1:
        raise ValueError(f"a report is of one run, not of {len(results.runs)}")
    (run,) = RunRecord.from_frame(results.runs)
    trials = tuple(TrialRecord.from_frame(results.trials))
    if is_search(run):
        trials = tuple(trial for trial in trials if verified(trial))
    cells = summarised(trials, baseline)
    return RunReport(run, trials, tuple(cells), tuple(find_groups(cells)), results)


def each(results: Results, baseline: Choice | None = None) -> list[RunReport]:
    """Returns a report for every run in these tables, in order; see `ran`."""
    return [ran(only(results, [run_id]), baseline) for run_id in results.runs["run_id"]]


def only(results: Results, run_ids: Sequence[str]) -> Results:
    names = ("runs", "trials", "steps", "explained", "conclusions")
    frames = {name: getattr(results, name) for name in names}
    kept = {
        name: frame[frame["run_id"].isin(run_ids)] if "run_id" in frame else frame
        for name, frame in frames.items()
    }
    return dataclasses.replace(results, **kept)
