"""Options shared by several commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ResultsRead = Annotated[Path, typer.Option("--results", help="Folder that the runs are in.")]
ResultsAddedTo = Annotated[
    Path, typer.Option("--results", help="Folder that results are added to.")
]
ResultsWithCell = Annotated[
    Path,
    typer.Option(
        "--results", help="Folder of results; CELL may be the id or name of a cell in it."
    ),
]
MatrixOfCell = Annotated[
    str, typer.Option("--matrix", "-m", help="Matrix that CELL is looked for in.")
]
BaselineCell = Annotated[
    str,
    typer.Option(
        "--baseline-cell",
        help=(
            "Cells are compared with this one of their setting: strategy, id or pattern; by default"
            " ddp, else single."
        ),
    ),
]
JsonObject = Annotated[bool, typer.Option("--json", help="For machines: one JSON object.")]
JsonAtEnd = Annotated[
    bool, typer.Option("--json", help="For machines: one JSON object at the end.")
]

MeasuredHere = Annotated[
    list[Path] | None,
    typer.Option(
        "--results",
        help="With --here: folder of results that were measured on it; may be repeated.",
    ),
]
"""Results folders of this machine; none: `results`."""
