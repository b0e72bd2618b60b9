from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from harness.analysis.cell_result import VERIFIED, CellResult
from harness.analysis.consistency import ControlLevel, ControlLevels, control_levels
from harness.analysis.estimates import Adjustment
from harness.analysis.stats import ESTIMATE_METHOD, ESTIMATES_COMPARED
from harness.analysis.summary import FORMULA
from harness.cell.errors import plural
from reports import blocks as ui
from reports.bar_chart import Bar, Bars, bars_of
from reports.blocks import data, joined, phrase, plain_text, prose
from reports.columns import cell_table, figure, word
from reports.line_chart import Losses
from reports.names import chart_name, main_workload, marks, titles_apart
from reports.run_report import RunReport
from reports.sections import Panel
from reports.text import deviation, finite, number
from reports.verdict_sections import judged, parity_steps

MOST_LOSSES = 6
MOST_NAMED = 12
MOST_DEVIATIONS = 20
CHARTS = {
    "loss": "Loss: largest deviation of any step",
    "update": "Parameters: largest deviation of any tensor, relative to its update",
}


def losses(cells: Sequence[CellResult]) -> list[Losses]:
    """Returns a chart per reference, most cells first; curves end at a non-finite loss."""
    by_reference: dict[tuple[float, ...], list[CellResult]] = {}
    for cell in cells:
        if cell.parity.reference_losses:
            reference = tuple(math.nan if x is None else x for x in cell.parity.reference_losses)
            by_reference.setdefault(reference, []).append(cell)
    most_first = sorted(by_reference.items(), key=lambda item: -len(item[1]))
    charts = [_losses(f"loss-{index}", *item) for index, item in enumerate(most_first)]
    titles = titles_apart([chart.title for chart in charts], [same[0] for _, same in most_first])
    return [replace(chart, title=title) for chart, title in zip(charts, titles, strict=True)]


def _losses(name: str, reference: tuple[float, ...], cells: Sequence[CellResult]) -> Losses:
    away = [
        (f"{cell.cell.label} {cell.cell.precision}", _curve(cell, len(reference)))
        for cell in cells
        if cell.parity.verdict == "diverged"
    ]
    curves = [_curve(cell, len(reference)) for cell in cells if cell.parity.verdict in VERIFIED]
    first = cells[0]
    sizes = f"batch {first.cell.global_batch} · {first.cell.optimizer}"
    title = f"{first.cell.workload_name} · {first.cell.precision} · {sizes}"
    summary = (
        f"Loss over {plural(len(reference), 'step')}, {title}: the reference goes from"
        f" {number(reference[0])} to {number(reference[-1])}; {plural(len(curves), 'cell')} agree"
        f" with it, {len(away)} diverged"
    )
    return Losses(name, title, reference, tuple(curves), tuple(away), summary)


def _curve(cell: CellResult, steps: int) -> tuple[float, ...]:
    values: list[float] = []
    for value in cell.parity.losses[:steps]:
        if value is None or not math.isfinite(value):
            break
        values.append(value)
    return tuple(values)


def deviation_bars(cells: Sequence[CellResult]) -> Iterator[Bars]:
    for kind, title in CHARTS.items():
        judged = [
            (cell, finite(cell.column(f"parity_max_{kind}_deviation")), float(tolerance))
            for cell in cells
            if (tolerance := cell.column(f"parity_{kind}_tolerance")) is not None
        ]
        if judged:
            yield _bars(kind, title, judged, main_workload(cells))


Judged = tuple[CellResult, "float | None", float]


def _bars(kind: str, title: str, judged: list[Judged], main: str) -> Bars:
    def bar(judgement: Judged) -> Bar:
        cell, value, tolerance = judgement
        failed = cell.parity.verdict == "diverged"
        text = "not finite" if value is None else deviation(value)
        label = chart_name(cell, main)
        return Bar(label, value, text, marks=marks(cell), target=tolerance, failed=failed)

    judged.sort(key=_used, reverse=True)
    outside = sum(cell.parity.verdict == "diverged" for cell, *_ in judged)
    return bars_of(
        f"parity_max_{kind}_deviation",
        title,
        "relative deviation (no unit), log scale",
        judged,
        bar,
        f"{title} of {plural(len(judged), 'cell')} against its tolerance; {outside} diverged",
        most=MOST_DEVIATIONS,
        logarithmic=True,
    )


def _used(judged: Judged) -> tuple[bool, float]:
    cell, value, tolerance = judged
    share = float("inf") if value is None else value / tolerance
    return cell.parity.verdict == "diverged", share


def _parity_table(report: RunReport) -> ui.Blocks:
    judged = [cell for cell in report.cells if cell.parity.loss_tolerance is not None]
    columns = [
        word("parity", "parity_and_steps"),
        figure("loss deviation", "parity_max_loss_deviation", deviation),
        figure("loss tolerance", "parity_loss_tolerance", deviation),
        figure("parameter deviation", "parity_max_update_deviation", deviation),
        figure("parameter tolerance", "parity_update_tolerance", deviation),
        figure("single elements", "parity_max_element_deviation", deviation),
        figure("along the weights", "parity_max_decay_deviation", deviation),
        figure("buffers", "parity_max_buffer_deviation", deviation),
        figure("optimizer states", "parity_max_moment_deviation", deviation),
    ]
    label = "Largest relative deviations from the reference."
    table = cell_table("", label, judged, columns, "cell", lambda cell: cell.cell.name)
    return [ui.Only("text", [ui.Part("", [table], label)])]


PARITY_PANELS: tuple[Panel[RunReport], ...] = (
    Panel(lambda report: losses(report.cells)[:MOST_LOSSES], "losses"),
    Panel(lambda report: deviation_bars(report.cells), "deviations", more=_parity_table),
)


def tolerances(cells: Sequence[CellResult]) -> list[tuple[str, str, str, tuple[str, ...]]]:
    """Returns tolerances of losses and updates, their reason, and the labels of their cells."""
    by_pair: dict[tuple[float, float], list[CellResult]] = {}
    for cell in cells:
        if cell.parity.loss_tolerance is not None and cell.parity.update_tolerance is not None:
            key = (cell.parity.loss_tolerance, cell.parity.update_tolerance)
            by_pair.setdefault(key, []).append(cell)
    # Tolerances of updates vary with the workload, which is no reason for a row of their own.
    by_loss: dict[tuple[str, str], list[tuple[float, CellResult]]] = {}
    for (loss, update), rows in sorted(by_pair.items(), key=lambda item: item[0]):
        reasons = [c.parity.reason for c in rows if c.parity.verdict == "within tolerance"]
        reason = "; ".join(dict.fromkeys(filter(None, reasons)))
        by_loss.setdefault((deviation(loss), reason), []).extend((update, c) for c in rows)
    return [
        (
            loss,
            " to ".join(dict.fromkeys(deviation(parts[end][0]) for end in (0, -1))),
            reason,
            tuple(dict.fromkeys(f"{c.cell.label} {c.cell.precision}" for _, c in parts)),
        )
        for (loss, reason), parts in by_loss.items()
    ]


def control_in_words(adjustment: Adjustment) -> str:
    if not adjustment.helps:
        return (
            "none, or it did not reduce the spread between trials of a cell: figures are as"
            " measured"
        )
    before, after = (
        f"{spread * 100:.1f}%" for spread in (adjustment.spread_before, adjustment.spread_after)
    )
    return plain_text(prose("method control", before=before, after=after))


def control_levels_in_words(levels: ControlLevels | None) -> str:
    if levels is None:
        return ""

    def interval(level: ControlLevel) -> str:
        return f"{level.low:.3f} to {level.high:.3f}, " if math.isfinite(level.high) else ""

    level_text = ", ".join(
        f"{level.launcher} {level.ratio:.3f} ({interval(level)}{plural(level.trials, 'trial')})"
        for level in levels.launchers
    )
    verdict = "no more than" if levels.by_chance else "more than"
    return plain_text(
        prose(
            "method control levels",
            levels=level_text,
            labels=levels.labels,
            verdict=verdict,
            probability=f"{levels.probability:.3f}",
        )
    )


def methods(report: RunReport) -> list[tuple[str, ui.Text]]:
    """Returns how each figure is measured."""
    cells = report.cells
    memory = "; ".join(
        dict.fromkeys(cell.memory.memory_method for cell in cells if cell.memory.memory_method)
    )
    states = any(cell.states.state_bytes is not None for cell in cells)
    sent = any(cell.traffic.sent_bytes_per_step is not None for cell in cells)
    ties = (
        "cells that may be the fastest of their setting are marked ● (multiple comparisons with"
        f" the best, Hsu 1981, 95% together). Pairs: {ESTIMATES_COMPARED}"
    )
    rows: list[tuple[str, ui.Text]] = [
        ("Throughput", prose("method throughput")),
        ("Interval", ESTIMATE_METHOD),
        ("Control", control_in_words(report.adjustment)),
        ("Control by launcher", control_levels_in_words(control_levels(report.trials))),
        ("Ties", ties),
        ("Memory", memory and f"{memory}. Each device has its own peak; the largest is shown"),
        ("States between steps", prose("method states") if states else ""),
        ("Bytes sent", prose("method sent") if sent else ""),
        ("Scaling efficiency", prose("method efficiency")),
        ("FLOPs and MFU", FORMULA),
        ("Parity", prose("method parity", steps=parity_steps(judged(cells)))),
    ]
    return [(name, text) for name, text in rows if text]


def method_blocks(report: RunReport) -> ui.Blocks:
    rows = methods(report)
    every = tolerances(report.cells)
    for index, (loss, update, reason, labels) in enumerate(every):
        if index == 0 and len(every) > 1:
            whom: ui.Text = plural(len(labels), "strategy variant")
        else:
            more = " and others" if len(labels) > MOST_NAMED else ""
            whom = phrase(*joined([data(label) for label in labels[:MOST_NAMED]]), more)
        because = f": {reason}" if reason else ""
        text = f"in loss, {update} in update{because}. Holds for "
        rows.append((f"Tolerance {loss}", phrase(text, whom, ".")))
    return [ui.Facts(rows)]


def method_line(report: RunReport) -> str:
    most = max((cell.trials for cell in report.cells), default=0)
    trials = f"up to {plural(most, 'trial')} of a cell" if most else "0 trials finished"
    return f"how each figure is obtained; {trials}"


def parity_line(report: RunReport) -> str:
    cells = judged(report.cells)
    if not cells:
        return "no cell was verified"
    passed = sum(cell.parity.verdict != "diverged" for cell in cells)
    return f"{passed} of {plural(len(cells), 'cell')} agree with their reference"
