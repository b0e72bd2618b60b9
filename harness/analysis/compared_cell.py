"""Comparison of one cell between two runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from harness.analysis.selection import MeasuredCell
from harness.analysis.stats import Comparison

MEMORY_EFFECT = 0.05
"""Smallest relative difference in peak memory that counts."""

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
KINDS: tuple[Kind, ...] = get_args(Kind)
REGRESSIONS = KINDS[:6]
MemoryVerdict = Literal["more memory", "less memory", "no difference seen"]


@dataclass(frozen=True)
class ComparedCell:
    """Comparison of one cell: B, the second, against A, the first."""

    kind: Kind
    cell_name: str
    first: MeasuredCell | None
    second: MeasuredCell | None
    reason: str = ""
    """Explanation; empty if the throughputs are compared."""
    throughput: Comparison | None = None
    """Throughput of B over A."""
    memory: Comparison | None = None
    """Peak memory of B over A; None if unknown or measured differently."""

    @property
    def memory_verdict(self) -> MemoryVerdict | None:
        if self.memory is None:
            return None
        small = abs(self.memory.ratio - 1) < MEMORY_EFFECT
        if small or self.memory.verdict == "no difference seen":
            return "no difference seen"
        return "more memory" if self.memory.ratio > 1 else "less memory"

    @property
    def regression(self) -> bool:
        return self.kind in REGRESSIONS or self.memory_verdict == "more memory"

    @property
    def verdict(self) -> str:
        """Description of the change in throughput and memory."""
        alone = self.throughput is not None and self.throughput.low is None
        verdict = f"{self.kind}{' (one trial: no interval)' if alone else ''}"
        if self.memory_verdict in (None, "no difference seen"):
            return verdict
        return f"{verdict}, {self.memory_verdict}"

    @property
    def disturbed(self) -> list[str]:
        """Texts such as `A, trial 2: 1.30 cores used by others`."""
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
