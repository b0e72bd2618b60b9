from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Annotated

import typer

from bench.cli import options as opt
from harness.cell.errors import UsageError

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
    if not (SCRIPTS / "slower.py").is_file():
        raise UsageError("bisect needs the suite's folder scripts: run it in a checkout")
    commits = len(candidates) == 1 and ".." in candidates[0]
    if commits:
        good, _, bad = candidates[0].partition("..")
        listed = ["git", "rev-list", "--first-parent", "--reverse", f"{good}..{bad}"]
        done = subprocess.run(listed, capture_output=True, text=True)
        if done.returncode:
            raise UsageError(f"git does not know {candidates[0]!r}: {done.stderr.splitlines()[0]}")
        candidates = [good, *done.stdout.split()]
    if len(candidates) < 2:
        raise UsageError("there is nothing to search: give two candidates or more")

    options = [word for value in only or () for word in ("--only", value)]
    options += [word for value in settings or () for word in ("--set", value)]
    options += ["--matrix", matrix, "--rounds", str(rounds)]

    def slower(place: int) -> bool:
        sides = candidates[0], candidates[place]
        return _slower(sides, (work / str(place)).resolve(), commits, options)

    low, high = 0, len(candidates) - 1
    if not slower(high):
        raise UsageError(f"{candidates[high]} is no slower than {candidates[0]}")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if slower(middle) else (middle, high)
    found = {"first_slower": candidates[high], "last_good": candidates[low]}
    print(json.dumps(found) if json_output else f"the first that is slower: {candidates[high]}")


def _slower(sides: tuple[str, str], folder: Path, commits: bool, options: list[str]) -> bool:
    """Returns whether training is slower with the second side; raises UsageError without a
    comparison."""
    names = ("BEFORE_REF", "AFTER_REF") if commits else ("BEFORE", "AFTER")
    versions = os.environ | dict(zip(names, sides, strict=True))
    if subprocess.run([SCRIPTS / "two_sides.sh", folder], env=versions).returncode:
        raise UsageError(f"{sides[0]} or {sides[1]} could not be installed; see above")
    options = [*options, "--results", str(folder / "results")]
    for side in ("before", "after"):
        options += [f"--{side}", str(folder / side / "bin" / "python")]
        options += [f"--{side}-folder", str(folder / f"{side}-project")]
    command = [str(folder / "after/bin/python"), str(SCRIPTS / "slower.py"), *options]
    code = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(SCRIPTS.parent)}).returncode
    if code not in (0, 1):
        raise UsageError(f"{sides[1]} could not be compared; see above")
    typer.echo(f"{sides[1]}: {'slower' if code else 'no slower'}", err=True)
    return bool(code)
