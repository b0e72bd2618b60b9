"""bench export: a cell as files that run the same training outside the suite."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from harness.spec.cell import Cell


def export(
    which: Annotated[
        str,
        typer.Argument(
            metavar="CELL", help="A strategy, a pattern over labels or names, or the id of a cell."
        ),
    ],
    to: Annotated[str, typer.Option("--to", help="torchrun, slurm, accelerate or deepspeed.")],
    matrix: Annotated[
        str, typer.Option("--matrix", "-m", help="The matrix whose cells are meant.")
    ] = "full",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="axis=value for all its cells; may be repeated."),
    ] = None,
    results: Annotated[
        Path,
        typer.Option("--results", help="Folder of results, whose cells are found by their ids."),
    ] = Path("results"),
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
    from harness.export import export_files, known_target, write_files

    target = known_target(to)
    cells = find(which, matrix, settings or [], results)
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
        told = {
            "cell_id": cell.id,
            "cell_name": cell.name,
            "to": to,
            "folder": folder and str(folder),
            "note": note or None,
        }
        print(
            json.dumps(told | {"others": [c.id for c in cells if c.id != cell.id], "files": files})
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


def find(which: str, matrix: str, settings: list[str], results: Path) -> list[Cell]:
    """The matrix's cells that are meant, also those that cannot run on this host; else the cell of
    this id among the results."""
    from bench.host import Host
    from bench.matrix import expand, matches, parse_changes, read_matrix
    from harness.record.plan import kept_plan
    from harness.record.store import Store
    from harness.spec.errors import UsageError

    expanded = expand(
        read_matrix(matrix), Host.here(), name=matrix, changes=parse_changes(settings)
    )
    cells = [*expanded.cells, *(left.cell for left in expanded.left_out)]
    if found := [cell for cell in cells if matches(cell, which)]:
        return found
    if re.fullmatch(r"[0-9a-f]{12}", which):
        store = Store(results)
        for run_id in reversed(store.run_ids()):
            plan = kept_plan(store, run_id)
            if found := [
                cell
                for cell in (*plan.cells, *(left.cell for left in plan.left_out))
                if cell.id == which
            ]:
                return found
    names = ", ".join(sorted({cell.strategy for cell in cells}))
    known = f"matrix {matrix!r} has {names}"
    raise UsageError(
        f"{which!r} is no strategy, label, name or id of a cell of the matrix, nor an id in"
        f" {str(results)!r}; {known}"
    )


def plainest(cells: list[Cell]) -> Cell:
    """Of several: without options before with, in fp32 before other precisions, on more devices
    before one; then the matrix's order."""
    return min(
        cells,
        key=lambda cell: (cell.label != cell.strategy, cell.precision != "fp32", cell.devices == 1),
    )


def slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-")
