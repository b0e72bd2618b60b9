from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Literal

import typer

from bench.cli.options import Json


@dataclass(frozen=True)
class StrategyEntry:
    name: str
    description: str
    options: dict[str, str]
    """Defaults and meanings by name."""
    requires: list[str]
    """Packages besides torch."""


@dataclass(frozen=True)
class WorkloadEntry:
    """A workload, a suffix such as `+lora`, or a form such as `hf:PATH_OR_ID`."""

    name: str
    kind: str
    vocabulary: int = 0
    blocks: int = 0


@dataclass(frozen=True)
class MatrixEntry:
    name: str
    description: str
    trials: int
    file: str


Entry = StrategyEntry | WorkloadEntry | MatrixEntry


def listing(
    what: Annotated[
        Literal["strategies", "workloads", "matrices"], typer.Argument(help="What to list.")
    ],
    json_output: Json = False,
) -> None:
    """List strategies with their options, workloads, or matrices.

    Example: [bold]python -m bench list strategies[/bold]
    """
    entries = {"strategies": _strategies, "workloads": _workloads, "matrices": _matrices}[what]()
    if json_output:
        print(json.dumps([asdict(entry) for entry in entries], indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(show_lines=what == "strategies", title=None)
    for column in fields(entries[0]):
        table.add_column(column.name, overflow="fold")
    for entry in entries:
        table.add_row(*(_text(value) for value in vars(entry).values()))
    Console().print(table)


def _text(value: object) -> str:
    from rich.markup import escape

    if isinstance(value, dict):
        return escape("\n".join(f"{name}: {meaning}" for name, meaning in value.items()))
    if isinstance(value, list):
        return escape(", ".join(value))
    return escape(f"{value:,}" if isinstance(value, int) else str(value))


def _strategies() -> Sequence[Entry]:
    from harness.strategy.registry import strategies

    entries = []
    for name, cls in strategies().items():
        options = {}
        for option, field in cls.model_fields.items():
            default = "required" if field.is_required() else json.dumps(field.default)
            options[option] = f"{default}. {field.description or ''}".strip()
        description = (cls.__doc__ or "").strip().splitlines()[0]
        entries.append(StrategyEntry(name, description, options, list(cls.requires)))
    return entries


def _workloads() -> Sequence[Entry]:
    from harness.workloads import make_workload, workload_names
    from harness.workloads.workload import AUTO
    from harness.workloads.workload_variants import SUFFIXES

    made = [make_workload(name) for name in workload_names()]
    return [
        *(WorkloadEntry(w.name, w.kind, w.vocabulary, w.blocks) for w in made),
        WorkloadEntry("hf:PATH_OR_ID", ", ".join(AUTO)),
        *(WorkloadEntry(f"...+{suffix}", meaning) for suffix, meaning in SUFFIXES.items()),
    ]


def _matrices() -> Sequence[Entry]:
    from bench.matrix import HOME, matrix_names, read_matrix

    matrices = [(name, read_matrix(name)) for name in matrix_names()]
    return [
        MatrixEntry(name, matrix.description, matrix.trials, str(HOME / f"{name}.yaml"))
        for name, matrix in matrices
    ]
