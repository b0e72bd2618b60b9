"""Resolves the run and cell arguments of all commands.

Runs: an id, its prefix, `latest`, or `latest~1`, the one before of the same matrix. Cells: an id, a
strategy, or a pattern (`ddp*x2*`) over labels or names.
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from bench.matrix import matrix_text
from harness.analysis.ranking import Choice
from harness.analysis.selection import RunSelection, find_run, two_sides
from harness.cell.cell import Cell
from harness.cell.errors import NoRuns, UsageError
from harness.cell.yaml_text import parse_yaml
from harness.record.plan import Plan, require_named
from harness.record.store import Results, Store

__all__ = ["find_run"]

REFERENCES = "reference"
"""Subfolder of named baselines."""


class Recorded(Protocol):
    """A cell in any table, by its recorded id."""

    @property
    def cell_id(self) -> str: ...
    @property
    def cell(self) -> Cell: ...


AnyRecorded = TypeVar("AnyRecorded", bound=Recorded)


@dataclass(frozen=True)
class RecordedCell:
    cell_id: str
    cell: Cell


def find_runs(store: Store, names: Sequence[str], every: bool = False) -> list[str]:
    """Returns the ids of matching runs, oldest first; by default the newest run. Raises
    UsageError."""
    if every and names:
        raise UsageError(
            "--all means every run of the folder: leave out either --all or the names of runs"
        )
    run_ids = store.run_ids()
    if names:
        chosen = {find_run(store, name) for name in names}
        return [run_id for run_id in run_ids if run_id in chosen]
    if not run_ids:
        raise NoRuns(f"no runs in results folder {str(store.folder)!r}")
    return run_ids if every else run_ids[-1:]


def find_sides(names: Sequence[str], results: Path) -> tuple[RunSelection, RunSelection]:
    """Returns the two runs or folders to compare; the second is the newest run if it is not named.
    Raises UsageError for another number of names."""
    if len(names) not in (1, 2):
        raise UsageError(
            f"a comparison needs one or two runs or folders, not {len(names)}: python -m bench"
            " compare A B; the newest two runs of a matrix are latest~1 latest"
        )
    earlier, later = (*names, "latest")[:2]
    return two_sides(_side(earlier, results), _side(later, results), results)


def _side(name: str, results: Path) -> str:
    """Returns the folder of reference results with this name, or else the name."""
    folder = results / REFERENCES / name
    return str(folder) if Path(name).name == name and folder.is_dir() else name


def matches(cell: Cell, pattern: str) -> bool:
    return (
        pattern in (cell.strategy, cell.id)
        or fnmatch.fnmatchcase(cell.label, pattern)
        or fnmatch.fnmatchcase(cell.name, pattern)
    )


def matching(recorded: Iterable[AnyRecorded], pattern: str) -> list[AnyRecorded]:
    return [row for row in recorded if matches(row.cell, pattern)]


def baseline_choice(pattern: str, cells: Iterable[Cell]) -> Choice | None:
    """Returns a test for the baseline's cells; None if there is no pattern. Raises UsageError if no
    cell matches."""
    if not pattern:
        return None
    if not any(matches(cell, pattern) for cell in cells):
        raise UsageError(
            f"--baseline {pattern!r} is not a cell of this run; name a strategy, an id or a"
            " pattern such as 'fsdp2*'"
        )
    return lambda cell: matches(cell, pattern)


def closest(recorded: Sequence[AnyRecorded], word: str) -> list[AnyRecorded]:
    """Matches by id, else name, else label, else strategy or pattern."""
    by_id = [row for row in recorded if row.cell_id == word]
    by_name = [row for row in recorded if row.cell.name == word]
    by_label = [row for row in recorded if row.cell.label == word]
    return by_id or by_name or by_label or matching(recorded, word)


def no_such_cell(word: str, where: str, recorded: Iterable[Recorded]) -> UsageError:
    labels = ", ".join(dict.fromkeys(row.cell.label for row in recorded)) or "none"
    return UsageError(
        f"{word!r} matches no label, name or id of a cell in {where}; it has {labels}"
    )


def find_recorded_cells(
    store: Store, word: str, run_id: str | None
) -> tuple[Results, list[RecordedCell]]:
    """Returns a run's tables without steps, and its cells that match, the simplest one first.

    By default the newest run with such a cell. Raises UsageError if no cell matches.
    """
    looked_at: list[RecordedCell] = []
    for candidate in [run_id] if run_id else reversed(find_runs(store, [], every=True)):
        tables = store.load([candidate], steps=False)
        rows = tables.trials.drop_duplicates("cell_id")[["cell_id", "cell"]].to_dict("records")
        cells = [RecordedCell(str(row["cell_id"]), Cell(**json.loads(row["cell"]))) for row in rows]
        looked_at += cells
        meant = closest(cells, word)
        if meant:
            planned = [cell.id for cell in Plan.from_row(store.run_row(candidate)).cells]
            order = {cell_id: place for place, cell_id in enumerate(planned)}
            meant.sort(key=lambda row: order.get(row.cell_id, len(order)))
            return tables, sorted(meant, key=lambda row: complexity(row.cell))
    raise no_such_cell(word, f"run {run_id}" if run_id else repr(str(store.folder)), looked_at)


def keep(cells: Sequence[Cell], only: Sequence[str], skip: Sequence[str]) -> list[Cell]:
    """Returns cells that match `only`, if it is given, and not `skip`. Raises UsageError if a
    pattern matches nothing, or no cell remains."""
    for option, patterns in (("--only", only), ("--skip", skip)):
        for pattern in patterns:
            if not any(matches(cell, pattern) for cell in cells):
                raise UsageError(
                    f"{option} {pattern!r} matches no cell of the matrix; its strategies are:"
                    f" {_strategies(cells)}"
                )
    chosen = [cell for cell in cells if not only or any(matches(cell, word) for word in only)]
    chosen = [cell for cell in chosen if not any(matches(cell, word) for word in skip)]
    if not chosen:
        options = "--only and --skip leave" if only else "--skip leaves"
        raise UsageError(f"{options} no cell of the matrix; leave some of them out")
    return chosen


def planned_cell(store: Store, word: str, matrix: str) -> Cell | None:
    """Returns the newest planned cell of this id or name. Raises UsageError if it would use code or
    a hub that `matrix` does not name."""
    for plan in map(Plan.from_row, store.newest_rows()):
        for cell in (*plan.cells, *(left.cell for left in plan.left_out)):
            if word in (cell.id, cell.name):
                require_named([cell], [matrix_text(matrix)])
                return cell
    return None


def require_unchanged(recorded: Cell, settings: Sequence[str]) -> None:
    """Raises UsageError for settings of a recorded cell, which would make it another cell."""
    if settings:
        raise UsageError(
            f"--set {settings[0]!r} applies to cells of the matrix, but {recorded.name!r} is a"
            " recorded cell: leave --set out, or name a strategy"
        )


def find_cells(
    cells: Sequence[Cell], word: str, matrix: str, store: Store, settings: Sequence[str] = ()
) -> list[Cell]:
    """Returns the matrix's matching cells with `settings`; if there are none, the recorded cell.
    Raises UsageError, also if settings do not apply."""
    if meant := [cell for cell in cells if matches(cell, word)]:
        return meant
    if recorded := planned_cell(store, word, matrix):
        require_unchanged(recorded, settings)
        return [recorded]
    raise UsageError(
        f"no cell matches {word!r} in matrix {matrix!r} or in results {str(store.folder)!r}; the"
        f" matrix has: {_strategies(cells)}"
    )


def complexity(cell: Cell) -> tuple[bool, bool, bool]:
    """Orders cells: first those without options, then those in fp32, then on several devices."""
    return cell.label != cell.strategy, cell.precision != "fp32", cell.devices == 1


def plainest(cells: Sequence[Cell]) -> Cell:
    """Returns the first of the simplest cells; see `complexity`."""
    return min(cells, key=complexity)


def of_several(word: str, count: int) -> str:
    """Says that the simplest of several matching cells was taken; empty for a single match."""
    if count < 2:
        return ""
    return (
        f"the simplest of the {count} cells that match {word!r}; to choose another, give its label,"
        " name or id"
    )


def split_options(word: str) -> tuple[str, str | None]:
    """Splits `ddp:a=1` or `FILE.py:CLASS:a=1` before its options. The options are empty if there
    are none."""
    from harness.seam.registry import strategies

    name, colon, rest = word.partition(":")
    if colon and name in strategies():
        return name, rest
    match = re.fullmatch(r"(.+?):(\s*\w+\s*=.*)", word)
    return (match[1], match[2]) if match else (word, None)


def with_options(cell: Cell, text: str) -> Cell:
    """Replaces a cell's options by `name=value,...`; raises UsageError."""
    from harness.seam.registry import make_strategy

    pairs = [pair.partition("=") for pair in text.split(",")]
    if any(not name or not equals for name, equals, _ in pairs):
        raise UsageError(f"options {text!r}: write them as name=value, separated by commas")
    options = {
        name.strip(): parse_yaml(value, f"option {name.strip()}") for name, _, value in pairs
    }
    changed = cell.model_copy(update={"options": options})
    make_strategy(changed)
    return changed


def _strategies(cells: Iterable[Cell]) -> str:
    return ", ".join(sorted({cell.strategy for cell in cells}))
