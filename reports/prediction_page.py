"""Page of a plan: the best layouts, and the winner for similar models and numbers of devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from harness.cell.errors import plural
from harness.planner.cluster.cluster_plan import GIB, ClusterCandidate, ClusterPlan, Square
from reports import blocks as ui
from reports.blocks import data, key, prose, small
from reports.html_writer import PageHead, PageSection, html_page
from reports.line_chart import Line, Predicted
from reports.text import number

MOST_ROWS = 20


def plan_page(
    plan: ClusterPlan, sentences: Sequence[str], source: str, squares: Sequence[Square]
) -> str:
    """Returns the page; `source` names the constants, `squares` are those of a sweep."""
    question, best = plan.question, plan.candidates[0]
    by_model: dict[str, list[Square]] = {}
    for square in squares:
        by_model.setdefault(square[0].shape.name, []).append(square)
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
        "parallelism-bench. Predictions with 80% intervals, see docs/plan.md.",
        navigation=False,
    )
    sections = [
        PageSection("answer", "Answer", answer),
        PageSection("layouts", "Best first", [layouts]),
        PageSection("map", "Which strategy wins where", [winners]),
        PageSection("charts", "Over devices", [ui.Charts([*_charts(by_model)])]),
    ]
    return html_page(head, [section for section in sections if ui.visible(section.blocks, "page")])


def _row(candidate: ClusterCandidate) -> ui.Row:
    interval = f"{candidate.reserved_low / GIB:.0f} to {candidate.reserved_high / GIB:.0f}"
    texts = (
        f"{candidate.seconds:.3g} s ({candidate.seconds_low:.3g} to {candidate.seconds_high:.3g})",
        f"{candidate.tokens_per_second:,.0f}",
        f"{candidate.reserved_bytes / GIB:.1f} GiB ({interval})",
    )
    return ui.Row(data(f"{candidate.strategy}: {candidate.layout.text}"), [*map(ui.Td, texts)])


def _winners(by_model: Mapping[str, Sequence[Square]]) -> ui.Table:
    squares = [square for squares in by_model.values() for square in squares]
    winners = list(dict.fromkeys(best.strategy for _, best in squares if not isinstance(best, str)))

    def td(square: Square) -> ui.Td:
        best = square[1]
        if isinstance(best, str):
            return ui.Td("does not run", "word", best)
        colour = key(f"series-{winners.index(best.strategy) % 7}")
        speed = small(f" {number(best.tokens_per_second)}")
        return ui.Td([colour, " ", data(best.strategy), speed], "word")

    counts = dict.fromkeys(question.devices for question, _ in squares)
    columns = [ui.ColumnHead(str(count), kind="word") for count in counts]
    label = "The best strategy of each model on each number of devices"
    rows = [ui.Row(data(model), list(map(td, of_model))) for model, of_model in by_model.items()]
    return ui.Table("winners", label, "model", columns, rows, "compact")


def _charts(by_model: Mapping[str, Sequence[Square]]) -> Iterator[ui.Chart]:
    speeds, memories = [], []
    for model, squares in by_model.items():
        ran = [(asked, best) for asked, best in squares if not isinstance(best, str)]
        if not ran:
            continue
        counts = tuple(asked.devices for asked, _ in ran)
        rates = tuple(best.tokens_per_second for _, best in ran)
        slowest = tuple(asked.tokens / best.seconds_high for asked, best in ran)
        fastest = tuple(asked.tokens / best.seconds_low for asked, best in ran)
        speeds.append(Line(model, counts, rates, slowest, fastest))
        reserved = tuple(best.reserved_bytes / GIB for _, best in ran)
        least = tuple(best.reserved_low / GIB for _, best in ran)
        most = tuple(best.reserved_high / GIB for _, best in ran)
        memories.append(Line(model, counts, reserved, least, most))
    for name, title, unit, lines in (
        ("throughput", "Throughput", "tokens/s", speeds),
        ("memory", "Memory of the fullest device", "GiB", memories),
    ):
        if lines:
            summary = f"{title} ({unit}), predicted: {'; '.join(line.summary for line in lines)}"
            logarithmic = name == "throughput"
            yield ui.Chart(
                Predicted(name, title, unit, tuple(lines), summary, logarithmic=logarithmic)
            )
