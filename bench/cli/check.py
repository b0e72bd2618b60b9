from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bench.cli.options import Json
from harness.cell.errors import plural

if TYPE_CHECKING:
    from harness.record.store import Checked


def check(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER|FILE",
            help="Results folder, a folder that contains several, or one parquet file.",
        ),
    ],
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="Move damaged files to the results folder's subfolder quarantine; a resumed run"
            " repeats their trials.",
        ),
    ] = False,
    json_output: Json = False,
) -> None:
    """Check that result files are intact and consistent, such as those that others send.

    Checks checksums, schema, columns, digests, and whether figures and verdicts agree with each
    other. Also lists code and hub ids that cells name. Rows are numbered from 0. The exit code is
    2 if a problem remains.

    Example: [bold]python -m bench check results --repair[/bold]
    """
    from harness.analysis.consistency import check as check_path
    from harness.cell.errors import UsageError

    if not path.exists():
        raise UsageError(f"there is no results folder or file {str(path)!r}")
    if repair and path.is_file():
        raise UsageError("--repair moves files of a results folder: name the folder")
    checked = check_path(path)
    if not checked.files:
        raise UsageError(f"{str(path)!r} has no results: they are in runs/RUN.parquet and trials/")
    moved = _quarantined(path, checked) if repair else {}
    _show(checked, moved, json_output)
    raise typer.Exit(2 if any(problem.file not in moved for problem in checked.problems) else 0)


def _show(checked: Checked, moved: Mapping[Path, Path], json_output: bool) -> None:
    from rich.markup import escape

    from bench.cli import terminal

    console = terminal.console(quiet=json_output)
    for problem in checked.problems:
        where = f"; moved to {moved[problem.file]}" if problem.file in moved else ""
        console.print(escape(f"{problem}{where}"), highlight=False, soft_wrap=True)
    console.print(
        f"read {plural(checked.files, 'file')}, found {plural(len(checked.problems), 'problem')}"
        + (f", moved {plural(len(moved), 'file')}" if moved else ""),
        highlight=False,
    )
    for name in checked.foreign_names:
        what = f"cells name {name}, which commands use only if your matrix or options do too"
        console.print(escape(what), highlight=False, soft_wrap=True)
    if not json_output:
        return
    rows = [
        {
            "file": str(problem.file),
            "column": problem.column or None,
            "row": problem.row,
            "problem": problem.what,
            "damaged": problem.damaged,
            "moved_to": str(moved[problem.file]) if problem.file in moved else None,
        }
        for problem in checked.problems
    ]
    document = {"files": checked.files, "problems": rows}
    print(json.dumps(document | {"foreign_names": checked.foreign_names}))


def _quarantined(path: Path, checked: Checked) -> dict[Path, Path]:
    from harness.record.store import quarantine, stores_below

    damaged = {problem.file for problem in checked.problems if problem.damaged}
    return {
        file: quarantine(store, file)
        # Innermost first: a results folder may contain others.
        for store in reversed(list(stores_below(path)))
        for file in sorted(damaged)
        if file.is_relative_to(store.folder) and file.exists()
    }
