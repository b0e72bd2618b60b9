from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bench.cli.options import DryRun, Json, Results

if TYPE_CHECKING:
    from bench.published import Figures, PublishedRow, PublishedRows
    from harness.analysis.cell_result import CellResult


def reproduce(
    row: Annotated[
        str, typer.Argument(metavar="ROW", help="Name of a published row; see --list.")
    ] = "",
    list_rows: Annotated[bool, typer.Option("--list", help="List the rows.")] = False,
    dry_run: DryRun = False,
    trials: Annotated[
        int | None, typer.Option("--trials", min=1, help="Number of trials; by default 10.")
    ] = None,
    results: Results = Path("results"),
    json_output: Json = False,
) -> None:
    """Run the setting of a published result, and show both.

    With --dry-run, shows the cell, what differs from the source, and the prediction.

    Example: [bold]python -m bench reproduce torchtitan-8b-fsdp --dry-run[/bold]
    """
    from bench.published import (
        differences,
        measured_figures,
        predicted_figures,
        published_figures,
        published_rows,
    )
    from harness.cell.errors import UsageError
    from harness.host.packages import TRAINING, require

    rows = published_rows()
    if list_rows:
        _show_rows(rows, json_output)
        return
    if not row:
        raise UsageError("name a published row; --list shows them")
    chosen = rows.row(row)
    require(TRAINING)
    differs = differences(rows.sources[chosen.source], chosen)
    figures = {"published": published_figures(chosen), "predicted": predicted_figures(chosen)}
    cell = None if dry_run else _measured(chosen, trials, results)
    parity = None if cell is None else cell.parity.verdict or f"unknown: {cell.reason}"
    if cell is not None:
        figures["measured"] = measured_figures(chosen, cell)
    if json_output:
        document = {
            "row": chosen.model_dump(),
            "source": rows.sources[chosen.source].model_dump(),
            "cell": chosen.cell.model_dump(mode="json"),
            "differences": differs,
            "figures": {
                name: values and dataclasses.asdict(values) for name, values in figures.items()
            },
            "parity": parity,
        }
        print(json.dumps(document))
    else:
        _show(rows, chosen, differs, figures)
        if parity:
            print(f"parity of the measured cell: {parity}")
    if cell is not None and not cell.ranked:
        raise typer.Exit(1)


def _measured(row: PublishedRow, trials: int | None, results: Path) -> CellResult:
    """Runs the row's cell. Raises UsageError without the GPUs."""
    from bench import api
    from bench.published import require_hardware
    from harness.host.gpu_inventory import visible_gpus
    from reports.run_report import ran

    require_hardware(row, [gpu.name for gpu in visible_gpus()])
    (cell,) = ran(api.run(cells=[row.cell], trials=trials, results=results)).cells
    return cell


def _show_rows(rows: PublishedRows, json_output: bool) -> None:
    from rich.markup import escape

    from bench.cli import terminal
    from bench.published import published_figures

    if json_output:
        print(json.dumps([row.model_dump() for row in rows.rows]))
        return
    table = terminal.table("published rows", "row", "GPUs", "strategy", "tokens/s/GPU", "memory")
    for row in rows.rows:
        figures = published_figures(row)
        table.add_row(
            escape(row.name),
            f"{row.devices} x {row.gpus[0]}",
            escape(f"{row.strategy}{row.variant}"),
            _rate(figures),
            _memory(figures),
        )
    terminal.console().print(table)
    for source in rows.sources.values():
        print(f"{source.title}: {source.url}")


def _show(
    rows: PublishedRows,
    row: PublishedRow,
    differs: list[str],
    figures: dict[str, Figures | None],
) -> None:
    from rich.markup import escape

    from bench.cli import terminal

    console = terminal.console()
    source = rows.sources[row.source]
    console.print(escape(f"source: {source.title}\n{source.url}"), soft_wrap=True)
    console.print(escape(f"cell: {row.cell.name}, {row.devices} x {row.gpus[0]}"), soft_wrap=True)
    table = terminal.table("", "figures", "tokens/s/GPU", "memory")
    for name, values in figures.items():
        if values is not None:
            table.add_row(name, _rate(values), _memory(values))
    console.print(table)
    if figures["predicted"] is None:
        print(f"no prediction: the planner predicts no time for {row.variant}")
    print("what differs:")
    for sentence in differs:
        console.print(escape(f"- {sentence}"), soft_wrap=True)


def _rate(figures: Figures) -> str:
    from reports.text import DASH

    if figures.tokens_per_second is None:
        return DASH
    text = f"{figures.tokens_per_second:,.0f}"
    if figures.low is None or figures.high is None:
        return text
    return f"{text} ({figures.low:,.0f} to {figures.high:,.0f})"


def _memory(figures: Figures) -> str:
    from reports.text import size

    return size(figures.memory_bytes)
