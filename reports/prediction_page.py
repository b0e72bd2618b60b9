"""Pages of predictions: a plan with the map of which strategy wins where, and scaling curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reports.page import fill
from reports.panels import Panel, Panels
from reports.predicted import Predicted, PredictedLine, predicted
from reports.text import number

if TYPE_CHECKING:
    from harness.planner.local.scaling_curves import Curve

NOT_MEASURED = (
    "Every line, band and figure here is a prediction unless it is marked as measured. Nothing was"
    " launched for this page."
)


@dataclass(frozen=True)
class PlanRow:
    """One row of the table of layouts; texts as they are shown."""

    name: str
    step: str
    speed: str
    memory: str
    remark: str


@dataclass(frozen=True)
class WonSquare:
    """What is best for one model on one number of devices."""

    devices: int
    winner: str
    """Empty where nothing can run."""
    speed: float
    """This and the following are 0 where nothing can run."""
    speed_low: float
    speed_high: float
    memory_bytes: float
    memory_low: float
    memory_high: float
    reason: str = ""


@dataclass(frozen=True)
class WonRow:
    """A model over numbers of devices."""

    model: str
    squares: tuple[WonSquare, ...]


@dataclass(frozen=True)
class PlanPage:
    """All that the page of a plan shows."""

    title: str
    facts: tuple[str, ...]
    sentences: tuple[str, ...]
    rows: tuple[PlanRow, ...]
    speed_unit: str
    map: tuple[WonRow, ...]


def plan_page(page: PlanPage) -> str:
    """One HTML page of a plan that loads nothing and runs nothing but its own script."""
    panels = Panels()
    charts = [
        chart
        for chart in (
            _chart(page.map, "throughput", "Throughput", page.speed_unit, panels),
            _chart(page.map, "memory", "Memory of the fullest device", "GB", panels),
        )
        if chart
    ]
    panels.pictures.draw()
    winners = list(
        dict.fromkeys(square.winner for row in page.map for square in row.squares if square.winner)
    )
    return fill(
        "prediction.html.j2",
        panels.pictures.styles,
        page=page,
        charts=charts,
        curves=(),
        winners=winners,
        note=NOT_MEASURED,
    )


def _chart(
    rows: Sequence[WonRow], name: str, title: str, unit: str, panels: Panels
) -> Panel | None:
    """Throughput or memory of the best over the devices, a line for each model."""
    lines = []
    for row in rows:
        ran = [square for square in row.squares if square.winner]
        if not ran:
            continue
        scale = 1e9 if name == "memory" else 1.0
        bounds = ("memory_bytes", "memory_low", "memory_high")
        fields = bounds if name == "memory" else ("speed", "speed_low", "speed_high")
        values, lows, highs = (
            tuple(getattr(square, field) / scale for square in ran) for field in fields
        )
        lines.append(PredictedLine(row.model, tuple(s.devices for s in ran), values, lows, highs))
    if not lines:
        return None
    words = "; ".join(
        f"{line.label} {number(line.values[0])} to {number(line.values[-1])}" for line in lines
    )
    data = Predicted(
        name,
        title,
        unit,
        tuple(lines),
        f"{title} ({unit}), predicted: {words}",
        logarithmic=name != "memory",
    )
    return panels.drawn(data, predicted)


def scaling_page(title: str, curves: Sequence[Curve], machine: str) -> str:
    """One HTML page of scaling curves that loads nothing and runs nothing but its own script."""
    lines = [
        PredictedLine(
            curve.label,
            tuple(point.devices for point in curve.points),
            tuple(point.predicted for point in curve.points),
            tuple(point.low for point in curve.points),
            tuple(point.high for point in curve.points),
            tuple((p.devices, p.measured) for p in curve.points if p.measured is not None),
        )
        for curve in curves
        if curve.points
    ]
    words = "; ".join(
        f"{line.label} {number(line.values[0])} to {number(line.values[-1])}" for line in lines
    )
    inside = [p.devices for curve in curves for p in curve.points if not p.doublings_beyond]
    within = max(inside, default=0)
    note = f"Right of the dotted line, at {within} devices, nothing was measured."
    data = Predicted(
        "scaling",
        "Throughput over devices",
        "samples/s",
        tuple(lines),
        f"{title}, predicted: {words}",
        (note, "Intervals grow with each doubling beyond it, which is an assumption."),
        within,
    )
    panels = Panels()
    chart = panels.drawn(data, predicted)
    panels.pictures.draw()
    page = PlanPage(title, (f"measured on {machine}",), (note,), (), "samples/s", ())
    return fill(
        "prediction.html.j2",
        panels.pictures.styles,
        page=page,
        charts=[chart],
        curves=curves,
        winners=[],
        note=NOT_MEASURED,
    )
