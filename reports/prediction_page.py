"""Pages of predictions: a plan with the map of which strategy wins where, and scaling curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.planner.cluster.cluster_plan import ClusterCandidate, ClusterPlan, SweepSquare
from harness.planner.local.local_plan import LocalCandidate, LocalPlan
from reports.page import fill
from reports.panels import Panel, Panels
from reports.predicted import Predicted, PredictedLine, predicted
from reports.text import number

if TYPE_CHECKING:
    from harness.planner.local.local_plan import ScalingCurve

NOT_MEASURED = (
    "Every line, band and figure here is a prediction unless it is marked as measured. Nothing was"
    " launched for this page."
)

MOST_ROWS = 20


@dataclass(frozen=True)
class PlanRow:
    name: str
    step: str
    speed: str
    memory: str
    remark: str


@dataclass(frozen=True)
class WonSquare:
    """The best choice for one model on one number of devices."""

    devices: int
    winner: str
    """Empty if nothing can run."""
    speed: float
    """0 if nothing can run, as are the numbers below."""
    speed_low: float
    speed_high: float
    memory_bytes: float
    memory_low: float
    memory_high: float
    reason: str = ""


@dataclass(frozen=True)
class WonRow:
    """The best choices for one model by number of devices."""

    model: str
    squares: tuple[WonSquare, ...]


@dataclass(frozen=True)
class PlanPage:
    title: str
    facts: tuple[str, ...]
    sentences: tuple[str, ...]
    rows: tuple[PlanRow, ...]
    speed_unit: str
    map: tuple[WonRow, ...]


def plan_page(page: PlanPage) -> str:
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
    """Returns a chart of the best throughput or memory over devices, a line per model."""
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


def scaling_page(title: str, curves: Sequence[ScalingCurve], machine: str) -> str:
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


def cluster_page(
    plan: ClusterPlan, sentences: Sequence[str], source: str, squares: list[SweepSquare]
) -> str:
    """Returns the page of a plan for devices that are not rented yet."""
    question = plan.question
    models = list(dict.fromkeys(square.model for square in squares))
    return plan_page(
        PlanPage(
            f"{question.shape.name} on {question.devices} x {question.cluster.device}",
            (
                f"{question.global_batch} sequences of {question.sequence_length} tokens a step",
                f"{plan.considered} layouts",
                f"constants: {source}",
            ),
            (_choice(plan.candidates[0]), *sentences),
            tuple(_row(candidate) for candidate in plan.candidates[:MOST_ROWS]),
            "tokens/s",
            tuple(
                WonRow(model, tuple(_square(one) for one in squares if one.model == model))
                for model in models
            ),
        )
    )


def _choice(best: ClusterCandidate) -> str:
    return (
        f"Use {best.strategy}: {best.layout.text}. A step takes {best.seconds:.3g} s, which is"
        f" {best.tokens_per_second:,.0f} tokens/s."
    )


def _row(candidate: ClusterCandidate) -> PlanRow:
    return PlanRow(
        f"{candidate.strategy}: {candidate.layout.text}",
        f"{candidate.seconds:.3g} s ({candidate.seconds_low:.3g} to {candidate.seconds_high:.3g})",
        f"{candidate.tokens_per_second:,.0f}",
        f"{candidate.reserved_bytes / 1e9:.1f} GB ({candidate.reserved_low / 1e9:.0f} to"
        f" {candidate.reserved_high / 1e9:.0f})",
        "prediction",
    )


def _square(square: SweepSquare) -> WonSquare:
    return WonSquare(
        square.devices,
        square.winner,
        square.tokens_per_second,
        square.tokens_low,
        square.tokens_high,
        square.memory_bytes,
        square.memory_low,
        square.memory_high,
        square.reason,
    )


def local_page(
    plan: LocalPlan,
    sentences: Sequence[str],
    machine: str,
    swept: dict[str, dict[int, LocalPlan | str]],
) -> str:
    """Returns the page of a plan for this machine.

    `swept`: by workload and number of ranks, the plan or the reason why nothing can run.
    """
    candidates = (*plan.candidates, *plan.inexact)
    return plan_page(
        PlanPage(
            plan.setting,
            (machine, f"from {plan.calibrated_on} measured cells"),
            tuple(sentences),
            tuple(_local_row(candidate) for candidate in candidates[:MOST_ROWS]),
            "samples/s",
            tuple(
                WonRow(
                    workload,
                    tuple(_local_square(devices, answer) for devices, answer in of_one.items()),
                )
                for workload, of_one in swept.items()
            ),
        )
    )


def _local_row(candidate: LocalCandidate) -> PlanRow:
    low, high = candidate.seconds_low * 1e3, candidate.seconds_high * 1e3
    return PlanRow(
        candidate.label if candidate.exact else f"{candidate.label} (another training)",
        f"{candidate.seconds * 1e3:.0f} ms ({low:.0f} to {high:.0f})",
        f"{candidate.samples_per_second:.1f}",
        f"{candidate.peak_bytes / 1e6:.0f} MB ({candidate.peak_low / 1e6:.0f} to"
        f" {candidate.peak_high / 1e6:.0f})",
        "measurement" if candidate.measured else "prediction",
    )


def _local_square(devices: int, answer: LocalPlan | str) -> WonSquare:
    if isinstance(answer, str) or not answer.candidates:
        reason = answer if isinstance(answer, str) else "nothing trains exactly the same"
        return WonSquare(devices, "", 0, 0, 0, 0, 0, 0, reason)
    best = answer.candidates[0]
    batch = best.samples_per_second * best.seconds
    return WonSquare(
        devices,
        best.label,
        best.samples_per_second,
        batch / best.seconds_high,
        batch / best.seconds_low,
        best.peak_bytes,
        best.peak_low,
        best.peak_high,
    )
