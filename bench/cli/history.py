"""bench history: a cell's figure over many runs, and where it changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from bench.cli.options import ResultsRead

if TYPE_CHECKING:
    from rich.console import Console

    from harness.analysis.history import Series
    from harness.analysis.selection import MeasuredCell

WIDTH = 28
_BLOCKS = "▁▂▃▄▅▆▇█"


def history(
    cell: Annotated[
        str | None,
        typer.Argument(
            metavar="[CELL]",
            help="A strategy, a pattern over labels or names, or the id of a cell.",
        ),
    ] = None,
    figure: Annotated[
        Literal["throughput", "memory"], typer.Option("--figure", help="Which figure is followed.")
    ] = "throughput",
    results: ResultsRead = Path("results"),
    json_output: Annotated[
        bool,
        typer.Option("--json", help="For machines: one JSON object with every run of each cell."),
    ] = False,
) -> None:
    """Shows a cell's figure over all runs on equal hardware and where it changed. Without CELL, or
    if it matches several, prints one line per cell.

    Example: [bold]python -m bench history 'ddp llama-mini x2*'[/bold]
    """
    from bench.cli import terminal
    from harness.analysis.change_points import MIN_RUNS
    from harness.analysis.history import histories, method

    all_series = histories(_measured(results, cell), figure)
    if json_output:
        print(
            json.dumps(
                {
                    "figure": figure,
                    "method": method(figure),
                    "cells": [series.as_json() for series in all_series],
                }
            )
        )
        return
    out = terminal.console()
    if cell is not None and len(all_series) == 1:
        _runs(out, all_series[0])
    else:
        _cells(out, all_series)
    if not all_series:
        out.print(f"no verified trial has a figure of {figure}")
    elif max(len(series.points) for series in all_series) < 2 * MIN_RUNS:
        out.print(f"a change can be seen from {2 * MIN_RUNS} runs of a cell on")
    for name, explanation in method(figure).items():
        out.print(f"{name}: {explanation}")


def _measured(results: Path, pattern: str | None) -> list[MeasuredCell]:
    from bench.select import matching, no_such_cell
    from harness.analysis.selection import measured
    from harness.record.store import Store

    known = measured(Store(results).load(steps=False))
    if pattern is None:
        return known
    meant = matching(known, pattern)
    if not meant:
        raise no_such_cell(pattern, repr(str(results)), known)
    return meant


def _text(series: Series, value: float) -> str:
    return f"{value:.1f} samples/s" if series.figure == "throughput" else f"{value / 2**20:.1f} MiB"


def _mark(series: Series, change: float) -> str:
    words = ("more", "less") if series.figure == "memory" else ("faster", "slower")
    return f"{'▲' if change > 0 else '▼'} {abs(change) * 100:.1f} % {words[change < 0]}"


def _runs(out: Console, series: Series) -> None:
    """Prints one line per run; the bar spans the smallest to the largest value."""
    from rich.markup import escape
    from rich.table import Table

    values = [point.value.value for point in series.points]
    low, high = min(values), max(values)
    out.print(
        f"{escape(series.cell_name)}: {series.figure} from {_text(series, low)} to"
        f" {_text(series, high)}"
    )
    table = Table()
    for column, justify in (
        ("date", "left"),
        ("run", "left"),
        (series.figure, "right"),
        ("95 %", "right"),
        ("trials", "right"),
    ):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    table.add_column("smallest to largest", no_wrap=True)
    table.add_column("change from here on")
    for point in series.points:
        half = point.value.half_width
        place = round((WIDTH - 1) * (point.value.value - low) / (high - low)) if high > low else 0
        table.add_row(
            f"{point.started_at:%Y-%m-%d %H:%M}",
            point.run_id,
            _text(series, point.value.value),
            "1 trial" if half is None else f"± {_text(series, half).split()[0]}",
            str(point.value.trials),
            "·" * place + "█",
            "" if point.change is None else _mark(series, point.change),
        )
    out.print(table)
    if series.elsewhere:
        out.print(f"left out: {series.elsewhere} runs on other hardware")
    if series.failed:
        out.print(f"left out: {series.failed} runs in which it failed or was not verified")


def _cells(out: Console, all_series: list[Series]) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table()
    for column, justify in (
        ("cell", "left"),
        ("runs", "right"),
        ("newest", "right"),
        ("over the runs", "left"),
        ("last change", "left"),
    ):
        table.add_column(column, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for series in all_series:
        last = series.last_change
        since = ""
        if last is not None and last.change is not None:
            since = f"{_mark(series, last.change)} since {last.started_at:%Y-%m-%d} {last.run_id}"
        values = [point.value.value for point in series.points]
        table.add_row(
            escape(series.cell_name),
            str(len(values)),
            _text(series, values[-1]),
            sparkline(values[-WIDTH:]),
            since,
        )
    if all_series:
        out.print(table)


def sparkline(values: list[float]) -> str:
    """Returns one block character per value, scaled to their range."""
    low, high = min(values), max(values)
    return "".join(
        (
            _BLOCKS[round((len(_BLOCKS) - 1) * (value - low) / (high - low))]
            if high > low
            else _BLOCKS[3]
        )
        for value in values
    )
