from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from harness.analysis.ranking import compare
from harness.analysis.selection import MeasuredCell, RunSelection
from harness.analysis.setting import grouped
from harness.analysis.stats import (
    CONTROL_MISMATCH,
    ESTIMATES_COMPARED,
    PAIR_CONFIDENCE,
    SMALLEST_EFFECT,
    Comparison,
    compare_runs,
)
from harness.cell.cell import is_script
from harness.cell.errors import UsageError
from harness.record.trial import NOT_LAUNCHED

MEMORY_EFFECT = 0.05
"""Relative difference in peak memory from which a difference counts."""
MEMORY_EFFECT_BYTES = 2 * 2**20
"""Difference in peak memory from which a difference counts. The free space in the heap that ranks
inherit from their fork server differs between runs."""

Kind = Literal[
    "slower",
    "missing",
    "newly failing",
    "newly diverged",
    "newly unavailable",
    "no longer verified",
    "faster",
    "fixed",
    "added",
    "no difference seen",
    "not compared",
]
KINDS: tuple[Kind, ...] = get_args(Kind)
REGRESSIONS = KINDS[:6]
MemoryVerdict = Literal["more memory", "less memory", "no difference seen"]


@dataclass(frozen=True)
class ComparedCell:
    kind: Kind
    cell_name: str
    first: MeasuredCell | None
    second: MeasuredCell | None
    reason: str = ""
    """Why throughputs are not compared; empty if they are."""
    throughput: Comparison | None = None
    memory: Comparison | None = None
    """Ratio of B's peak to A's; None if unknown, or if the two were measured differently."""

    @property
    def memory_verdict(self) -> MemoryVerdict | None:
        """Verdict on B's peak; None without an interval."""
        if self.memory is None or self.memory.low is None:
            return None
        sides = (self.first, self.second)
        before, after = (side.peak or 0.0 if side else 0.0 for side in sides)
        small = abs(self.memory.ratio - 1) < MEMORY_EFFECT
        small |= abs(after - before) < MEMORY_EFFECT_BYTES
        if small or self.memory.verdict == "no difference seen":
            return "no difference seen"
        return "more memory" if self.memory.ratio > 1 else "less memory"

    @property
    def regression(self) -> bool:
        return self.kind in REGRESSIONS or self.memory_verdict == "more memory"

    @property
    def verdict(self) -> str:
        alone = self.throughput is not None and self.throughput.low is None
        verdict = f"{self.kind}{' (one trial: no interval)' if alone else ''}"
        if self.memory_verdict in (None, "no difference seen"):
            return verdict
        return f"{verdict}, {self.memory_verdict}"

    @property
    def disturbed(self) -> list[str]:
        """Disturbed trials, such as `A, trial 2: 1.30 cores used by others`."""
        return [
            f"{name}, {trial}"
            for name, cell in (("A", self.first), ("B", self.second))
            if cell
            for trial in cell.result.disturbance.descriptions
        ]

    def as_json(self) -> dict[str, object]:
        speed, memory = self.throughput, self.memory
        return {
            "kind": self.kind,
            "regression": self.regression,
            "cell_name": self.cell_name,
            "reason": self.reason,
            "a": _figures(self.first),
            "b": _figures(self.second),
            "ratio": speed and speed.ratio,
            "ratio_low": speed and speed.low,
            "ratio_high": speed and speed.high,
            "trials": speed and speed.rounds,
            "memory": self.memory_verdict,
            "memory_ratio": memory and memory.ratio,
            "memory_ratio_low": memory and memory.low,
            "memory_ratio_high": memory and memory.high,
            "disturbed": self.disturbed,
        }


def _figures(cell: MeasuredCell | None) -> dict[str, object] | None:
    if cell is None:
        return None
    return {
        "run_id": cell.run_id,
        "cell_id": cell.cell_id,
        "cell_name": cell.cell_name,
        "state": cell.result.outcome,
        "trials": cell.result.recorded_trials,
        "samples_per_second": cell.speed,
        "peak_memory_bytes": cell.peak,
    }


RUNS_METHOD = (
    "geometric mean of B's throughputs over that of A's. Each trial (independent launch) counts"
    " once; if both runs have a control, its throughput is multiplied by the control's time. The"
    " interval is Welch's t of the logarithms (Biometrika 34, 1947),"
    f" {PAIR_CONFIDENCE * 100:g}%. It allows for steps that follow the machine's speed"
    f" {CONTROL_MISMATCH * 100:g}% more or less than the control does. If the torch versions"
    " differ, the interval covers the ratio with and without the control"
)
MEMORY_METHOD = (
    "ratio of the geometric means over trials of the fullest rank's peak, if both sides measured it"
    " in the same way. The interval is Welch's t of the logarithms (Biometrika 34, 1947),"
    f" {PAIR_CONFIDENCE * 100:g}%"
)


@dataclass(frozen=True)
class RunComparison:
    first: str
    second: str
    lines: tuple[ComparedCell, ...]
    test: str
    differences: tuple[str, ...] = ()
    confidence: float = PAIR_CONFIDENCE

    @property
    def false_alarm_rate(self) -> float:
        return round(1 - self.confidence, 6)

    @property
    def comparisons(self) -> int:
        return sum((line.throughput is not None) + (line.memory is not None) for line in self.lines)

    @property
    def regressions(self) -> list[ComparedCell]:
        return [line for line in self.lines if line.regression]

    @property
    def headline(self) -> str:
        """Summary such as `2 regressions: slower 1, missing 1. Besides: faster 1`."""
        if self.test == ESTIMATES_COMPARED:
            memory = [line.memory_verdict for line in self.lines]
            changed = [verdict for verdict in memory if verdict not in (None, "no difference seen")]
            return _counts(Counter([*(line.kind for line in self.lines), *map(str, changed)]))
        bad = self.regressions
        rest = Counter(line.kind for line in self.lines if not line.regression)
        kinds = Counter(line.kind if line.kind in REGRESSIONS else "more memory" for line in bad)
        headline = f"{len(bad) or 'no'} regression{'' if len(bad) == 1 else 's'}"
        if bad:
            headline += f": {_counts(kinds)}"
        if rest:
            headline += f". Besides: {_counts({k: rest[k] for k in KINDS if rest[k]})}"
        return headline

    @property
    def method(self) -> dict[str, str]:
        count, one_in = self.comparisons, round(1 / self.false_alarm_rate)
        return {
            "Test": self.test,
            "Peak memory": MEMORY_METHOD,
            "Smallest effect that counts": (
                f"{SMALLEST_EFFECT * 100:g}% in throughput, {MEMORY_EFFECT * 100:g}% and"
                f" {MEMORY_EFFECT_BYTES // 2**20} MiB in peak memory"
            ),
            "False alarms": (
                f"at most one in {one_in} comparisons of equal cells; {count} were made here, so"
                f" expect up to {count * self.false_alarm_rate:.2g}"
            ),
        }

    def as_json(self) -> dict[str, object]:
        return {
            "a": self.first,
            "b": self.second,
            "headline": self.headline,
            "regressions": len(self.regressions),
            "comparisons": self.comparisons,
            "test": self.test,
            "smallest_effect": SMALLEST_EFFECT,
            "false_alarm_rate": self.false_alarm_rate,
            "memory_test": MEMORY_METHOD,
            "memory_smallest_effect": MEMORY_EFFECT,
            "memory_smallest_effect_bytes": MEMORY_EFFECT_BYTES,
            "differences": list(self.differences),
            "cells": [line.as_json() for line in self.lines],
        }


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def compare_sides(first: RunSelection, second: RunSelection) -> RunComparison:
    """Compares B (second) with A (first) by cell. Raises UsageError if they have no cell in
    common."""

    def name_or_id(cell: MeasuredCell) -> str:
        """Returns the cell's id, or the name of a script, which its versions share."""
        return cell.cell_name if is_script(cell.cell.strategy) else cell.cell_id

    before, after = (grouped(side.cells, name_or_id) for side in (first, second))
    if not before.keys() & after.keys():
        raise UsageError(
            f"{first.name} and {second.name} have no cell in common, so there is nothing to compare"
        )
    same_control = first.software.get("torch") == second.software.get("torch")
    lines = [
        line
        for cell_id in dict.fromkeys((*before, *after))
        for line in _lines(before.get(cell_id, []), after.get(cell_id, []), same_control)
    ]
    versions = {
        name: [" or ".join(side.software.get(name, ("none",))) for side in (first, second)]
        for name in dict.fromkeys((*first.software, *second.software))
    }
    differences = tuple(
        f"{name} {was} → {now}" for name, (was, now) in versions.items() if was != now
    )
    return RunComparison(first.name, second.name, _ordered(lines), RUNS_METHOD, differences)


def compare_cells(
    run: str, pairs: Iterable[tuple[MeasuredCell, MeasuredCell]], names: tuple[str, str]
) -> RunComparison:
    lines = []
    for first, second in pairs:
        line = _line(first, second)
        if not (first.ok and second.ok):
            reason = "; ".join(
                f"{cell.label} {_why(cell)}" for cell in (first, second) if not cell.ok
            )
            line = ComparedCell("not compared", "", first, second, reason)
        name = f"{second.cell_name} against {first.label}"
        lines.append(dataclasses.replace(line, cell_name=name))
    first_name, second_name = (f"{name} of {run}" for name in names)
    return RunComparison(first_name, second_name, _ordered(lines), ESTIMATES_COMPARED)


def _ordered(lines: Iterable[ComparedCell]) -> tuple[ComparedCell, ...]:

    def order(line: ComparedCell) -> tuple[bool, int, float]:
        ratio = line.throughput.ratio if line.throughput else 0.0
        return not line.regression, KINDS.index(line.kind), ratio

    return tuple(sorted(lines, key=order))


def _why(cell: MeasuredCell) -> str:
    return f"{cell.result.outcome}: {cell.result.outcome_reason}"


def _lines(
    before: Sequence[MeasuredCell], after: Sequence[MeasuredCell], same_control: bool
) -> list[ComparedCell]:
    if not after:
        was = before[-1]
        if was.ok:
            return [ComparedCell("missing", was.cell_name, was, None, "not in B")]
        reason = f"{was.result.outcome} in A, not in B"
        return [ComparedCell("not compared", was.cell_name, was, None, reason)]
    now = after[-1]
    if not before:
        reason = "not in A" if now.ok else f"not in A; {_why(now)}"
        return [ComparedCell("added", now.cell_name, None, now, reason)]
    pairs = [(a, b) for b in after for a in before if a.comparable(b)]
    if not pairs:
        was = before[-1]
        reason = was.hardware.difference(now.hardware, now.result.cell.device)
        return [ComparedCell("not compared", now.cell_name, was, now, reason)]
    return [_line(a, b, same_control) for a, b in pairs]


def _line(was: MeasuredCell, now: MeasuredCell, same_control: bool = True) -> ComparedCell:
    if was.ok and now.ok:
        speed = compare(now.result, was.result, same_control=same_control)
        if speed is None:
            return ComparedCell("not compared", now.cell_name, was, now, "no throughput")
        return ComparedCell(speed.verdict, now.cell_name, was, now, "", speed, _memory(was, now))
    kind, reason = _change(was, now)
    return ComparedCell(kind, now.cell_name, was, now, reason)


def _memory(was: MeasuredCell, now: MeasuredCell) -> Comparison | None:
    if was.result.memory.memory_method != now.result.memory.memory_method:
        return None
    before, after = was.result.memory.peak_by_round, now.result.memory.peak_by_round
    return compare_runs([*after.values()], [*before.values()])


def _change(was: MeasuredCell, now: MeasuredCell) -> tuple[Kind, str]:
    before, after = was.result.outcome, now.result.outcome
    if now.ok:
        return "fixed", f"was {_why(was)}"
    if before == after:
        return "not compared", f"{after} in both: {now.result.outcome_reason}"
    if after == "diverged":
        return "newly diverged", _why(now)
    if after == "unverified" and was.ok:
        return "no longer verified", now.result.outcome_reason
    if after in NOT_LAUNCHED and before not in NOT_LAUNCHED:
        return "newly unavailable", _why(now)
    failing = after not in ("unverified", *NOT_LAUNCHED)
    if failing and before in ("ok", "unverified", *NOT_LAUNCHED):
        return "newly failing", _why(now)
    return "not compared", f"was {before}, now {_why(now)}"
