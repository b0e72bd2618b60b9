"""Pages of predictions: a plan, the winning strategies, and scaling curves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from harness.planner.cluster.cluster_plan import ClusterCandidate, ClusterPlan, SweepSquare
from harness.planner.local.local_plan import LocalCandidate, LocalPlan, ScalingCurve
from harness.spec.text import plural
from reports import blocks as ui
from reports.blocks import data, key, prose, small
from reports.charts import SERIES
from reports.html_writer import PageHead, PageSection, html_page
from reports.line_chart import Line, Predicted
from reports.text import number

MOST_ROWS = 20
Bounded = tuple[float, float, float]
"""Predicted value and the bounds of its 80 % interval."""


@dataclass(frozen=True)
class WonSquare:
    """The best choice for a model on a number of devices."""

    devices: int
    winner: str
    throughput: Bounded
    memory: Bounded
    reason: str = ""


WonMap = Mapping[str, Sequence[WonSquare]]
"""Best choice for each number of devices, by model."""


def plan_page(
    title: str,
    facts: Sequence[str],
    sentences: Sequence[str],
    unit: str,
    rows: Sequence[ui.Row],
    won: WonMap,
) -> str:
    """Returns a plan's page. `unit`: of throughput; `rows`: best first."""
    columns = [
        ui.ColumnHead("step"),
        ui.ColumnHead(unit),
        ui.ColumnHead("memory of the fullest device"),
        ui.ColumnHead("known by", kind="word"),
    ]
    layouts = ui.Table("", "Layouts, best first", "layout", columns, rows, "compact")
    charts = [*_charts(won, "throughput", "Throughput", unit, 1.0)]
    charts += _charts(won, "memory", "Memory of the fullest device", "GB", 1e9)
    winners = ui.Part("", [_winners(won)], prose("map", unit=unit))
    return _page(
        title,
        facts,
        [
            _answer(sentences),
            PageSection("layouts", "Best first", [layouts]),
            PageSection("map", "Which strategy wins where", [winners]),
            PageSection("charts", "Over devices", [ui.Charts(charts)]),
        ],
    )


def _page(title: str, facts: Sequence[str], sections: Sequence[PageSection]) -> str:
    head = PageHead(
        f"{title}, predicted",
        "What is predicted?",
        [data(title, "strong"), *map(data, facts)],
        "parallelism-bench. Predictions with 80 % intervals, see docs/planner.md.",
        navigation=False,
    )
    return html_page(head, [one for one in sections if ui.visible(one.blocks, "page")])


def _answer(sentences: Sequence[str]) -> PageSection:
    blocks: ui.Blocks = [
        ui.Paragraph(sentence, "" if place else "lead") for place, sentence in enumerate(sentences)
    ]
    caution = ui.Paragraph(prose("predictions"), "caution")
    return PageSection("answer", "Answer", [*blocks, caution])


def _winners(won: WonMap) -> ui.Table:
    squares = [square for squares in won.values() for square in squares]
    winners = list(dict.fromkeys(square.winner for square in squares if square.winner))

    def td(square: WonSquare) -> ui.Td:
        if not square.winner:
            return ui.Td("does not run", "word", square.reason)
        colour = key(f"series-{winners.index(square.winner) % 7}")
        speed = small(f" {number(square.throughput[0])}")
        return ui.Td([colour, " ", data(square.winner), speed], "word")

    counts = dict.fromkeys(square.devices for square in squares)
    columns = [ui.ColumnHead(str(count), kind="word") for count in counts]
    label = "The best strategy of each model on each number of devices"
    rows = [ui.Row(data(model), list(map(td, of_model))) for model, of_model in won.items()]
    return ui.Table("winners", label, "model", columns, rows, "compact")


def _charts(won: WonMap, quantity: str, title: str, unit: str, scale: float) -> Iterator[ui.Chart]:
    lines = []
    for model, squares in won.items():
        if ran := [square for square in squares if square.winner]:
            bounded = [[value / scale for value in getattr(square, quantity)] for square in ran]
            values, lows, highs = map(tuple, zip(*bounded, strict=True))
            lines.append(Line(model, tuple(s.devices for s in ran), values, lows, highs))
    if lines:
        summary = f"{title} ({unit}), predicted: {'; '.join(line.summary for line in lines)}"
        logarithmic = quantity == "throughput"
        data = Predicted(quantity, title, unit, tuple(lines), summary, logarithmic=logarithmic)
        yield ui.Chart(data)


def scaling_page(title: str, curves: Sequence[ScalingCurve], machine: str) -> str:
    lines = [
        Line(
            curve.label,
            tuple(point.devices for point in curve.points),
            tuple(point.predicted for point in curve.points),
            tuple(point.low for point in curve.points),
            tuple(point.high for point in curve.points),
            measured=tuple((p.devices, p.measured) for p in curve.points if p.measured is not None),
        )
        for curve in curves
        if curve.points
    ]
    inside = [p.devices for curve in curves for p in curve.points if not p.doublings_beyond]
    within = max(inside, default=0)
    drawn = tuple(lines[: len(SERIES)])
    note = f"Nothing was measured beyond the dotted line, at {plural(within, 'device')}."
    notes = [note, "Intervals are assumed to grow with each doubling beyond it."]
    if len(lines) > len(drawn):
        notes.append(
            f"Only the first {len(drawn)} of {len(lines)} curves are drawn; the table has all."
        )
    chart = Predicted(
        "scaling",
        "Throughput over devices",
        "samples/s",
        drawn,
        f"{title}, predicted: {'; '.join(line.summary for line in drawn)}",
        tuple(notes),
        within,
    )
    ends: ui.Blocks = [
        ui.Paragraph([data(curve.label), f" ends: {curve.end}"], "small")
        for curve in curves
        if curve.end
    ]
    sections = [
        _answer([note]),
        PageSection("charts", "Over devices", [ui.Charts([ui.Chart(chart)])]),
        PageSection("figures", "Figures", [_points(curves), *ends]),
    ]
    return _page(title, [f"measured on {machine}"], sections)


def _points(curves: Sequence[ScalingCurve]) -> ui.Table:
    columns = ui.heads(
        "devices",
        "predicted (samples/s)",
        "80 % interval",
        "measured here",
        "measured range: word",
    )
    rows = []
    for curve in curves:
        for point in curve.points:
            doublings = plural(round(point.doublings_beyond), "doubling")
            texts = [
                str(point.devices),
                number(point.predicted),
                f"{number(point.low)} to {number(point.high)}",
                "" if point.measured is None else number(point.measured),
            ]
            beyond = f"outside by {doublings}" if point.doublings_beyond else "within"
            rows.append(ui.Row(data(curve.label), [*map(ui.Td, texts), ui.Td(beyond, "word")]))
    label = "Predicted and measured throughput"
    return ui.Table("", label, "strategy", columns, rows, "compact")


def cluster_page(
    plan: ClusterPlan, sentences: Sequence[str], source: str, squares: list[SweepSquare]
) -> str:
    question, best = plan.question, plan.candidates[0]
    won: dict[str, list[WonSquare]] = {}
    for square in squares:
        speed = square.tokens_per_second, square.tokens_low, square.tokens_high
        memory = square.memory_bytes, square.memory_low, square.memory_high
        won.setdefault(square.model, []).append(
            WonSquare(square.devices, square.winner, speed, memory, square.reason)
        )
    choice = (
        f"Use {best.strategy}: {best.layout.text}. A step takes {best.seconds:.3g} s, which is"
        f" {best.tokens_per_second:,.0f} tokens/s."
    )
    return plan_page(
        f"{question.shape.name} on {question.devices} x {question.cluster.device}",
        (
            f"{question.global_batch} sequences of {question.sequence_length} tokens a step",
            plural(plan.considered, "layout"),
            f"constants: {source}",
        ),
        (choice, *sentences),
        "tokens/s",
        [_row(candidate) for candidate in plan.candidates[:MOST_ROWS]],
        won,
    )


def _row(one: ClusterCandidate) -> ui.Row:
    gigabytes = f"{one.reserved_low / 1e9:.0f} to {one.reserved_high / 1e9:.0f}"
    return plan_row(
        f"{one.strategy}: {one.layout.text}",
        f"{one.seconds:.3g} s ({one.seconds_low:.3g} to {one.seconds_high:.3g})",
        f"{one.tokens_per_second:,.0f}",
        f"{one.reserved_bytes / 1e9:.1f} GB ({gigabytes})",
        "prediction",
    )


def plan_row(name: str, step: str, speed: str, memory: str, known_by: str) -> ui.Row:
    return ui.Row(data(name), [ui.Td(step), ui.Td(speed), ui.Td(memory), ui.Td(known_by, "word")])


def local_page(
    plan: LocalPlan,
    sentences: Sequence[str],
    machine: str,
    swept: dict[str, dict[int, LocalPlan | str]],
) -> str:
    """`swept`: plan, or why nothing can run, by workload and number of ranks."""
    return plan_page(
        plan.setting,
        (machine, f"from {plan.calibrated_on} measured cells"),
        sentences,
        "samples/s",
        [_local_row(one) for one in (*plan.candidates, *plan.inexact)[:MOST_ROWS]],
        {
            workload: [_local_square(devices, answer) for devices, answer in of_one.items()]
            for workload, of_one in swept.items()
        },
    )


def _local_row(one: LocalCandidate) -> ui.Row:
    low, high = one.seconds_low * 1e3, one.seconds_high * 1e3
    megabytes = f"{one.peak_low / 1e6:.0f} to {one.peak_high / 1e6:.0f}"
    return plan_row(
        one.label if one.exact else f"{one.label} (another training)",
        f"{one.seconds * 1e3:.0f} ms ({low:.0f} to {high:.0f})",
        f"{one.samples_per_second:.1f}",
        f"{one.peak_bytes / 1e6:.0f} MB ({megabytes})",
        "measurement" if one.measured else "prediction",
    )


def _local_square(devices: int, answer: LocalPlan | str) -> WonSquare:
    if isinstance(answer, str) or not answer.candidates:
        reason = answer if isinstance(answer, str) else "nothing trains exactly the same"
        return WonSquare(devices, "", (0, 0, 0), (0, 0, 0), reason)
    best = answer.candidates[0]
    batch = best.samples_per_second * best.seconds
    speed = best.samples_per_second, batch / best.seconds_high, batch / best.seconds_low
    memory = best.peak_bytes, best.peak_low, best.peak_high
    return WonSquare(devices, best.label, speed, memory)
