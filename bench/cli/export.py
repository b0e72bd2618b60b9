"""bench export: a cell as files that run the same training outside the suite."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated

import typer

from bench.cli.options import MatrixOfCell, ResultsWithCell


def export(
    which: Annotated[
        str,
        typer.Argument(
            metavar="CELL", help="A strategy, a pattern over labels or names, or the id of a cell."
        ),
    ],
    to: Annotated[
        str, typer.Option("--to", help="What runs it: torchrun, slurm, accelerate or deepspeed.")
    ],
    matrix: MatrixOfCell = "full",
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="axis=value for the matrix's cells, such as devices=4; may be repeated."
        ),
    ] = None,
    results: ResultsWithCell = Path("results"),
    out: Annotated[
        Path | None,
        typer.Option("--out", help="New folder to write to; by default one in exports/."),
    ] = None,
    json_output: Annotated[
        bool,
        typer.Option(
            "--json", help="For machines: all files in one object; written only with --out."
        ),
    ] = False,
) -> None:
    """Writes a script, config files and a command line that run a cell's strategy without the
    suite.

    Example: [bold]python -m bench export fsdp2 --to slurm --set devices=4[/bold]
    """
    from bench.expand import cells_of
    from bench.select import find_cells, plainest
    from harness.export import export_files, known_target, write_files
    from harness.record.store import Store

    target = known_target(to)
    cells = find_cells(cells_of(matrix, settings or []), which, matrix, Store(results))
    cell = plainest(cells)
    files, note = export_files(cell, to)
    folder = out or (
        None
        if json_output
        else Path("exports") / slug(f"{cell.label} {cell.workload} x{cell.devices} {to}")
    )
    if folder:
        write_files(files, folder)
    if json_output:
        shown = {
            "cell_id": cell.id,
            "cell_name": cell.name,
            "to": to,
            "folder": folder and str(folder),
            "note": note or None,
        }
        print(
            json.dumps(shown | {"others": [c.id for c in cells if c.id != cell.id], "files": files})
        )
        return
    print(f"{cell.name} for {target}")
    if len(cells) > 1:
        print(
            f"  the plainest of {len(cells)} cells that {which!r} means; name another by its label,"
            " name or id"
        )
    if note:
        print(f"  not runnable here: {note}")
    for name in files:
        print(f"  {folder}/{name}")
    print(f"run it with: bash {folder}/run.sh")


def slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-")
