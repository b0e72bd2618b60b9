"""Claims of training guides, each with the figures that a run has for it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from harness.analysis.cell_result import CellResult
from harness.analysis.setting import grouped
from harness.cell.errors import plural
from reports import blocks as ui
from reports.blocks import data
from reports.memory_sections import rehearsed_cells
from reports.run_report import RunReport
from reports.text import listed, number, percent, plain, size
from reports.time_sections import AT_BOUND, bound, bubble_of, sent, with_traffic

MOST_NAMES = 9
LAST_SAMPLES = 256
"""Samples at the end of a training over whose losses a claim averages."""


def claims(report: RunReport) -> dict[str, str]:
    """Returns a sentence for each claim that this run has figures for."""
    return {name: text for name, sentence in CLAIMS.items() if (text := sentence(report))}


def claims_blocks(report: RunReport) -> ui.Blocks:
    return [ui.Facts([(name, data(text)) for name, text in claims(report).items()])]


def _names(cells: Sequence[CellResult]) -> str:
    labels = sorted({cell.varied(micro_batches=1).cell.label for cell in cells})
    return listed(labels, MOST_NAMES)


def _ring(report: RunReport) -> str:
    sending = with_traffic(report.cells)
    several = [cell for cell in sending if bound(cell) and cell.cell.precision == "fp32"]
    multiples = {cell.cell_id: sent(cell) / (bound(cell) or 1.0) for cell in several}
    ring = [cell for cell in several if multiples[cell.cell_id] <= AT_BOUND]
    ring.sort(key=lambda cell: cell.cell.devices)
    if len({cell.cell.devices for cell in ring}) < 2:
        return ""
    first, last = ring[0], ring[-1]
    text = (
        f"From {first.cell.devices} to {last.cell.devices} ranks, a rank sends"
        f" {number(sent(first))} to {number(sent(last))} times the gradients under {_names(ring)},"
        " at most 2% more than a ring's 2(N − 1)/N"
    )
    if more := [cell for cell in several if multiples[cell.cell_id] > AT_BOUND]:
        text += f"; up to {number(max(multiples.values()))} times that under {_names(more)}"
    weak = [c for c in ring if c.cell.regime == "weak" and not c.placement.oversubscribed]
    shares = [(c.cell.devices, c.relative.efficiency_own or 0.0, c.cell.label) for c in weak]
    devices, share, label = max(shares, default=(0, 0.0, ""))
    if share:
        text += (
            f". With equal batches per device, {label} keeps {percent(share)} of one device's"
            f" throughput per device on {devices}"
        )
    return f"{text}."


def _zero(report: RunReport) -> str:
    cells, sentences = rehearsed_cells(report), []
    for precision, alike in grouped(cells, lambda cell: cell.cell.precision).items():
        ranks = max(cell.cell.devices for cell in alike)
        sizes = {
            c.cell.label: c.states.state_bytes or 1.0 for c in alike if c.cell.devices == ranks
        }
        whole = max(sizes, key=lambda label: sizes[label])
        parts = [f"1/{number(sizes[whole] / n)} of that under {k}" for k, n in sizes.items()]
        del parts[list(sizes).index(whole)]
        sentences.append(
            f"On {plural(ranks, 'rank')} in {precision}, a rank keeps {size(sizes[whole])} under"
            f" {whole}, and {listed(parts, MOST_NAMES)}."
        )
    if sentences:
        by_formula = max(abs(cell.states.formula_deviation or 0.0) for cell in cells)
        ratios = [report.rehearsed[c.cell_id] / (c.states.state_bytes or 1.0) for c in cells]
        rehearsed = max(abs(ratio - 1) for ratio in ratios)
        sentences.append(
            f"Over {plural(len(cells), 'cell')}, the formula is at most {percent(by_formula)} off,"
            f" and the rehearsal {percent(rehearsed)}."
        )
    return " ".join(sentences)


def _first_gpu(report: RunReport) -> str:
    sentences = []
    for cell in report.cells:
        peaks = cell.memory.peak_memory_bytes_by_rank
        if cell.status == "ok" and cell.placement.processes == 1 and len(peaks) > 1:
            sentences.append(
                f"Under {cell.cell.name}, the first GPU needs {size(peaks[0])} at its peak,"
                f" {number(peaks[0] / max(peaks[1:]))} times as much as any other."
            )
    return " ".join(sentences)


def _bubble(report: RunReport) -> str:
    sentences = []
    piped = sorted((c for c in report.cells if bubble_of(c)), key=lambda cell: cell.cell.label)
    for label, alike in grouped(piped, lambda cell: _names([cell])).items():
        counts = {cell.cell.micro_batches: bubble_of(cell) for cell in alike}
        texts: list[str] = []
        for count in (min(counts), max(counts)):
            measured, theory = counts[count] or (0.0, None)
            by_theory = "no closed form" if theory is None else f"theory {percent(theory)}"
            what = "" if texts else " micro-batches"
            texts.append(f"{percent(measured)} with {count}{what} ({by_theory})")
        if len(counts) > 1:
            sentences.append(f"{label}: {' and '.join(texts)}.")
    return " ".join(sentences)


def _scaled_batches(report: RunReport) -> str:
    """Compares trainings of equally many samples with several batches and learning rates."""
    sentences, losses = [], dict[tuple[str, int], dict[tuple[int, float], float]]()
    for result in report.cells:
        cell, batch = result.cell, result.cell.global_batch
        last = result.parity.losses[-max(1, LAST_SAMPLES // batch) :]
        if result.status == "ok" and last:
            training = cell.label, batch * len(result.parity.losses)
            mean = statistics.fmean(loss for loss in last if loss is not None)
            losses.setdefault(training, {})[batch, cell.learning_rate] = mean
    for (label, samples), found in losses.items():
        base, rate = min(found)
        texts = []
        for batch in sorted({batch for batch, _ in found} - {base}):
            factors = {"same rate": 1.0, "square-root rule": math.sqrt(batch / base)}
            rules = {**factors, "linear rule": batch / base}
            by_rule = [
                f"{number(found[batch, rate * factor])} by the {rule}"
                for rule, factor in rules.items()
                if (batch, rate * factor) in found
            ]
            if len(by_rule) > 1:
                texts.append(f"with batch {batch} it is {listed(by_rule)}")
        if texts:
            sentences.append(
                f"After {plain(samples)} samples, the loss of {label} is"
                f" {number(found[base, rate])} with batch {base}; {'; '.join(texts)}."
            )
    return " ".join(sentences)


def _clipped_fp16(report: RunReport) -> str:
    cells = [c for c in report.cells if c.cell.precision == "fp16" and c.cell.clip_norm]
    by_id = {cell.cell_id: cell for cell in cells if cell.verified}
    norms = [x for t in report.trials if t.cell_id in by_id for x in t.gradient_norms]
    if not norms:
        return ""
    limits = listed([plain(limit) for limit in sorted({c.cell.clip_norm or 0.0 for c in cells})])
    return (
        f"In fp16 with clipping at {limits}, training is that of one process under"
        f" {_names(list(by_id.values()))}. Gradients are unscaled before they are clipped: their"
        f" norms are {number(min(norms))} to {number(max(norms))}."
    )


def _config_file(report: RunReport) -> str:
    started = [c for c in report.cells if c.cell.options.get("config_file") and c.status == "ok"]
    texts = [f"{cell.cell.label} ({cell.parity_and_steps})" for cell in started]
    return f"Started by the library's own command: {listed(texts, MOST_NAMES)}." if texts else ""


CLAIMS: dict[str, Callable[[RunReport], str]] = {
    "Ring all-reduce scales": _ring,
    "ZeRO's memory falls with its stage and the number of ranks": _zero,
    "Sharding, offload and tiling train what is too large": lambda report: (
        " ".join(report.largest.gains) if report.largest else ""
    ),
    "DataParallel fills the first GPU": _first_gpu,
    "The bubble shrinks with more micro-batches": _bubble,
    "Batch size and learning rate scale together": _scaled_batches,
    "fp16 gradients are clipped after unscaling": _clipped_fp16,
    "A config file trains the same": _config_file,
}
"""Functions that return a claim's sentence about a run, empty without figures for it."""
