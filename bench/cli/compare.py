"""bench compare: differences between two runs, or between two cells of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from bench.cli.options import ResultsRead

if TYPE_CHECKING:
    from harness.analysis.run_comparison import RunComparison


def compare(
    sides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[A] [B]",
            help=(
                "Runs (id, its first letters, latest, latest~1) or results folders, of which each"
                " cell's newest run counts."
            ),
        ),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option("--baseline", help="A: a run, a folder, or NAME of results/reference/NAME."),
    ] = None,
    cells: Annotated[
        tuple[str, str] | None,
        typer.Option(
            "--cells",
            help="Two cells of one run, as labels or patterns: compares them round by round.",
        ),
    ] = None,
    results: ResultsRead = Path("results"),
    fail_on: Annotated[
        Literal["regression"] | None,
        typer.Option(
            "--fail-on",
            help="Exit code 1 where a cell is slower, missing, newly failing or needs more memory.",
        ),
    ] = None,
    format_name: Annotated[
        Literal["table", "md", "json", "html"] | None,
        typer.Option("--format", help="By default as --out ends, else table."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="File to write instead of the terminal.")
    ] = None,
    json_output: Annotated[
        bool, typer.Option("--json", help="For machines: the same as --format json.")
    ] = False,
) -> None:
    """Compares B with A, cell by cell, on equal hardware; or with --cells two cells of one run.

    Example: [bold]python -m bench compare latest~1 latest --fail-on regression[/bold]
    """
    from bench.select import find_sides
    from harness.analysis.compare import compare_sides
    from harness.spec.errors import UsageError

    comparison = (
        _within(sides or [], baseline, cells, results)
        if cells
        else compare_sides(*find_sides(sides or [], baseline, results))
    )
    chosen = "json" if json_output else format_name or _by_suffix(out)
    if chosen == "table":
        _table(comparison, out)
    else:
        _give(_text(comparison, chosen), out)
    if out is not None and not json_output:
        print(out)
    if fail_on and not comparison.comparisons and not comparison.regressions:
        raise UsageError(
            "--fail-on regression: no cell could be compared, so nothing is guarded; the table"
            " says why"
        )
    if fail_on and comparison.regressions:
        raise typer.Exit(1)


def _within(
    sides: list[str], baseline: str | None, patterns: tuple[str, str], results: Path
) -> RunComparison:
    """Compares cells that differ only in what the two patterns name."""
    from bench.select import closest, find_run, no_such_cell
    from harness.analysis.compare import compare_cells
    from harness.analysis.selection import measured
    from harness.analysis.setting import Setting
    from harness.record.store import Store
    from harness.spec.errors import UsageError

    if baseline is not None or len(sides) > 1:
        raise UsageError("--cells compares cells of one run: give one run, and no --baseline")
    store = Store(results)
    run_id = find_run(store, *(sides or ["latest"]))
    known = measured(store.load([run_id], steps=False))
    for pattern in patterns:
        if not closest(known, pattern):
            raise no_such_cell(pattern, f"run {run_id}", known)
    first, second = (closest(known, pattern) for pattern in patterns)
    pairs = [
        (a, b)
        for a in first
        for b in second
        if a.cell_id != b.cell_id and Setting.of(a.cell) == Setting.of(b.cell)
    ]
    if not pairs:
        alike = "in one setting (workload, devices, precision, batch)"
        raise UsageError(
            f"--cells: no cell of {patterns[0]!r} and none of {patterns[1]!r} are {alike}"
        )
    return compare_cells(run_id, pairs, patterns)


def _by_suffix(out: Path | None) -> str:
    return {".md": "md", ".json": "json", ".html": "html"}.get(out.suffix if out else "", "table")


def _text(comparison: RunComparison, chosen: str) -> str:
    from reports.comparison import markdown, page

    if chosen == "json":
        return json.dumps(comparison.as_json()) + "\n"
    return markdown(comparison) if chosen == "md" else page(comparison)


def _give(text: str, out: Path | None) -> None:
    from reports import write_whole

    if out is None:
        print(text, end="")
    else:
        write_whole(text, out, "python -m bench compare A B --out FILE")


def _table(comparison: RunComparison, out: Path | None) -> None:
    """Prints the comparison, its decision rule, and what could not be compared."""
    import io

    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from bench.cli import terminal
    from reports.comparison import COLUMNS, disturbed, words

    console = (
        terminal.console()
        if out is None
        else Console(file=io.StringIO(), width=160, highlight=False, soft_wrap=True)
    )
    console.print(f"A: {escape(comparison.first)}\nB: {escape(comparison.second)}")
    if comparison.differences:
        console.print(
            f"[yellow]not the same software[/yellow]: {escape(', '.join(comparison.differences))}"
        )
    table = Table()
    for column in COLUMNS:
        table.add_column(
            column, justify="left" if column in ("cell", "verdict") else "right", overflow="fold"
        )
    for line in comparison.lines:
        if line.throughput:
            table.add_row(
                *(escape(word) for word in words(line)), style=_colour(line.regression, line.kind)
            )
    if table.row_count:
        console.print(table)
    for line in comparison.lines:
        if not line.throughput:
            colour = _colour(line.regression, line.kind) or "default"
            console.print(
                f"[{colour}]{line.kind}[/{colour}] {escape(line.cell_name)}: {escape(line.reason)}"
            )
    for name, explanation in disturbed(comparison):
        console.print(f"[yellow]disturbed[/yellow] {escape(name)}: {escape(explanation)}")
    for name, explanation in comparison.method.items():
        console.print(f"{name}: {escape(explanation)}")
    console.print(f"[bold]{escape(comparison.headline)}[/bold]")
    if isinstance(console.file, io.StringIO):
        _give(console.file.getvalue(), out)


def _colour(regression: bool, kind: str) -> str:
    return (
        "red"
        if regression
        else "green"
        if kind in ("faster", "mended")
        else "yellow"
        if kind == "not compared"
        else ""
    )
