"""Page of a plan: the best layouts, and the winner for similar models and numbers of devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from harness.cell.errors import plural
from harness.planner.cluster.cluster_plan import ClusterCandidate, ClusterPlan, SweepSquare
from reports import blocks as ui
from reports.blocks import data, key, prose, small
from reports.html_writer import PageHead, PageSection, html_page
from reports.line_chart import Line, Predicted
from reports.text import number

MOST_ROWS = 20


def plan_page(
    plan: ClusterPlan, sentences: Sequence[str], source: str, squares: Sequence[SweepSquare]
) -> str:
    """Returns the page; `source` names the constants, `squares` are those of a sweep."""
    question, best = plan.question, plan.candidates[0]
    by_model: dict[str, list[SweepSquare]] = {}
    for square in squares:
        by_model.setdefault(square.model, []).append(square)
    choice = (
        f"Use {best.strategy}: {best.layout.text}. A step takes {best.seconds:.3g} s, which is"
        f" {best.tokens_per_second:,.0f} tokens/s."
    )
    answer: ui.Blocks = [
        ui.Paragraph(choice, "lead"),
        *map(ui.Paragraph, sentences),
        ui.Paragraph(prose("predictions"), "caution"),
    ]
    columns = [
        ui.ColumnHead("step"),
        ui.ColumnHead("tokens/s"),
        ui.ColumnHead("memory of the fullest device"),
    ]
    rows = [_row(candidate) for candidate in plan.candidates[:MOST_ROWS]]
    layouts = ui.Table("", "Layouts, best first", "layout", columns, rows, "compact")
    winners = ui.Part("", [_winners(by_model)], prose("map", unit="tokens/s"))
    title = f"{question.shape.name} on {question.devices} x {question.cluster.device}"
    facts = (
        f"{question.global_batch} sequences of {question.sequence_length} tokens a step",
        plural(plan.considered, "layout"),
        f"constants: {source}",
    )
    head = PageHead(
        f"{title}, predicted",
        "What is predicted?",
        [data(title, "strong"), *map(data, facts)],
        "parallelism-bench. Predictions with 80 % intervals, see docs/planner.md.",
        navigation=False,
    )
    sections = [
        PageSection("answer", "Answer", answer),
        PageSection("layouts", "Best first", [layouts]),
        PageSection("map", "Which strategy wins where", [winners]),
        PageSection("charts", "Over devices", [ui.Charts([*_charts(by_model)])]),
    ]
    return html_page(head, [one for one in sections if ui.visible(one.blocks, "page")])


def _row(one: ClusterCandidate) -> ui.Row:
    gigabytes = f"{one.reserved_low / 1e9:.0f} to {one.reserved_high / 1e9:.0f}"
    texts = (
        f"{one.seconds:.3g} s ({one.seconds_low:.3g} to {one.seconds_high:.3g})",
        f"{one.tokens_per_second:,.0f}",
        f"{one.reserved_bytes / 1e9:.1f} GB ({gigabytes})",
    )
    return ui.Row(data(f"{one.strategy}: {one.layout.text}"), [*map(ui.Td, texts)])


def _winners(by_model: Mapping[str, Sequence[SweepSquare]]) -> ui.Table:
    squares = [square for squares in by_model.values() for square in squares]
    winners = list(dict.fromkeys(square.winner for square in squares if square.winner))

    def td(square: SweepSquare) -> ui.Td:
        if not square.winner:
            return ui.Td("does not run", "word", square.reason)
        colour = key(f"series-{winners.index(square.winner) % 7}")
        speed = small(f" {number(square.tokens_per_second)}")
        return ui.Td([colour, " ", data(square.winner), speed], "word")

    counts = dict.fromkeys(square.devices for square in squares)
    columns = [ui.ColumnHead(str(count), kind="word") for count in counts]
    label = "The best strategy of each model on each number of devices"
    rows = [ui.Row(data(model), list(map(td, of_model))) for model, of_model in by_model.items()]
    return ui.Table("winners", label, "model", columns, rows, "compact")


def _charts(by_model: Mapping[str, Sequence[SweepSquare]]) -> Iterator[ui.Chart]:
    for name, title, unit, scale, fields in (
        ("throughput", "Throughput", "tokens/s", 1.0, ("tokens_per_second", "tokens")),
        ("memory", "Memory of the fullest device", "GB", 1e9, ("memory_bytes", "memory")),
    ):
        value, bound = fields
        lines = []
        for model, squares in by_model.items():
            if ran := [square for square in squares if square.winner]:
                values, lows, highs = (
                    tuple(getattr(square, field) / scale for square in ran)
                    for field in (value, f"{bound}_low", f"{bound}_high")
                )
                lines.append(Line(model, tuple(s.devices for s in ran), values, lows, highs))
        if lines:
            summary = f"{title} ({unit}), predicted: {'; '.join(line.summary for line in lines)}"
            logarithmic = name == "throughput"
            yield ui.Chart(
                Predicted(name, title, unit, tuple(lines), summary, logarithmic=logarithmic)
            )
