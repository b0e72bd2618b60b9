"""Two runs, two folders or two cells of one run -> what became slower or faster, fails, is missing,
needs more memory."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from harness.analysis.selection import Measured, RunSelection, joined
from harness.analysis.stats import (
    COMPARED_CONFIDENCE,
    COMPARISON_METHOD,
    SMALLEST_EFFECT,
    Comparison,
    compare_rounds,
    compare_runs,
    within_rounds,
)
from harness.record.status import NOT_LAUNCHED
from harness.spec.errors import UsageError

RUNS_METHOD = (
    "geometric mean of B's throughputs over that of A's, each trial (independent launch) counted"
    " once, with Welch's t interval of their logarithms (Biometrika 34, 1947),"
    f" {COMPARED_CONFIDENCE * 100:g} %; two runs have no rounds in common, so what the machine did"
    " differently meanwhile is in the ratio"
)
FALSE_ALARM_RATE = round(1 - COMPARED_CONFIDENCE, 6)
MEMORY_EFFECT = 0.05
MEMORY_METHOD = (
    "the same test of the fullest rank's peak, where both sides measured it in the same way"
)

Kind = Literal[
    "slower",
    "missing",
    "newly failing",
    "newly diverged",
    "newly unavailable",
    "no longer verified",
    "faster",
    "mended",
    "added",
    "no difference seen",
    "not compared",
]
KINDS: tuple[Kind, ...] = Kind.__args__  # type: ignore[attr-defined]
REGRESSIONS = KINDS[:6]
MemoryVerdict = Literal["more memory", "less memory", "no difference seen"]


@dataclass(frozen=True)
class ComparedCell:
    """What became of one cell."""

    kind: Kind
    cell_name: str
    first: Measured | None
    second: Measured | None
    said: str = ""
    """Reason, in words."""
    throughput: Comparison | None = None
    """B over A."""
    memory: Comparison | None = None
    """The same of peak memory. None: unknown, or measured in another way."""

    @property
    def memory_verdict(self) -> MemoryVerdict | None:
        if self.memory is None:
            return None
        if (
            self.memory.verdict == "no difference seen"
            or abs(self.memory.ratio - 1) < MEMORY_EFFECT
        ):
            return "no difference seen"
        return "more memory" if self.memory.ratio > 1 else "less memory"

    @property
    def regression(self) -> bool:
        return self.kind in REGRESSIONS or self.memory_verdict == "more memory"

    @property
    def verdict(self) -> str:
        """All findings in words."""
        alone = self.throughput is not None and self.throughput.low is None
        said = f"{self.kind}{' (one trial: no interval)' if alone else ''}"
        return (
            said
            if self.memory_verdict in (None, "no difference seen")
            else f"{said}, {self.memory_verdict}"
        )

    @property
    def disturbed(self) -> list[str]:
        return [
            f"{name}, {said}"
            for name, one in (("A", self.first), ("B", self.second))
            if one
            for said in one.disturbed
        ]

    def as_json(self) -> dict[str, Any]:
        def figures(one: Measured | None) -> dict[str, Any] | None:
            if one is None:
                return None
            facts = {
                "run_id": one.run_id,
                "cell_id": one.cell_id,
                "cell_name": one.cell_name,
                "state": one.state,
                "trials": one.trials,
            }
            return {**facts, "samples_per_second": one.speed, "peak_memory_bytes": one.peak}

        speed, memory = self.throughput, self.memory
        return {
            "kind": self.kind,
            "regression": self.regression,
            "cell_name": self.cell_name,
            "reason": self.said,
            "a": figures(self.first),
            "b": figures(self.second),
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


@dataclass(frozen=True)
class RunComparison:
    """A comparison: B against A, regressions first."""

    first: str
    second: str
    lines: tuple[ComparedCell, ...]
    test: str
    differences: tuple[str, ...] = ()
    """Software that is not the same, in words."""

    @property
    def comparisons(self) -> int:
        """Of throughput and of peak memory."""
        return sum((line.throughput is not None) + (line.memory is not None) for line in self.lines)

    @property
    def regressions(self) -> list[ComparedCell]:
        return [line for line in self.lines if line.regression]

    @property
    def headline(self) -> str:
        """`2 regressions: slower 1, missing 1.

        Besides: faster 1, no difference seen 12`; of cells of one run, what B is.
        """
        if self.test.startswith(COMPARISON_METHOD):
            memory = [
                line.memory_verdict
                for line in self.lines
                if line.memory_verdict not in (None, "no difference seen")
            ]
            return _counts(Counter([*(line.kind for line in self.lines), *map(str, memory)]))
        bad, rest = (
            self.regressions,
            Counter(line.kind for line in self.lines if not line.regression),
        )
        what = Counter(line.kind if line.kind in REGRESSIONS else "more memory" for line in bad)
        number = f"{len(bad) or 'no'} regression{'' if len(bad) == 1 else 's'}"
        said = number + (f": {_counts(what)}" if bad else "")
        return said + (
            f". Besides: {_counts({kind: rest[kind] for kind in KINDS if rest[kind]})}"
            if rest
            else ""
        )

    @property
    def method(self) -> dict[str, str]:
        """How it was decided: every format says this."""
        many, one_in = self.comparisons, round(1 / FALSE_ALARM_RATE)
        return {
            "Test": self.test,
            "Peak memory": MEMORY_METHOD,
            "Smallest effect that counts": (
                f"{SMALLEST_EFFECT * 100:g} % in throughput, {MEMORY_EFFECT * 100:g} % in peak"
                " memory"
            ),
            "False alarms": (
                f"at most one in {one_in} comparisons between equals; {many} were made here, so up"
                f" to {many * FALSE_ALARM_RATE:.2g} are to be expected"
            ),
        }

    def as_json(self) -> dict[str, Any]:
        return {
            "a": self.first,
            "b": self.second,
            "headline": self.headline,
            "regressions": len(self.regressions),
            "comparisons": self.comparisons,
            "test": self.test,
            "smallest_effect": SMALLEST_EFFECT,
            "false_alarm_rate": FALSE_ALARM_RATE,
            "memory_test": MEMORY_METHOD,
            "memory_smallest_effect": MEMORY_EFFECT,
            "differences": list(self.differences),
            "cells": [line.as_json() for line in self.lines],
        }


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def compare_sides(first: RunSelection, second: RunSelection) -> RunComparison:
    """B (second) against A (first), cell by cell.

    Raises UsageError where they have no cell in common.
    """
    every = joined([*first.cells, *second.cells])
    first = dataclasses.replace(first, cells=tuple(every[: len(first.cells)]))
    second = dataclasses.replace(second, cells=tuple(every[len(first.cells) :]))
    before, after = ({one.cell_id for one in one_side.cells} for one_side in (first, second))
    if not before & after:
        raise UsageError(
            f"{first.name} and {second.name} have no cell in common, so there is nothing to compare"
        )
    lines: list[ComparedCell] = []
    for cell_id in dict.fromkeys(one.cell_id for one in (*first.cells, *second.cells)):
        lines += _lines(
            *(
                [one for one in one_side.cells if one.cell_id == cell_id]
                for one_side in (first, second)
            )
        )
    names = dict.fromkeys((*first.software, *second.software))
    told = {
        name: [" or ".join(one.software.get(name, ("none",))) for one in (first, second)]
        for name in names
    }
    differences = tuple(f"{name} {was} → {now}" for name, (was, now) in told.items() if was != now)
    return RunComparison(first.name, second.name, _ordered(lines), RUNS_METHOD, differences)


def compare_cells(
    run: str, pairs: Iterable[tuple[Measured, Measured]], names: tuple[str, str]
) -> RunComparison:
    """Cells of one run against each other, by the ratio within its rounds."""
    lines = []
    for one, two in pairs:
        line = _line(one, two, one_run=True)
        if not (one.ok and two.ok):
            said = "; ".join(
                f"{side.label} {side.state}: {side.reason}" for side in (one, two) if not side.ok
            )
            line = ComparedCell("not compared", "", one, two, said)
        lines.append(dataclasses.replace(line, cell_name=f"{two.cell_name} against {one.label}"))
    test = within_rounds(any(line.first and line.first.turns for line in lines))
    return RunComparison(f"{names[0]} of {run}", f"{names[1]} of {run}", _ordered(lines), test)


def _ordered(lines: Iterable[ComparedCell]) -> tuple[ComparedCell, ...]:
    """Regressions first, then by kind; of one kind the largest loss first."""
    return tuple(
        sorted(
            lines,
            key=lambda x: (
                not x.regression,
                KINDS.index(x.kind),
                x.throughput.ratio if x.throughput else 0.0,
            ),
        )
    )


def _lines(before: Sequence[Measured], after: Sequence[Measured]) -> list[ComparedCell]:
    """A cell's lines: one for each hardware that both sides have it on."""
    if not after:
        was = before[-1]
        if was.ok:
            return [ComparedCell("missing", was.cell_name, was, None, "not in B")]
        return [
            ComparedCell("not compared", was.cell_name, was, None, f"{was.state} in A, not in B")
        ]
    now = after[-1]
    if not before:
        return [
            ComparedCell(
                "added",
                now.cell_name,
                None,
                now,
                "not in A" if now.ok else f"not in A; {now.state}: {now.reason}",
            )
        ]
    pairs = [
        (one, two)
        for two in after
        for one in before
        if not one.hardware.difference(two.hardware, two.device)
    ]
    if not pairs:
        return [
            ComparedCell(
                "not compared",
                now.cell_name,
                before[-1],
                now,
                before[-1].hardware.difference(now.hardware, now.device),
            )
        ]
    return [_line(one, two, one_run=False) for one, two in pairs]


def _line(was: Measured, now: Measured, one_run: bool) -> ComparedCell:
    """One cell on equal hardware.

    Parity and failures decide first, speed second. `one_run`: compared within its rounds.
    """
    kind: Kind = "not compared"
    if was.ok and now.ok:
        if one_run:
            speed, memory = (
                compare_rounds(now.speeds, was.speeds, (now.turns, was.turns)),
                compare_rounds(now.peaks, was.peaks),
            )
        else:
            sides = (now.speeds, was.speeds), (now.peaks, was.peaks)
            speed, memory = (compare_runs(list(b.values()), list(a.values())) for b, a in sides)
        if speed is None:
            return ComparedCell(kind, now.cell_name, was, now, "no round in common")
        memory = memory if was.memory_method == now.memory_method else None
        return ComparedCell(speed.verdict, now.cell_name, was, now, "", speed, memory)
    said = f"{now.state}: {now.reason}"
    if now.ok:
        kind, said = "mended", f"was {was.state}: {was.reason}"
    elif now.state == was.state:
        said = f"{now.state} in both: {now.reason}"
    elif now.state == "diverged":
        kind = "newly diverged"
    elif now.state == "unverified":
        if was.ok:
            kind, said = "no longer verified", now.reason
    elif now.state in NOT_LAUNCHED:
        if was.state not in NOT_LAUNCHED:
            kind = "newly unavailable"
    elif was.ok or was.state == "unverified" or was.state in NOT_LAUNCHED:
        kind = "newly failing"
    if kind == "not compared" and now.state != was.state:
        said = f"was {was.state}, now {said}"
    return ComparedCell(kind, now.cell_name, was, now, said)
