from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from bench.cli.options import Cell, Json, Matrix, OutFolder, Results, Settings

Target: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--to",
        help="Launcher to export for: torchrun, slurm, spawn, accelerate, deepspeed, mpirun or"
        " horovodrun. [default: the one nearest to the cell's own]",
    ),
]


def export(
    which: Cell,
    to: Target = None,
    matrix: Matrix = "full",
    settings: Settings = None,
    results: Results = Path("results"),
    out: OutFolder = None,
    json_output: Json = False,
) -> None:
    """Write a cell as scripts that run without the suite.

    Writes a script, config files and a command line. CELL may be in the matrix or the results
    folder. With --json, files are written only if --out is given.

    Example: [bold]python -m bench export fsdp2 --to slurm --set devices=4[/bold]
    """
    from bench.expand import cells_of
    from bench.select import find_cells, of_several, plainest
    from harness.export import export_files, first_target, known_target, write_files
    from harness.record.store import Store

    if to:
        known_target(to)
    cells = find_cells(
        cells_of(matrix, settings or []), which, matrix, Store(results), settings or []
    )
    cell = plainest(cells)
    to = to or first_target(cell)
    files, note = export_files(cell, to)
    folder = out
    if folder is None and not json_output:
        folder = Path("exports") / slug(f"{cell.label} {cell.workload_name} x{cell.devices} {to}")
    if folder:
        write_files(files, folder)
    if json_output:
        document = {
            "cell_id": cell.id,
            "cell_name": cell.name,
            "to": to,
            "folder": folder and str(folder),
            "note": note or None,
            "others": [other.id for other in cells if other.id != cell.id],
            "files": files,
        }
        print(json.dumps(document))
        return
    print(f"{cell.name} for {known_target(to)}")
    if several := of_several(which, len(cells)):
        print(f"  exported {several}")
    if note:
        print(f"  not runnable here: {note}")
    for name in files:
        print(f"  {folder}/{name}")
    print(f"run it with: bash {folder}/run.sh")


def slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-")
