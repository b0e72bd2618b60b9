"""Results of training scripts, which are compared although nobody checked what they trained."""

from __future__ import annotations

import math
from collections.abc import Iterable

from harness.analysis.cell_result import NOT_CHECKED, CellResult
from harness.analysis.ranking import compare
from harness.analysis.setting import grouped
from harness.analysis.stats import PAIR_CONFIDENCE
from harness.cell.cell import Cell, is_script


def script_sentences(cells: Iterable[CellResult]) -> list[str]:
    """Returns figures of each cell that is not checked by design, and comparisons of cells on equal
    devices with the fastest; empty if there are none. `cells`: fastest first."""
    unchecked = [cell for cell in cells if cell.outcome == NOT_CHECKED]
    sentences = [_figures(cell) for cell in unchecked]
    for group in grouped(unchecked, lambda cell: (cell.cell.devices, cell.cell.nodes)).values():
        sentences += [_compared(group[0], other) for other in group[1:]]
    return [*sentences, *sorted({f"Not checked: {cell.reason}." for cell in unchecked})]


def rate_unit(cell: Cell) -> str:
    """Returns what is counted each second: a script's steps, unless the user gave its batch."""
    return "steps/s" if is_script(cell.strategy) and cell.global_batch == 1 else "samples/s"


def _figures(result: CellResult) -> str:
    speed, peak = result.speed, result.memory.peak_memory_bytes
    ends = speed.samples_per_second_low, speed.samples_per_second_high
    losses = [loss for loss in result.parity.losses if loss is not None and math.isfinite(loss)]
    parts = [
        f"{speed.samples_per_second or 0.0:.4g} {rate_unit(result.cell)}",
        f"95%: {ends[0]:.4g} to {ends[1]:.4g}" if ends[0] and ends[1] else "one trial",
        f"{speed.tokens_per_second:.4g} tokens/s" if speed.tokens_per_second else "",
        f"peak {peak / 2**20:.0f} MiB per rank" if peak else "",
        f"loss {losses[0]:.4g} to {losses[-1]:.4g}" if losses else "",
    ]
    return f"{result.cell.name}: {', '.join(filter(None, parts))}."


def _compared(first: CellResult, other: CellResult) -> str:
    ratio, names = compare(first, other), f"{first.cell.label} against {other.cell.label}"
    if ratio is None or ratio.low is None or ratio.high is None:
        return f"{names}: not compared, as each has one trial."
    within = f"{100 * PAIR_CONFIDENCE:g}%: {ratio.low:.3f} to {ratio.high:.3f}"
    rate = rate_unit(first.cell)
    return f"{names}: {ratio.verdict}, {ratio.ratio:.3f} times the {rate} ({within})."
