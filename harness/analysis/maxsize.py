"""Results of a search for the largest model or longest sequence."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from harness.record.search import KINDS


@dataclass(frozen=True)
class Holding:
    """Memory of a rank when it ran out, in bytes (see harness/measure/oom.py)."""

    in_use: float
    """Total."""
    kinds: Mapping[str, float]
    """Model states by kind."""
    other: float = 0.0
    stacks: float = 0.0
    buffers: Mapping[str, float] = field(default_factory=dict)
    """Library buffers by name."""
    largest: tuple[str, ...] = ()
    """Descriptions of the largest other tensors."""


@dataclass(frozen=True)
class MaxsizeResult:
    """Row of the table: the search result of one strategy."""

    label: str
    status: str
    """One of found, none fits, all fit, unfinished, stopped (a probe failed for another reason than
    memory), unavailable and refused."""
    reason: str
    workload: str
    budget: int
    tokens: bool = False
    """Whether sizes are tokens of a sequence instead of parameters."""
    step: int | None = None
    """Parameters of one search step."""
    parameters: int | None = None
    """Size of the largest model that trains."""
    next_parameters: int | None = None
    """Size of the smallest model that does not train."""
    predicted: int | None = None
    """Parameters that fit by the formula."""
    peak_memory_bytes: int | None = None
    setup_peak_memory_bytes: int | None = None
    parity: str | None = None
    kept: Mapping[str, int] = field(default_factory=dict)
    """Bytes of the fullest rank between steps, by kind."""
    buffers: Mapping[str, int] = field(default_factory=dict)
    """Library buffers in bytes, by name."""
    failed_in: str | None = None
    """Operation in which the next larger model ran out of memory."""
    failure: str = ""
    """Other failure of the next larger model, only under the limit."""
    holding: Holding | None = None
    """Memory of a rank when it ran out."""
    formula: Mapping[str, float] = field(default_factory=dict)
    """Bytes of the next larger model by kind, by the formula."""
    probes: int = 0
    seconds: float = 0.0

    @property
    def largest_model(self) -> str:
        """Text such as `50.1M` or `4096 tokens`, or the status."""
        return self.text(self.parameters) if self.parameters else self.status

    def text(self, size: int) -> str:
        return f"{size} tokens" if self.tokens else millions(size)

    def amount(self, size: int) -> str:
        return self.text(size) if self.tokens else f"{self.text(size)} parameters"

    @property
    def too_large(self) -> str:
        return self.amount(self.next_parameters or 0)

    @property
    def ratio(self) -> float | None:
        """Largest size over predicted size."""
        return self.parameters / self.predicted if self.parameters and self.predicted else None

    @property
    def fill(self) -> dict[str, float]:
        """Bytes by name of what filled the budget: states by kind, then the rest. Empty if memory
        did not run out.

        `temporaries`: what the failed operation freed, and what it asked for. `rest`: activations
        that autograd keeps, C++ buffers, Python's heap.
        """
        if self.holding is None:
            return {}
        sizes = dict(self.holding.kinds)
        sizes["other tensors"] = self.holding.other
        sizes["stacks of threads"] = self.holding.stacks
        sizes["rest"] = max(0.0, self.holding.in_use - sum(sizes.values()))
        sizes["temporaries"] = max(0.0, self.budget - self.holding.in_use)
        return sizes

    @property
    def responsible(self) -> list[tuple[str, float]]:
        """Name and bytes of memory beyond ZeRO's model states, largest first, from 1 % of the
        budget. Empty if memory did not run out."""
        if self.holding is None:
            return []
        fill = self.fill
        largest = ", ".join(self.holding.largest)
        names = {
            "other tensors": f"other tensors ({largest})" if largest else "other tensors",
            "temporaries": f"temporaries of {self.failed_in}",
            "rest": "activations, buffers of C++ and Python's heap",
        }
        beyond = {names.get(name, name): n for name, n in fill.items() if name not in KINDS}
        beyond |= self.holding.buffers
        if self.formula:
            for kind in KINDS[:3]:
                beyond[f"{kind} beyond the formula's"] = fill[kind] - self._expected(kind)
        large = [(name, size) for name, size in beyond.items() if size >= self.budget / 100]
        return sorted(large, key=lambda part: -part[1])

    def _expected(self, kind: str) -> float:
        """Returns formula bytes; gradients may be what it counts as library or transient."""
        if kind != "gradients":
            return self.formula[kind]
        held = self.holding.kinds["library"] if self.holding else 0.0
        missing = max(0.0, self.formula["library"] - held)
        return self.formula[kind] + self.formula["transient"] + missing


def millions(parameters: int) -> str:
    return f"{parameters / 1e6:.1f}M"


def mebibytes(size: float) -> str:
    return f"{size / 2**20:.0f} MiB"


def limits(row: MaxsizeResult) -> str:
    """Describes where memory ran out and what filled it; empty if it did not."""
    sentences = []
    if row.failed_in:
        beyond = ", ".join(f"{name} {mebibytes(size)}" for name, size in row.responsible)
        sentences.append(
            f"{row.too_large} run out of memory in {row.failed_in};"
            f" beside ZeRO's model states: {beyond}"
        )
    elif row.failure:
        sentences.append(f"{row.too_large} fail under the limit only: {row.failure}")
    setup, steps = row.setup_peak_memory_bytes or 0, row.peak_memory_bytes or 0
    if row.parameters and setup > steps and not row.tokens:
        whole = f"every rank first builds the whole model, {mebibytes(4 * row.parameters)}"
        sentences.append(
            f"at {row.largest_model} set-up takes {mebibytes(setup)}, more than the steps'"
            f" {mebibytes(steps)}: {whole}"
        )
    return "; ".join(sentences)


def order_notes(rows: Sequence[MaxsizeResult], order: Sequence[Sequence[str]]) -> list[str]:
    """Describes each model in a chain that is no larger than its predecessor, with the bytes
    responsible."""
    by_label = {row.label: row for row in rows if row.parameters}
    notes = []
    for chain in order:
        present = [by_label[label] for label in chain if label in by_label]
        for less, more in itertools.pairwise(present):
            if (more.parameters or 0) <= (less.parameters or 0):
                notes.append(
                    f"not the theory's order: {more.label} reaches {more.largest_model}, no more"
                    f" than {less.label} with {less.largest_model}. {more.label}: {limits(more)}."
                    f" {less.label}: {limits(less)}"
                )
    return notes
