"""bench list: strategies, workloads, matrices."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import typer


def listing(
    what: Annotated[
        Literal["strategies", "workloads", "matrices"], typer.Argument(help="What to list.")
    ],
    json_output: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Lists strategies with their options, workloads, or matrices.

    Example: [bold]python -m bench list strategies[/bold]
    """
    rows = {"strategies": _strategies, "workloads": _workloads, "matrices": _matrices}[what]()
    if json_output:
        print(json.dumps(rows, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(show_lines=what == "strategies", title=None)
    for column in rows[0]:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(_text(value) for value in row.values()))
    Console().print(table)


def _text(value: Any) -> str:
    from rich.markup import escape

    if isinstance(value, dict):
        return escape("\n".join(f"{name}: {said}" for name, said in value.items()))
    return escape(
        ", ".join(value)
        if isinstance(value, list)
        else f"{value:,}"
        if isinstance(value, int)
        else str(value)
    )


def _strategies() -> list[dict[str, Any]]:
    from harness.strategy.registry import strategies

    rows: list[dict[str, Any]] = []
    for name, cls in strategies().items():
        options = {}
        for option, field in cls.model_fields.items():
            options[option] = f"{json.dumps(field.default)}. {field.description or ''}".strip()
        said = (cls.__doc__ or "").strip().splitlines()[0]
        rows.append(
            {"name": name, "description": said, "options": options, "requires": list(cls.requires)}
        )
    return rows


def _workloads() -> list[dict[str, Any]]:
    from harness.workloads import make_workload, workload_names
    from harness.workloads.suffixes import SUFFIXES

    rows: list[dict[str, Any]] = []
    for name in workload_names():
        workload = make_workload(name)
        rows.append(
            {
                "name": name,
                "kind": workload.kind,
                "vocabulary": workload.vocabulary,
                "blocks": workload.blocks,
            }
        )
    rows.append(
        {"name": "hf:PATH_OR_ID", "kind": "causal or classification", "vocabulary": 0, "blocks": 0}
    )
    rows += [
        {"name": f"...+{suffix}", "kind": said, "vocabulary": 0, "blocks": 0}
        for suffix, said in SUFFIXES.items()
    ]
    return rows


def _matrices() -> list[dict[str, Any]]:
    from bench.matrix import HOME, matrix_names, read_matrix

    found = [(name, read_matrix(name)) for name in matrix_names()]
    return [
        {
            "name": name,
            "description": m.description,
            "trials": m.trials,
            "file": str(HOME / f"{name}.yaml"),
        }
        for name, m in found
    ]
