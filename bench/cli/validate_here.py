"""bench validate --here: scores predictions against this machine's measurements."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from harness.planner.local.cpu_prediction import CellFacts, Observation
    from harness.planner.local.local_calibration import CpuScores, FirstChoice
    from harness.planner.local.measurements import LocalMeasurements


def validate(folders: Sequence[Path], json_output: bool) -> None:
    """Prints the scores of each workload and emulated link, predicted from all others.

    Raises UsageError if there are too few cells.
    """
    from bench.cli import terminal
    from harness.planner.local.local_calibration import base_of, first_choices, leave_out, score
    from harness.planner.local.measurements import read_measurements
    from harness.spec.errors import UsageError

    measured = read_measurements(folders)
    observations = [cell.observation for cell in measured.cells]
    held = {
        "each workload predicted from all others": leave_out(observations, base_of),
        "each emulated link predicted from all else": leave_out(observations, _link),
    }
    held = {name: rows for name, rows in held.items() if rows}
    if not held:
        raise UsageError(
            "these results have too few cells, or only one workload, so that none can be predicted"
            " from others; measure a second workload"
        )
    scores = {name: score(rows) for name, rows in held.items()}
    choices = {name: first_choices(rows, partial(_tied, measured)) for name, rows in held.items()}
    if json_output:
        document = {
            name: {
                "scores": [dataclasses.asdict(part) for part in scores[name]],
                "first_choices": [dataclasses.asdict(choice) for choice in choices[name]],
            }
            for name in held
        }
        print(json.dumps(document | {"machine": measured.machine}))
        return
    console = terminal.console()
    for name in held:
        console.print(_scores(name, scores[name]))
        console.print(_choices(choices[name]))


def _link(facts: CellFacts) -> str:
    return facts.links


def _tied(measured: LocalMeasurements, among: Sequence[Observation]) -> list[Observation]:
    """Returns the cells that are tied with the fastest of these."""
    from harness.analysis.answer import may_be_fastest

    cells = [cell for cell in measured.cells if any(cell.observation is one for one in among)]
    cells.sort(key=lambda cell: cell.observation.seconds)
    tied = may_be_fastest([cell.result for cell in cells])
    return [cell.observation for cell in cells if any(cell.result is one for one in tied)]


def _scores(name: str, scores: Sequence[CpuScores]) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=f"{name}: median errors", title_justify="left")
    table.add_column("left out")
    for column in ("cells", "step time", "memory", "measured elsewhere", "step time", "memory"):
        table.add_column(column, justify="right")
    for part in scores:
        table.add_row(
            escape(part.part),
            str(part.cells),
            _percent(part.median_time_error),
            _percent(part.median_memory_error),
            str(part.known),
            _percent(part.known_median_time_error),
            _percent(part.known_median_memory_error),
        )
    return table


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _choices(choices: Sequence[FirstChoice]) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="predicted first choices", title_justify="left")
    for column in ("setting", "of", "predicted to be fastest", "measured fastest", "slower", ""):
        table.add_column(column, overflow="fold")
    for choice in choices:
        same = "" if choice.significant else "tied"
        table.add_row(
            escape(choice.setting),
            str(choice.compared),
            escape(choice.chosen),
            escape(choice.best),
            f"{choice.slower:.1%}",
            "the same" if choice.chosen == choice.best else same,
        )
    return table
