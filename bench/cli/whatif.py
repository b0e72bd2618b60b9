"""bench whatif: what measured cells would reach on more devices than there are here."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from bench.cli.options import JsonObject

if TYPE_CHECKING:
    from rich.table import Table

    from harness.planner.local.growth import Growth
    from harness.planner.local.scaling_curves import Curve
    from harness.spec.link import Link


def whatif(
    patterns: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CELL]...",
            help="Strategies, or patterns over labels or names of measured cells; by default the"
            " fastest.",
        ),
    ] = None,
    results: Annotated[
        list[Path] | None,
        typer.Option(
            "--results", help="Folder of results measured on this machine; may be repeated."
        ),
    ] = None,
    devices: Annotated[
        int, typer.Option("--devices", min=2, help="The most devices, a power of two.")
    ] = 4096,
    regime: Annotated[
        Literal["weak", "strong"],
        typer.Option(
            "--regime", help="weak: the batch grows with the devices; strong: it does not."
        ),
    ] = "weak",
    link: Annotated[
        str,
        typer.Option(
            "--link",
            help="Each device is a node of its own behind such a link, as 10gbit or 1gbit 1ms; by"
            " default all are on one machine with a core for each.",
        ),
    ] = "",
    html: Annotated[
        Path | None, typer.Option("--html", help="File for a page with the curves.")
    ] = None,
    json_output: JsonObject = False,
) -> None:
    """Carries measured cells on to thousands of devices: predictions, beside what was measured.

    Example: [bold]python -m bench whatif ddp fsdp2 --devices 1024 --link 10gbit[/bold]
    """
    from bench.cli import terminal
    from harness.planner.local.growth import Growth, cells_to_grow, grown
    from harness.planner.local.local_calibration import calibrate_cells, leave_out, with_spreads
    from harness.planner.local.measurements import read_here

    here = read_here(tuple(results or (Path("results"),)))
    growth = Growth(devices, regime == "weak", _link(link))
    chosen = cells_to_grow(here, patterns or [])
    measured = [cell.measured for cell in here.cells]
    calibration = with_spreads(calibrate_cells(measured), leave_out(measured))
    curves = [grown(cell, here, calibration, growth) for cell in chosen]
    title = _title(chosen[0].cell.workload, growth, link)
    if html:
        from reports import write_whole
        from reports.prediction_page import scaling_page

        write_whole(scaling_page(title, curves, here.machine), html, "--html")
    if json_output:
        document = {"title": title, "machine": here.machine}
        print(json.dumps(document | {"curves": [dataclasses.asdict(curve) for curve in curves]}))
        return
    console = terminal.console()
    for cell, curve in zip(chosen, curves, strict=True):
        console.print(_table(f"{curve.label}, {cell.cell.workload}", curve))
        if curve.end:
            console.print(f"  ends there: {curve.end}")
    console.print(f"{title}. Rates are predictions with 80 % intervals unless marked as measured.")
    console.print(f"measured on: {here.machine}")
    if html:
        console.print(f"page: {html}")


def _link(text: str) -> Link | None:
    from harness.spec.errors import UsageError
    from harness.spec.link import Link

    if not text:
        return None
    try:
        return Link.of(text)
    except ValueError as error:
        raise UsageError(f"--link {text!r}: {error}") from None


def _title(workload: str, growth: Growth, link: str) -> str:
    kind = "weak" if growth.weak else "strong"
    where = f"nodes of one device behind {link}" if link else "one machine with a core for each"
    return f"{workload}, {kind} scaling on {where}"


def _table(title: str, curve: Curve) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(title), title_justify="left")
    for column in ("devices", "samples/s", "of ideal", "measured here", ""):
        table.add_column(column, justify="right")
    first = curve.points[0]
    for point in curve.points:
        ideal = first.predicted * point.devices / first.devices
        beyond = point.doublings_beyond
        table.add_row(
            str(point.devices),
            f"{point.predicted:,.1f} ({point.low:,.0f} to {point.high:,.0f})",
            f"{point.predicted / ideal:.0%}",
            "" if point.measured is None else f"{point.measured:,.1f}",
            f"outside of what was measured by {beyond:.0f} doublings" if beyond else "",
        )
    return table
