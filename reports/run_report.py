"""Results of one run, for all formats."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.analysis.answer import Answer
from harness.analysis.cell_result import CellResult
from harness.analysis.estimates import Adjustment
from harness.analysis.ranking import Choice
from harness.analysis.setting import System, systems
from harness.analysis.summary import adjustment_of, summarised
from harness.cell.cell import Cell
from harness.record.profile_record import ProfileRecord
from harness.record.run_record import RunRecord
from harness.record.trial import NO_RESULT, TrialRecord
from reports.groups import Group, find_groups, headline
from reports.names import named
from reports.run_facts import (
    Largest,
    StepProfile,
    is_search,
    largest,
    plan_of,
    profiled,
    verified,
)

if TYPE_CHECKING:
    from harness.record.store import Results

NOT_REACHED = "not reached"


@dataclass(frozen=True)
class RunReport:
    run: RunRecord
    trials: tuple[TrialRecord, ...]
    cells: tuple[CellResult, ...]
    groups: tuple[Group, ...]
    results: Results
    profiles: tuple[ProfileRecord, ...] = ()

    @property
    def run_id(self) -> str:
        return self.run.run_id

    @property
    def failed(self) -> list[CellResult]:
        """Launched cells without a valid result, except expected divergences."""
        return [cell for cell in self.cells if cell.status in NO_RESULT and not cell.expected]

    @property
    def is_search(self) -> bool:
        """Whether it searched for the largest model; speeds are then not compared."""
        return self.largest is not None

    @property
    def ranked(self) -> int:
        return sum(len(group.rows) for group in self.groups)

    @functools.cached_property
    def adjustment(self) -> Adjustment:
        return adjustment_of(self.trials)

    @functools.cached_property
    def largest(self) -> Largest | None:
        return largest(self.results) if is_search(self.run) else None

    @functools.cached_property
    def rehearsed(self) -> Mapping[str, int]:
        """Bytes of states by a rehearsal, by cell id; see `Plan.rehearsed`."""
        rehearsed: Mapping[str, int] = plan_of(self.run).get("rehearsed", {})
        return rehearsed

    @functools.cached_property
    def leading(self) -> Group | None:
        plan = plan_of(self.run)
        # Older versions listed fp32 twins in a field of their own.
        not_compared = (*plan.get("once", ()), *plan.get("not_compared", ()))
        return None if self.largest else headline(self.groups, not_compared)

    @property
    def advised(self) -> Answer | None:
        """Advice for the leading group; None if there is nothing to choose."""
        return self.leading.advised if self.leading else None

    @property
    def between_runs(self) -> str:
        """Gain of the advised cell in several runs, as seen when this one ended. Empty if it is
        known from this run alone, or an older version advised another cell."""
        sentences = self.results.conclusions["between_runs"].tolist()
        rival = self.advised.rival if self.advised else None
        is_current = sentences and rival and rival.cell.label in sentences[-1]
        return sentences[-1] if is_current else ""

    @functools.cached_property
    def profiled(self) -> list[StepProfile]:
        profiles = [] if is_search(self.run) else self.profiles
        return profiled(self.cells, profiles)

    @functools.cached_property
    def systems(self) -> list[System]:
        """Recorded and planned cells by system; a search plans none."""
        planned = [] if self.largest else unreached(self.run, self.cells)
        return all_systems(self.cells, planned, self.run_id)

    def from_to(
        self, value: Callable[[CellResult], float | None], text: Callable[[float], str]
    ) -> str:
        """Returns the smallest and the largest value with their cells: of the leading group if it
        has such values, else of the run."""
        for cells in (self.leading.rows if self.leading else (), self.cells):
            measured = [(x, cell) for cell in cells if (x := value(cell)) is not None]
            if measured:
                measured.sort(key=lambda pair: pair[0])
                ends = measured if len(measured) < 2 else (measured[0], measured[-1])
                return " to ".join(f"{text(x)} ({named(cell)})" for x, cell in ends)
        return ""

    def unless_most(self, cells: Sequence[CellResult], line: str) -> str:
        """Returns the line of a closed section; empty, so that it is open, if it is about most
        cells."""
        return "" if 2 * len({cell.cell_id for cell in cells}) > len(self.cells) else line


def ran(results: Results, baseline: Choice | None = None) -> RunReport:
    """Builds a report; raises ValueError unless there is one run."""
    if len(results.runs) != 1:
        raise ValueError(f"a report is of one run, not of {len(results.runs)}")
    (run,) = RunRecord.from_frame(results.runs)
    trials = tuple(TrialRecord.from_frame(results.trials))
    if is_search(run):
        trials = tuple(trial for trial in trials if verified(trial))
    cells = summarised(trials, baseline)
    profiles = tuple(ProfileRecord.from_frame(results.explained))
    groups = tuple(find_groups(cells, profiles))
    return RunReport(run, trials, tuple(cells), groups, results, profiles)


def reports_of(results: Results, baseline: Choice | None = None) -> list[RunReport]:
    return [ran(only(results, [run_id]), baseline) for run_id in results.runs["run_id"]]


def only(results: Results, run_ids: Sequence[str]) -> Results:
    names = ("runs", "trials", "steps", "explained", "conclusions")
    frames = {name: getattr(results, name) for name in names}
    of_runs = {
        name: frame[frame["run_id"].isin(run_ids)] if "run_id" in frame else frame
        for name, frame in frames.items()
    }
    return dataclasses.replace(results, **of_runs)


def unreached(run: RunRecord, cells: Iterable[CellResult]) -> list[Cell]:
    recorded = {cell.cell_id for cell in cells}
    planned = [Cell(**fields) for fields in plan_of(run).get("cells", [])]
    return [cell for cell in planned if cell.id not in recorded]


def all_systems(
    cells: Iterable[CellResult], unreached: Iterable[Cell], run_id: str = ""
) -> list[System]:
    reason = "the run ended before it; resume the run to launch it"
    planned = [planned_cell(cell, run_id, NOT_REACHED, reason) for cell in unreached]
    return systems([*cells, *planned])


def planned_cell(cell: Cell, run_id: str, status: str, reason: str) -> CellResult:
    return CellResult(run_id=run_id, cell=cell, cell_id=cell.id, status=status, reason=reason)
