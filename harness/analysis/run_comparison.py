"""Comparison of two runs, folders or cells of one run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from harness.analysis.compared_cell import KINDS, MEMORY_EFFECT, REGRESSIONS, ComparedCell
from harness.analysis.stats import ACROSS_RUNS_CONFIDENCE, SMALLEST_EFFECT

RUNS_METHOD = (
    "geometric mean of B's throughputs over that of A's, each trial (independent launch) counted"
    " once, with Welch's t interval of their logarithms (Biometrika 34, 1947),"
    f" {ACROSS_RUNS_CONFIDENCE * 100:g} %; two runs have no rounds in common, so what the machine"
    " did differently meanwhile is in the ratio"
)
FALSE_ALARM_RATE = round(1 - ACROSS_RUNS_CONFIDENCE, 6)
MEMORY_METHOD = (
    "the same test of the fullest rank's peak, where both sides measured it in the same way"
)


@dataclass(frozen=True)
class RunComparison:
    """Comparison of B with A; regressions first."""

    first: str
    second: str
    lines: tuple[ComparedCell, ...]
    test: str
    differences: tuple[str, ...] = ()
    """Descriptions of software that differs."""

    @property
    def comparisons(self) -> int:
        """Number of comparisons, of throughput and of peak memory."""
        return sum((line.throughput is not None) + (line.memory is not None) for line in self.lines)

    @property
    def regressions(self) -> list[ComparedCell]:
        return [line for line in self.lines if line.regression]

    @property
    def headline(self) -> str:
        """Text such as `2 regressions: slower 1, missing 1. Besides: faster 1, no difference seen
        12`; within a run, counts of verdicts."""
        if self.test != RUNS_METHOD:
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
        """Description of the method, for every output format."""
        count, one_in = self.comparisons, round(1 / FALSE_ALARM_RATE)
        return {
            "Test": self.test,
            "Peak memory": MEMORY_METHOD,
            "Smallest effect that counts": (
                f"{SMALLEST_EFFECT * 100:g} % in throughput, {MEMORY_EFFECT * 100:g} % in peak"
                " memory"
            ),
            "False alarms": (
                f"at most one in {one_in} comparisons between equals; {count} were made here, so up"
                f" to {count * FALSE_ALARM_RATE:.2g} are to be expected"
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
            "false_alarm_rate": FALSE_ALARM_RATE,
            "memory_test": MEMORY_METHOD,
            "memory_smallest_effect": MEMORY_EFFECT,
            "differences": list(self.differences),
            "cells": [line.as_json() for line in self.lines],
        }


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())
