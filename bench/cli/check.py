"""bench check: are the files of a results folder intact?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def check(
    results: Annotated[
        Path, typer.Argument(help="Results folder whose files are read and compared.")
    ] = Path("results"),
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help=(
                "Move damaged files to the folder quarantine within the results folder; a run that"
                " is resumed takes their trials again."
            ),
        ),
    ] = False,
    json_output: Annotated[bool, typer.Option("--json", help="For machines: JSON.")] = False,
) -> None:
    """Verifies the checksums of every file in a results folder and lists the damaged ones.

    Exit code 1 if damaged files remain, or files of a newer version of the suite.

    Example: [bold]python -m bench check results --repair[/bold]
    """
    from rich.markup import escape

    from bench.cli import terminal
    from harness.record.check import check_folder, quarantine
    from harness.record.store import Store
    from harness.spec.errors import UsageError

    if not results.is_dir():
        raise UsageError(f"there is no results folder {str(results)!r}")
    store, console = Store(results), terminal.console(quiet=json_output)
    checked = check_folder(store)
    moved = {
        problem.file: quarantine(store, problem)
        for problem in checked.problems
        if repair and problem.damaged
    }
    for problem in checked.problems:
        where = f"; moved to {moved[problem.file]}" if problem.file in moved else ""
        console.print(escape(f"{problem.file}: {problem.what}{where}"), highlight=False)
    remaining = len(checked.problems) - len(moved)
    console.print(
        f"{checked.files} files read, {len(checked.problems)} of them with a problem"
        + (f", {len(moved)} moved" if moved else ""),
        highlight=False,
    )
    if json_output:
        rows = [
            {
                "file": str(problem.file),
                "problem": problem.what,
                "damaged": problem.damaged,
                "moved_to": str(moved[problem.file]) if problem.file in moved else None,
            }
            for problem in checked.problems
        ]
        print(json.dumps({"files": checked.files, "problems": rows}))
    raise typer.Exit(1 if remaining else 0)
