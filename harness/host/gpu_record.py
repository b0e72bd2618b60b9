"""GPU data in a trial's row, and reasons to doubt its times."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from harness.host.gpu_state import GpuState, GpuUse

_THROTTLED_SHARE = 0.01
"""Share of the timed seconds throttled by heat above which a trial is marked."""


GIB = 2**30


def as_json(states: Sequence[GpuState] | Sequence[GpuUse]) -> str | None:
    """Serializes a column; None if there are no states."""
    return json.dumps([asdict(state) for state in states]) if states else None


def use_of(fields: Mapping[str, object]) -> GpuUse:
    """Builds a GpuUse from its fields, with lists for tuples; raises pydantic's ValidationError."""
    return TypeAdapter(GpuUse).validate_python(fields)


@functools.cache
def _states() -> TypeAdapter[tuple[GpuState, ...]]:
    return TypeAdapter(tuple[GpuState, ...])


@functools.cache
def _uses() -> TypeAdapter[tuple[GpuUse, ...]]:
    return TypeAdapter(tuple[GpuUse, ...])


@dataclass(frozen=True)
class GpuFinding:
    """A reason to doubt a trial's times on GPUs."""

    cause: Literal["shared", "throttled"]
    words: str


@dataclass(frozen=True)
class GpuRecord:
    before: tuple[GpuState, ...] = ()
    after: tuple[GpuState, ...] = ()
    use: tuple[GpuUse, ...] = ()
    """GPU use by rank."""

    @classmethod
    def read(cls, before: object, after: object, use: object) -> GpuRecord:
        """Parses the three columns of a row; empty if null or in another format."""
        first, last, of_ranks = (
            text if isinstance(text, str) else "[]" for text in (before, after, use)
        )
        try:
            return cls(
                _states().validate_json(first),
                _states().validate_json(last),
                _uses().validate_json(of_ranks),
            )
        except ValidationError:
            return cls()

    @property
    def unanswered(self) -> list[str]:
        """Sentences about the ranks for which NVML did not answer."""
        return [
            f"rank {rank}: NVML did not answer; energy, clocks and process memory are unknown"
            for rank, use in enumerate(self.use)
            if not use.nvml_answers
        ]

    def findings(self) -> list[GpuFinding]:
        """Returns the reasons to doubt the trial's times; unknown values are no reason."""
        around = _around("just before", self.before) + _around("just after", self.after)
        return around + _during(self.use)


def _around(when: str, states: Iterable[GpuState]) -> list[GpuFinding]:
    findings = []
    for state in states:
        others = state.processes or ()
        if sizes := [process.memory_bytes for process in others if process.memory_bytes]:
            who = "another process" if len(sizes) == 1 else f"{len(sizes)} other processes"
            words = f"GPU {state.index} {when}: {who} with {sum(sizes) / GIB:.1f} GiB"
            findings.append(GpuFinding("shared", words))
        if state.slowed:
            words = f"GPU {state.index} {when}: {_heat(state)}"
            findings.append(GpuFinding("throttled", words))
    return findings


def _heat(state: GpuState) -> str:
    degrees = state.temperature_celsius
    return ", ".join(state.slowed) + ("" if degrees is None else f" at {degrees} °C")


def _during(uses: Iterable[GpuUse]) -> list[GpuFinding]:
    words = []
    for rank, use in enumerate(uses):
        held = use.throttled_seconds or {}
        least = _THROTTLED_SHARE * use.counted_seconds
        if held.get("temperature", 0.0) > least:
            words.append(f"rank {rank}: held back by heat for {_of(held['temperature'], use)}")
        for state in use.states:
            if state.slowed:
                words.append(f"GPU {state.index} in the timed steps: {_heat(state)}")
            capped = held.get("power", 0.0) > least or "power cap" in (state.reasons or ())
            if capped and state.power_limit_lowered:
                words.append(f"GPU {state.index}: {_limit(state)}")
    return [GpuFinding("throttled", text) for text in words]


def _limit(state: GpuState) -> str:
    now, default = state.power_limit_watts, state.default_power_limit_watts
    return f"held back by a power limit of {now:.0f} W, where {default:.0f} W is the default"


def _of(seconds: float, use: GpuUse) -> str:
    return f"{seconds:.1f} of {use.counted_seconds:.1f} timed seconds"
