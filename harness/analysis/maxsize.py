"""What a search for the largest model, or the longest sequence, found for one strategy, and what
filled the memory."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from harness.record.search import KINDS


@dataclass(frozen=True)
class Holding:
    """What a rank held when it ran out of memory, in bytes (see harness/measure/oom.py)."""

    in_use: float
    """In all."""
    kinds: Mapping[str, float]
    """States by kind."""
    other: float = 0.0
    """Other tensors."""
    stacks: float = 0.0
    """Stacks of threads."""
    buffers: Mapping[str, float] = field(default_factory=dict)
    """The library's by name."""
    largest: tuple[str, ...] = ()
    """The largest of the other tensors, in words."""


@dataclass(frozen=True)
class MaxsizeResult:
    """What the search found for one strategy: a row of the table."""

    label: str
    status: str
    """found, none fits, all fit, unfinished, stopped (a probe failed for another reason than
    memory), unavailable, refused."""
    reason: str
    workload: str
    budget: int
    tokens: bool = False
    """Whether sequences grew, and the sizes below are tokens; else the model did, and they are
    parameters."""
    step: int | None = None
    """Parameters of one search step."""
    parameters: int | None = None
    """Of the largest model that trains."""
    next_parameters: int | None = None
    """Of the smallest that does not."""
    predicted: int | None = None
    """Parameters that the formula's states allow."""
    peak_memory_bytes: int | None = None
    setup_peak_memory_bytes: int | None = None
    parity: str | None = None
    kept: Mapping[str, int] = field(default_factory=dict)
    """Bytes of the fullest rank between steps, by kind."""
    buffers: Mapping[str, int] = field(default_factory=dict)
    """The library's by name."""
    failed_in: str | None = None
    """What the smallest model that does not train ran out of memory in."""
    failure: str = ""
    """How it failed otherwise, though only under the limit."""
    holding: Holding | None = None
    """What a rank held then."""
    formula: Mapping[str, float] = field(default_factory=dict)
    """What the formula gives for that model."""
    probes: int = 0
    seconds: float = 0.0

    @property
    def largest_model(self) -> str:
        """`50.1M`, `4096 tokens`, or what stands in its place."""
        return self.text(self.parameters) if self.parameters else self.status

    def text(self, size: int) -> str:
        """A size in words: parameters, or tokens."""
        return f"{size} tokens" if self.tokens else millions(size)

    def amount(self, size: int) -> str:
        """The same with its unit."""
        return self.text(size) if self.tokens else f"{self.text(size)} parameters"

    @property
    def too_large(self) -> str:
        """The smallest size that does not train."""
        return self.amount(self.next_parameters or 0)

    @property
    def ratio(self) -> float | None:
        """Reached over predicted."""
        return self.parameters / self.predicted if self.parameters and self.predicted else None

    @property
    def fill(self) -> dict[str, float]:
        """What filled the budget where memory ran out, bytes by name: states by kind, then the
        rest; empty where nothing ran out.

        `temporaries`: what the failed operation freed again, and what it asked for. `rest`:
        activations that autograd keeps, buffers of C++, Python's heap.
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
        """What takes memory beside ZeRO's model states, largest first: name and bytes, where memory
        ran out.

        None below 1 % of the budget.
        """
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
        """Bytes by the formula; gradients may be what it files under library or transient."""
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
    """Where memory ran out and what filled it beside ZeRO's model states, in words; empty where
    nothing ran out."""
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
    """A sentence for every neighbour in a chain that does not reach more than the one before it,
    with the bytes responsible."""
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
