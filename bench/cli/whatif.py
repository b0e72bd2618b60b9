from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import typer

from bench.cli.options import Devices, Html, Json, LocalResults, NodeLink
from harness.spec.text import plural

if TYPE_CHECKING:
    from rich.table import Table

    from harness.planner.local.local_plan import ScalingCurve
    from harness.planner.local.measurements import LocalCell
    from harness.planner.local.plan_request import ScalingRequest
    from harness.spec.link import Link

Patterns: TypeAlias = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CELL]...",
        help="Strategies, or patterns that match labels or names of measured cells; by default the"
        " fastest ones.",
    ),
]
Regime: TypeAlias = Annotated[
    Literal["weak", "strong"],
    typer.Option(
        "--regime", help="weak: the batch grows with the devices; strong: it stays the same."
    ),
]


def whatif(
    patterns: Patterns = None,
    results: LocalResults = None,
    devices: Devices = 4096,
    regime: Regime = "weak",
    link: NodeLink = "",
    html: Html = None,
    json_output: Json = False,
) -> None:
    """Extrapolate cells measured on this machine to thousands of devices.

    Predicts powers of two up to --devices. With --link, every device is a node of its own.

    Example: [bold]python -m bench whatif ddp fsdp2 --devices 1024 --link 10gbit[/bold]
    """
    from bench.cli import terminal
    from harness.planner.local.measurements import read_measurements
    from harness.planner.local.plan_request import (
        ScalingRequest,
        calibrated,
        fastest_cells,
        scalable_cells,
        scaled,
    )
    from harness.spec.errors import UsageError

    if devices < 2:
        raise UsageError(f"--devices {devices}: give at least 2")
    measured = read_measurements(tuple(results or (Path("results"),)))
    request = ScalingRequest(devices, regime == "weak", _link(link))
    cells = scalable_cells(measured)
    chosen = _named(cells, patterns) if patterns else fastest_cells(cells)
    calibration = calibrated(measured)
    curves = [scaled(cell, measured, calibration, request) for cell in chosen]
    named = _named_curves(chosen, curves)
    title = _title(chosen, request, link)
    if html:
        from reports import write_whole
        from reports.prediction_page import scaling_page

        write_whole(scaling_page(title, named, measured.machine), html, "--html")
    if json_output:
        described = [
            {"name": cell.cell.name, "cell_id": cell.cell.id} | dataclasses.asdict(curve)
            for cell, curve in zip(chosen, curves, strict=True)
        ]
        print(json.dumps({"title": title, "machine": measured.machine, "curves": described}))
        return
    console = terminal.console()
    for curve in named:
        console.print(_table(curve.label, curve))
        if curve.end:
            console.print(f"  ends there: {curve.end}")
    console.print(f"{title}. Rates are predictions with 80 % intervals unless marked as measured.")
    console.print(f"measured on: {measured.machine}")
    if html:
        console.print(f"page: {html}")


def _named(cells: Sequence[LocalCell], patterns: Sequence[str]) -> list[LocalCell]:
    from bench.select import matches
    from harness.spec.errors import UsageError

    for pattern in patterns:
        if not any(matches(cell.cell, pattern) for cell in cells):
            labels = ", ".join(dict.fromkeys(cell.cell.label for cell in cells))
            raise UsageError(
                f"{pattern!r} matches no cell measured on several devices with a core each; these"
                f" were measured: {labels}"
            )
    return [cell for cell in cells if any(matches(cell.cell, pattern) for pattern in patterns)]


def _named_curves(
    chosen: Sequence[LocalCell], curves: Sequence[ScalingCurve]
) -> list[ScalingCurve]:
    """Returns curves, with full names if settings differ."""
    from harness.analysis.setting import Setting

    if len({Setting.of(cell.cell) for cell in chosen}) == 1:
        return list(curves)
    return [
        dataclasses.replace(curve, label=cell.cell.name)
        for cell, curve in zip(chosen, curves, strict=True)
    ]


def _link(text: str) -> Link | None:
    from harness.spec.errors import UsageError
    from harness.spec.link import Link

    if not text:
        return None
    try:
        return Link.of(text)
    except ValueError as error:
        raise UsageError(f"--link {text!r}: {error}") from None


def _title(chosen: Sequence[LocalCell], request: ScalingRequest, link: str) -> str:
    from harness.spec.link import UNSHAPED

    kind = "weak" if request.weak else "strong"
    behind = "an unlimited link" if link == UNSHAPED else link
    where = f"nodes of one device behind {behind}" if link else "one machine with a core per device"
    workloads = {cell.cell.workload_name for cell in chosen}
    what = f"{workloads.pop()}, {kind}" if len(workloads) == 1 else kind.capitalize()
    return f"{what} scaling on {where}"


def _table(title: str, curve: ScalingCurve) -> Table:
    from rich.markup import escape

    from bench.cli import terminal

    columns = ("devices", "samples/s", "of ideal", "measured here", "")
    table = terminal.table(escape(title), *columns)
    for point in curve.points:
        first = curve.points[0]
        ideal = first.predicted * point.devices / first.devices
        beyond = point.doublings_beyond
        table.add_row(
            str(point.devices),
            f"{point.predicted:,.1f} ({point.low:,.0f} to {point.high:,.0f})",
            f"{point.predicted / ideal:.0%}",
            "" if point.measured is None else f"{point.measured:,.1f}",
            f"{plural(round(beyond), 'doubling')} beyond measurements" if beyond else "",
        )
    return table
