from __future__ import annotations

import json
from typing import Annotated, Literal

import typer

from bench.cli.options import Json


def listing(
    what: Annotated[
        Literal["strategies", "workloads", "matrices", "models"],
        typer.Argument(
            help="What to list; models are those of fits and plan, workloads those that train."
        ),
    ],
    json_output: Json = False,
) -> None:
    """List strategies with their options, workloads, matrices, or models to plan for.

    Example: [bold]python -m bench list strategies[/bold]
    """
    entries = {
        "strategies": _strategies,
        "workloads": _workloads,
        "matrices": _matrices,
        "models": _models,
    }[what]()
    if json_output:
        print(json.dumps(entries, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(show_lines=what == "strategies", title=None)
    for column in entries[0]:
        table.add_column(column, overflow="fold")
    for entry in entries:
        table.add_row(*(_text(value) for value in entry.values()))
    Console().print(table)


def _text(value: object) -> str:
    from rich.markup import escape

    if isinstance(value, dict):
        return escape("\n".join(f"{name}: {meaning}" for name, meaning in value.items()))
    if isinstance(value, list):
        return escape(", ".join(value))
    if value is None:
        return "-"
    return escape(f"{value:,}" if isinstance(value, int) else str(value))


def _strategies() -> list[dict[str, object]]:
    from harness.seam.registry import strategies

    entries: list[dict[str, object]] = []
    for name, cls in strategies().items():
        options = {}
        for option, field in cls.model_fields.items():
            default = "required" if field.is_required() else json.dumps(field.default)
            options[option] = f"{default}. {field.description or ''}".strip()
        description = (cls.__doc__ or "-").strip().splitlines()[0]
        entries.append(
            {
                "name": name,
                "description": description,
                "options": options,
                "requires": list(cls.requires),
            }
        )
    return entries


def _workloads() -> list[dict[str, object]]:
    """Returns workloads, forms such as `hf:PATH_OR_ID`, and suffixes such as `+lora`.

    Parameters are None without torch, which counts them.
    """
    from harness.host.packages import TRAINING, missing
    from harness.workloads import make_workload, workload_names
    from harness.workloads.counts import model_facts
    from harness.workloads.workload import AUTO
    from harness.workloads.workload_variants import SUFFIXES

    made = [make_workload(name) for name in workload_names()]
    counted = not missing(TRAINING)
    rows: list[tuple[object, ...]] = [
        (w.name, w.kind, model_facts(w).parameters if counted else None, w.vocabulary, w.blocks)
        for w in made
    ]
    rows.append(("hf:PATH_OR_ID", ", ".join(AUTO), None, None, None))
    rows += [(f"...+{suffix}", meaning, None, None, None) for suffix, meaning in SUFFIXES.items()]
    columns = ("name", "kind", "parameters", "vocabulary", "blocks")
    return [{name: value or None for name, value in zip(columns, row, strict=True)} for row in rows]


def _models() -> list[dict[str, object]]:
    from harness.planner.cluster.hf_config import named_shapes

    return [{"name": name, "parameters": s.parameters} for name, s in named_shapes().items()]


def _matrices() -> list[dict[str, object]]:
    from bench.matrix import HOME, matrix_names, read_matrix

    matrices = [(name, read_matrix(name)) for name in matrix_names()]
    return [
        {
            "name": name,
            "description": matrix.description,
            "trials": matrix.trials,
            "file": str(HOME / f"{name}.yaml"),
        }
        for name, matrix in matrices
    ]


def schema(
    of: Annotated[Literal["matrix", "site"], typer.Argument(help="Kind of file.")] = "matrix",
) -> None:
    """Print the JSON schema of a matrix file, or of a site file for `bench submit`.

    Editors complete and check files with it. The suite's own matrices name it.

    Example: [bold]python -m bench schema > matrix.schema.json[/bold]
    """
    from bench.cluster.site import Site
    from bench.matrix import Matrix

    written = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    model = Site if of == "site" else Matrix
    print(json.dumps(written | model.model_json_schema(), indent=2))
