"""Advice on which strategy to use."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from harness.analysis.cell_result import CellResult
from harness.analysis.ranking import against_best, compare, critical_value, is_tied
from harness.analysis.setting import by_setting
from harness.analysis.stats import CONFIDENCE, WITHIN_RUN_CONFIDENCE, Comparison
from harness.spec.cell import TECHNIQUES

EQUAL = 0.02
"""Cells tie if the 95 % interval of their throughput ratio is within this of 1."""
NEARLY_AS_FAST = 0.03
"""Throughput fraction that simplicity may cost."""
ELIMINATION_CONFIDENCE = (1 + WITHIN_RUN_CONFIDENCE) / 2
"""One-sided confidence for dropping a cell from further trials. Checking after each round gives bad
luck many chances, which biases dropped results low: at 95 %, only 93 of 100 intervals held
(scripts/power.py)."""
MOST_NAMED = 5
MIB = 2**20


@dataclass(frozen=True)
class Advice:
    role: str
    """Use, Faster at a price, Least memory or Simplest."""
    cell: CellResult
    words: str
    """Rest of a sentence after the cell's label and a colon."""
    as_good: str = ""

    @property
    def sentence(self) -> str:
        return f"{self.cell.cell.label}: {self.words}{'; ' if self.as_good else ''}{self.as_good}"


@dataclass(frozen=True)
class Answer:
    """Advice for one setting with at least one ranked cell."""

    advice: tuple[Advice, ...]
    """Cell to use first, then alternatives."""
    compared: int
    may_be_fastest: tuple[CellResult, ...]
    """Cells that train like one process and include the fastest (95 % confidence)."""
    baseline: CellResult | None

    @property
    def caveat(self) -> str:
        """Warnings for a reader who acts on the advice, or empty."""
        use = self.advice[0].cell
        caveats = []
        if use.cell.device == "cpu":
            caveats.append("measured on CPU cores: on GPUs the order is another")
        if use.cell.devices == 1:
            caveats.append("on one device nothing is communicated")
        if use.disturbance.trials:
            caveats.append(
                f"something else used the machine in {use.disturbance.trials} of its launches"
            )
        if use.trials < 2:
            caveats.append("one launch: no interval")
        if use.parity.verdict != "exact" and not use.parity.fp32_twin:
            caveats.append(
                f"not run in fp32, where a deviation that {use.cell.precision} rounding hides would"
                " show"
            )
        return "; ".join(caveats)


def trustworthy(cells: Sequence[CellResult]) -> list[CellResult]:
    """Returns ranked cells without stand-ins and with a core per rank, fastest first."""
    chosen = [
        cell
        for cell in cells
        if cell.ranked and cell.placement.stand_in is None and not cell.placement.oversubscribed
    ]
    return sorted(chosen, key=lambda cell: -(cell.speed.samples_per_second or 0.0))


def may_be_fastest(cells: Sequence[CellResult], confidence: float = CONFIDENCE) -> list[CellResult]:
    """Returns candidates for fastest; without estimates, ties with the first."""
    speeds = [cell.speed.log_throughput for cell in cells if cell.speed.log_throughput]
    if len(speeds) == len(cells):
        if all(speed.degrees > 0 for speed in speeds):
            best = against_best(speeds, confidence)
            bounded = zip(cells, best, strict=True)
            return [cell for cell, bound in bounded if bound.may_be_best] or [cells[0]]
        return list(cells)
    return [cell for cell in cells if cell is cells[0] or is_tied(cell, cells[0])]


def undecided(
    cells: Sequence[CellResult], confidence: float = ELIMINATION_CONFIDENCE
) -> list[CellResult]:
    """Returns the cells worth more trials: candidates for fastest and their baseline.

    A setting adds none if its fastest cell is known, or all candidates are known to be tied.
    """
    chosen: list[CellResult] = []
    for group in by_setting(trustworthy(cells)):
        same = [cell for cell in group if cell.parity.same_training]
        ties = may_be_fastest(same, confidence) if len(same) > 1 else []
        speeds = [
            cell.speed.log_throughput
            for cell in ties
            if cell.speed.log_throughput and cell.speed.log_throughput.degrees > 0
        ]
        if len(ties) < 2 or len(speeds) < len(ties):
            continue
        if all(bound.low >= 1 - EQUAL for bound in against_best(speeds, confidence)):
            continue
        baseline = next((cell for cell in group if cell.cell_id == cell.relative.baseline), None)
        chosen += [*ties, *([baseline] if baseline and baseline not in ties else [])]
    return chosen


def what_more_would_buy(cells: Sequence[CellResult]) -> str:
    """Describes how many more trials would resolve `EQUAL`; empty if nothing is undecided.

    Errors shrink with the square root of the number of trials.
    """
    open_cells = undecided(cells, CONFIDENCE)
    speeds = [cell.speed.log_throughput for cell in open_cells if cell.speed.log_throughput]
    if not speeds:
        return ""
    widest = max(speeds, key=lambda speed: speed.error)
    half = critical_value(widest, speeds) * math.sqrt(2) * widest.error
    more = math.ceil(widest.trials * max(0.0, (half / EQUAL) ** 2 - 1))
    if not more:
        return ""
    seconds = sum(cell.times.wall_seconds or 0.0 for cell in open_cells) * more
    minutes, percent = f"{seconds / 60:.0f} min", f"{EQUAL * 100:.0f} %"
    return (
        f"{len(open_cells)} cells may still be the fastest or are compared with these: about"
        f" {more} more launches of each, {minutes}, would resolve differences of {percent}"
    )


def answer(cells: Sequence[CellResult]) -> Answer | None:
    """Returns advice for one setting; None if no cell qualifies."""
    fair = trustworthy(cells)
    advisable = [cell for cell in fair if cell.parity.same_training]
    if not advisable:
        return None
    baseline = next((cell for cell in fair if cell.cell_id == cell.relative.baseline), None)
    fastest = advisable[0]
    ties = may_be_fastest(advisable)
    advice = [Advice("Use", fastest, _use(fastest, advisable, baseline), _as_good(fastest, ties))]
    other = fair[0]
    if other is not fastest and _faster(other, fastest):
        advice.append(Advice("Faster at a price", other, _price(other, fastest)))
    if frugal := _frugal(fair):
        advice.append(Advice("Least memory", frugal, _memory(frugal, fastest)))
    simple = _simplest(advisable)
    if simple is not fastest:
        advice.append(Advice("Simplest", simple, _simple(simple, fastest)))
    return Answer(tuple(advice), len(fair), tuple(ties), baseline)


def change(comparison: Comparison) -> str:
    """Formats as `12.0 % faster (95 % interval: 8.0 to 16.1 %)`."""
    ratio = comparison.ratio - 1
    words = f"{abs(ratio):.1%} {'faster' if ratio >= 0 else 'slower'}".replace("%", " %")
    if comparison.low is None or comparison.high is None:
        return f"{words} (too few launches for an interval)"
    ends = (comparison.low - 1, comparison.high - 1)
    if ratio < 0:
        ends = (-ends[1], -ends[0])
    low, high = (f"{end * 100:.1f}".replace("-", "−") for end in ends)
    return f"{words} (95 % interval: {low} to {high} %)"


def named(cells: Sequence[CellResult]) -> str:
    """Lists up to five names and counts the rest."""
    labels = [cell.cell.label for cell in cells]
    if len(labels) > MOST_NAMED:
        labels = [*labels[:MOST_NAMED], f"{len(labels) - MOST_NAMED} more"]
    return labels[0] if len(labels) == 1 else f"{', '.join(labels[:-1])} and {labels[-1]}"


def _use(cell: CellResult, advisable: Sequence[CellResult], baseline: CellResult | None) -> str:
    exact = all(other.parity.verdict == "exact" for other in advisable)
    one, several = ("trains", "train") if exact else ("matches", "match")
    what = "exactly the same as one process"
    if not exact:
        what = f"single-process training within {cell.cell.precision} rounding"
    if len(advisable) == 1:
        return f"the only one here that {one} {what}"
    parts = [f"the fastest of {len(advisable)} that {several} {what}"]
    if baseline is cell:
        parts.append("the usual choice itself")
    elif baseline is not None and (ratio := compare(cell, baseline, CONFIDENCE)):
        parts.append(f"{change(ratio)} than {baseline.cell.label}")
    return ", ".join(parts)


def _as_good(cell: CellResult, ties: Sequence[CellResult]) -> str:
    others = [tie for tie in ties if tie is not cell]
    equal = [tie for tie in others if _equal(tie, cell)]
    rest = [tie for tie in others if tie not in equal]
    parts = []
    if equal:
        parts.append(f"equal to it within {EQUAL * 100:.0f} %: {named(equal)}")
    if rest:
        parts.append(f"tied with it: {named(rest)}")
    return "; ".join(parts)


def _equal(cell: CellResult, other: CellResult) -> bool:
    """Whether the interval, not just the ratio, is within `EQUAL`."""
    ratio = compare(cell, other, CONFIDENCE)
    if ratio is None or ratio.low is None or ratio.high is None:
        return False
    return ratio.low >= 1 - EQUAL and ratio.high <= 1 + EQUAL


def _ratio(cell: CellResult, other: CellResult) -> float:
    return (cell.speed.samples_per_second or 0.0) / (other.speed.samples_per_second or 1.0)


def _faster(cell: CellResult, other: CellResult) -> bool:
    ratio = compare(cell, other)
    return ratio is not None and ratio.verdict == "faster" and ratio.ratio > 1 + EQUAL


def _price(cell: CellResult, fastest: CellResult) -> str:
    ratio = compare(cell, fastest, CONFIDENCE)
    words = f"{change(ratio)} than {fastest.cell.label}" if ratio else "faster"
    reason = cell.parity.reason or "another training"
    if cell.parity.fp32_twin not in ("", "exact"):
        reason = f"its fp32 run is not exact either ({cell.parity.fp32_twin})"
    deviation = cell.parity.max_loss_deviation
    off = "" if deviation is None else f"; its loss was off by {deviation:.1e} at most"
    return f"{words}, at the price of another training: {reason}{off}"


def _frugal(cells: Sequence[CellResult]) -> CellResult | None:
    """Breaks ties by speed."""
    known = [cell for cell in cells if cell.memory.peak_memory_bytes is not None]
    return min(
        known,
        key=lambda cell: (
            cell.memory.peak_memory_bytes or 0,
            -(cell.speed.samples_per_second or 0.0),
        ),
        default=None,
    )


def _memory(cell: CellResult, fastest: CellResult) -> str:
    peak = cell.memory.peak_memory_bytes or 0
    words = f"{peak / MIB:,.0f} MiB on its fullest device"
    if cell is fastest or not fastest.memory.peak_memory_bytes:
        return words
    less = 1 - peak / fastest.memory.peak_memory_bytes
    other = "" if cell.parity.same_training else ", and not exactly the same training"
    return (
        f"{words}, {less * 100:.0f} % less than {fastest.cell.label}, at"
        f" {_ratio(cell, fastest) * 100:.0f} % of its throughput{other}"
    )


def complexity(cell: CellResult) -> tuple[int, int, str]:
    """Returns a sort key: packages besides torch, then non-default options."""
    axes = sum(cell.cell.is_set(name) for name in ("launcher", *TECHNIQUES))
    return len(cell.placement.packages), len(cell.cell.options) + axes, cell.cell.label


def _simplest(cells: Sequence[CellResult]) -> CellResult:
    """Returns the least complex cell about as fast as the first. `cells`: fastest first."""
    near = [cell for cell in cells if _ratio(cell, cells[0]) >= 1 - NEARLY_AS_FAST]
    return min(near, key=complexity)


def _simple(cell: CellResult, fastest: CellResult) -> str:
    _, options, _ = complexity(cell)
    libraries = "".join(f" and {package}" for package in cell.placement.packages)
    ratio = compare(cell, fastest, CONFIDENCE)
    speed = f"{change(ratio)} than {fastest.cell.label}" if ratio else "about as fast"
    given = f"{options or 'no'} option{'' if options == 1 else 's'}"
    return f"needs torch{libraries}, with {given}; {speed}"
