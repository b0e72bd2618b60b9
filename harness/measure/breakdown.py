"""Where did a step's time go?

The step, on the thread that trains, is cut wherever an event begins or ends, and each piece belongs
to one component, so that the components sum to the step. Overlapped communication is communication
in flight during pieces of other components; it is reported beside the components and is not part of
the sum.
"""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from harness.record.profile import COMPONENTS

STRAGGLES = 0.15
"""Share by which a straggler's own time exceeds the median of the other ranks' own times, at least.
"""


Kind = Literal[
    "operator",  # an operator computes on the CPU
    "flight",  # a collective from its start to its end, on any thread
    "transfer",  # a point-to-point message from its start to its end, on any thread
    "launch",  # the call that starts communication
    "hook",  # functions called when a gradient is ready, or at the end of backward
    "wait",  # the training thread waits for communication
    "optimizer",  # the optimizer's step
    "data",
    "bubble",
    "offload",
    "device compute",  # a kernel that is none of the following
    "device matmul",
    "device attention",
    "device update",  # a kernel of the optimizer's step
    "device communication",
    "device transfer",
    "device copy",
    "device optimizer",  # the device's time from the optimizer's first kernel to its last
]


_WAITS = {"wait": "communication", "bubble": "bubble", "offload": "offload", "data": "data"}


_DEVICE = {
    "device optimizer": "optimizer",
    "device update": "optimizer",
    "device matmul": "compute",
    "device attention": "compute",
    "device compute": "compute",
    "device copy": "offload",
    "device communication": "communication",
    "device transfer": "communication",
}
_COMPUTING = ("compute", "optimizer")


@dataclass(frozen=True)
class Event:
    """A stretch of time that the profiler recorded; `begin` and `end` are seconds of one clock.

    Events of one kind on one thread are nested or disjoint.
    """

    kind: Kind
    thread: int
    begin: float
    end: float


Piece = tuple[float, float, tuple[str, ...]]
"""Begin, end, and the kinds of the events that it lies in, from the outermost to the innermost."""


def stacks(events: Iterable[Event], begin: float, end: float) -> list[Piece]:
    """The pieces of [begin, end], without gaps, by the events of one thread."""
    inside = sorted(
        (e for e in events if e.end > begin and e.begin < end), key=lambda e: (e.begin, -e.end)
    )
    pieces: list[Piece] = []
    open_events: list[Event] = []
    now = begin

    def until(time: float) -> None:
        nonlocal now
        time = min(max(time, now), end)
        if time > now:
            pieces.append((now, time, tuple(e.kind for e in open_events)))
            now = time

    for event in inside:
        while open_events and open_events[-1].end <= event.begin:
            until(open_events[-1].end)
            open_events.pop()
        until(event.begin)
        open_events.append(event)
        if len(open_events) > 1 and event.end > open_events[-2].end:
            # Rounding of the clock may put the end of an inner event behind that of its outer one.
            open_events[-1] = Event(event.kind, event.thread, event.begin, open_events[-2].end)
    while open_events:
        until(open_events[-1].end)
        open_events.pop()
    until(end)
    return pieces


@dataclass(frozen=True)
class Busy:
    """The times covered by events of a kind, as disjoint intervals in order."""

    begins: list[float]
    ends: list[float]

    @classmethod
    def of(cls, events: Iterable[Event]) -> Busy:
        begins: list[float] = []
        ends: list[float] = []
        for event in sorted(events, key=lambda e: e.begin):
            if ends and event.begin <= ends[-1]:
                ends[-1] = max(ends[-1], event.end)
            else:
                begins.append(event.begin)
                ends.append(event.end)
        return cls(begins, ends)

    def at(self, time: float) -> bool:
        place = bisect.bisect_right(self.begins, time) - 1
        return place >= 0 and time < self.ends[place]


def breakdown(
    events: Sequence[Event], thread: int, begin: float, end: float, *, pipeline: bool, alone: bool
) -> dict[str, float]:
    """Seconds of each component of the step [begin, end] on `thread`, and beside them `overlapped`
    and `operators`, the seconds in which an operator ran.

    A device's kernels decide before the events of its host, and of the host's events the innermost
    one. Where no operator runs, the time belongs to what the thread waits for; to communication
    where a collective is in flight or a gradient's hooks run; else it is the time of the
    interpreter and the dispatcher, which counts as the optimizer's inside its step and as compute
    elsewhere. `pipeline`: waiting for a point-to-point message is the bubble. `alone`: there is no
    other rank.
    """
    near = [e for e in events if e.end > begin and e.begin < end]
    flight = Busy.of(e for e in near if e.kind in ("flight", "device communication"))
    transfer = Busy.of(e for e in near if e.kind in ("transfer", "device transfer"))
    computes = ("operator", *(k for k, part in _DEVICE.items() if part in _COMPUTING))
    operators = Busy.of(e for e in near if e.kind in computes)
    device = {
        kind: Busy.of(e for e in near if e.kind == kind)
        for kind in _DEVICE
        if any(e.kind == kind for e in near)
    }
    host = stacks(
        (
            e
            for e in near
            if e.thread == thread and e.kind not in ("flight", "transfer") and e.kind not in _DEVICE
        ),
        begin,
        end,
    )
    cuts = sorted(
        {
            t
            for e in near
            if e.kind in ("flight", "transfer", "operator", *_DEVICE)
            for t in (e.begin, e.end)
        }
    )
    seconds = dict.fromkeys((*COMPONENTS, "overlapped", "operators"), 0.0)
    for first, last, kinds in host:
        edges = [
            first,
            *cuts[bisect.bisect_right(cuts, first) : bisect.bisect_left(cuts, last)],
            last,
        ]
        for a, b in itertools.pairwise(edges):
            middle = (a + b) / 2
            in_flight, passing = flight.at(middle), transfer.at(middle)
            component = next(
                (_DEVICE[kind] for kind, busy in device.items() if busy.at(middle)), None
            )
            component = component or _component(kinds, in_flight, alone)
            if component == "communication" and pipeline and passing and not in_flight:
                component = "bubble"
            seconds[component] += b - a
            if in_flight and component not in ("communication", "bubble"):
                seconds["overlapped"] += b - a
            if operators.at(middle):
                seconds["operators"] += b - a
    return seconds


def _component(kinds: tuple[str, ...], in_flight: bool, alone: bool) -> str:
    """The component of a piece, from the kinds of the events that the training thread is in."""
    if "data" in kinds:
        return "data"
    updating = "optimizer" in kinds
    for kind in reversed(kinds):
        if kind in _WAITS:
            return _WAITS[kind]
        if kind == "operator":
            return "optimizer" if updating else "compute"
        if kind in ("launch", "hook") and not alone:
            return "communication"
        if kind == "optimizer":
            break
    if in_flight:
        return "communication"
    return "optimizer" if updating else "compute"


def own_seconds(step: dict[str, float]) -> float:
    """Seconds of a step, given by component, that a rank did not spend waiting for others."""
    return sum(
        step[component] for component in COMPONENTS if component not in ("communication", "bubble")
    )


def straggler(steps: Sequence[Sequence[float]]) -> tuple[int, float] | None:
    """The rank that is the slowest in every step, and by what share it exceeds the median of the
    other ranks (median over the steps); None where there is no such rank, or the share is at most
    STRAGGLES.

    `steps`: for each step the own seconds of each rank.
    """
    slowest = {max(range(len(own)), key=lambda rank: own[rank]) for own in steps if len(own) > 1}
    if len(slowest) != 1:
        return None
    (rank,) = slowest
    others = [statistics.median([*own[:rank], *own[rank + 1 :]]) for own in steps]
    excess = statistics.median(
        own[rank] / other - 1 if other else 0.0 for own, other in zip(steps, others, strict=True)
    )
    return (rank, excess) if excess > STRAGGLES else None
