from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Annotated

import typer

from bench.cli import options as opt

SCRIPTS = Path(__file__).parents[2] / "scripts"


def bisect(
    candidates: Annotated[
        list[str],
        typer.Argument(
            metavar="CANDIDATE...",
            help="Requirements from the fast version to the slow one, such as torch==2.13.0"
            " torch==2.14.0 torch==2.15.0; or GOOD..BAD: commits of the current folder's project.",
        ),
    ],
    matrix: opt.Matrix = "smoke",
    only: opt.Only = None,
    settings: opt.Settings = None,
    rounds: Annotated[int, typer.Option("--rounds", min=2, help="Trials on each side.")] = 30,
    work: Annotated[Path, typer.Option("--work", help="Folder for environments.")] = Path("bisect"),
    json_output: opt.Json = False,
) -> None:
    """Find the first version of a library, or commit of a project, that trains slower.

    Compares each candidate with the first as the GitHub action does: both sides train in turn.

    Example: [bold]python -m bench bisect torch==2.12.1 torch==2.13.0[/bold]
    """
    from harness.cell.errors import UsageError

    if not (SCRIPTS / "slower.py").is_file():
        raise UsageError("bisect needs the suite's folder scripts: run it in a checkout")
    commits = len(candidates) == 1 and ".." in candidates[0]
    if commits:
        good, _, bad = candidates[0].partition("..")
        listed = ["git", "rev-list", "--first-parent", "--reverse", f"{good}..{bad}"]
        done = subprocess.run(listed, capture_output=True, text=True)
        candidates = [good, *done.stdout.split()]
    if len(candidates) < 2:
        raise UsageError(f"{candidates[0]!r} has no candidates to search: give two or more")

    def slower(place: int) -> bool:
        names = ("BEFORE_REF", "AFTER_REF") if commits else ("BEFORE", "AFTER")
        sides = dict(zip(names, (candidates[0], candidates[place]), strict=True))
        folder = (work / str(place)).resolve()
        subprocess.run([SCRIPTS / "two_sides.sh", folder], env=os.environ | sides, check=True)
        arguments = [
            "--matrix",
            matrix,
            "--rounds",
            str(rounds),
            "--results",
            str(folder / "results"),
        ]
        for option, values in (("--only", only), ("--set", settings)):
            arguments += [word for value in values or () for word in (option, value)]
        for side in ("before", "after"):
            arguments += [f"--{side}", str(folder / side / "bin" / "python")]
            arguments += [f"--{side}-folder", str(folder / f"{side}-project")]
        command = [str(folder / "after/bin/python"), str(SCRIPTS / "slower.py"), *arguments]
        variables = os.environ | {"PYTHONPATH": str(SCRIPTS.parent)}
        code = subprocess.run(command, env=variables).returncode
        if code not in (0, 1):
            raise UsageError(f"{candidates[place]} could not be compared; see above")
        typer.echo(f"{candidates[place]}: {'slower' if code else 'no slower'}", err=True)
        return bool(code)

    low, high = 0, len(candidates) - 1
    if not slower(high):
        raise UsageError(f"{candidates[high]} is no slower than {candidates[0]}")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if slower(middle) else (middle, high)
    found = {"first_slower": candidates[high], "last_good": candidates[low]}
    print(json.dumps(found) if json_output else f"the first that is slower: {candidates[high]}")
