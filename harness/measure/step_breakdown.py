"""Breakdown of a step's time by component, and of a GPU's time by kind of kernel.

The training thread's step is cut at event boundaries into pieces with one component each.
Overlapped communication is reported separately. Kernels are classified by name.
"""

from __future__ import annotations

import bisect
import itertools
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from harness.record.profile_record import COMPONENTS, GPU_PARTS

STRAGGLES = 0.15
"""Minimum excess of a straggler's time over the other ranks' median, as a share of it."""
Kind = Literal[
    "operator",  # an operator computes on the CPU
    "flight",  # a collective from start to end, on any thread
    "transfer",  # a point-to-point message from start to end, on any thread
    "launch",  # the call that starts communication
    "hook",  # gradient-ready or end-of-backward hooks
    "wait",  # the training thread waits for communication
    "optimizer",  # the optimizer's step
    "data",
    "bubble",
    "offload",
    "device compute",  # any other kernel
    "device matmul",
    "device attention",
    "device update",  # a kernel of the optimizer's step
    "device communication",
    "device transfer",
    "device copy",
    "device data",  # the batch's copy to the device
    "device optimizer",  # from the optimizer's first kernel to its last
]
_WAITS = {"wait": "communication", "bubble": "bubble", "offload": "offload", "data": "data"}
_DEVICE = {
    "device optimizer": "optimizer",
    "device update": "optimizer",
    "device matmul": "compute",
    "device attention": "compute",
    "device compute": "compute",
    "device copy": "offload",
    "device data": "data",
    "device communication": "communication",
    "device transfer": "communication",
}
_COMPUTING = ("compute", "optimizer")


@dataclass(frozen=True)
class Event:
    """A span recorded by the profiler, in seconds of one clock.

    Events of one kind on one thread are nested or disjoint.
    """

    kind: Kind
    thread: int
    begin: float
    end: float


Piece = tuple[float, float, tuple[str, ...]]
"""A span, and the kinds of the enclosing events, outermost first."""


def stacks(events: Iterable[Event], begin: float, end: float) -> list[Piece]:
    """Cuts [begin, end] into pieces at the boundaries of one thread's events."""
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
            # By rounding, an inner event may end after the event around it.
            open_events[-1] = Event(event.kind, event.thread, event.begin, open_events[-2].end)
    while open_events:
        until(open_events[-1].end)
        open_events.pop()
    until(end)
    return pieces


@dataclass(frozen=True)
class Busy:
    """Disjoint intervals covered by events, in order."""

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
        index = bisect.bisect_right(self.begins, time) - 1
        return index >= 0 and time < self.ends[index]


def breakdown(
    events: Sequence[Event], thread: int, begin: float, end: float, *, pipeline: bool, alone: bool
) -> dict[str, float]:
    """Returns the seconds of each component of the step [begin, end] on `thread`, plus `overlapped`
    and `operators` (with an operator running). Device kernels take precedence over host events, and
    inner host events over outer events. Time without an operator goes to what the thread waits for,
    or to communication if a collective is in flight or gradient hooks run. The rest goes to
    `optimizer` inside the optimizer's step, else to `compute`. `pipeline`: point-to-point waits are
    the bubble. `alone`: there is no other rank."""
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
    elsewhere = ("flight", "transfer", *_DEVICE)
    of_thread = (e for e in near if e.thread == thread and e.kind not in elsewhere)
    host = stacks(of_thread, begin, end)
    cutting = (e for e in near if e.kind in ("operator", *elsewhere))
    cuts = sorted({time for e in cutting for time in (e.begin, e.end)})
    seconds = dict.fromkeys((*COMPONENTS, "overlapped", "operators"), 0.0)
    for first, last, kinds in host:
        inner = cuts[bisect.bisect_right(cuts, first) : bisect.bisect_left(cuts, last)]
        for a, b in itertools.pairwise([first, *inner, last]):
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
    """Returns the seconds of a step in which a rank did not wait for other ranks."""
    return sum(
        step[component] for component in COMPONENTS if component not in ("communication", "bubble")
    )


def straggler(steps: Sequence[Sequence[float]]) -> tuple[int, float] | None:
    """Returns the rank that is slowest in every step, and its median excess over the other ranks'
    median as a share. None if that is below STRAGGLES. `steps`: the seconds of each rank's own
    work, by step."""
    slowest = {
        max(range(len(seconds)), key=lambda rank: seconds[rank])
        for seconds in steps
        if len(seconds) > 1
    }
    if len(slowest) != 1:
        return None
    (rank,) = slowest
    others = [statistics.median([*seconds[:rank], *seconds[rank + 1 :]]) for seconds in steps]
    excess = statistics.median(
        seconds[rank] / other - 1 if other else 0.0
        for seconds, other in zip(steps, others, strict=True)
    )
    return (rank, excess) if excess > STRAGGLES else None


_ATTENTION = re.compile(r"flash|fmha|sdpa|attention|mha_(fwd|bwd|varlen)", re.IGNORECASE)
_OPTIMIZER = re.compile(r"multi_tensor_apply|fused_?adam|adam_?w|koptimizer", re.IGNORECASE)
_LISTS_OF_TENSORS = re.compile(r"multi_tensor_apply.*(copy|norm)", re.IGNORECASE)
"""Kernels on lists of tensors: buffer copies (FSDP) and norms (gradient clipping)."""
_TORCHS_OWN = re.compile(
    r"elementwise_kernel|(?<!splitk)reduce_kernel|triton_(poi|red|per)_", re.IGNORECASE
)
"""Kernels of torch itself, whose names may contain the name of a fused operator."""
_MATMUL = re.compile(
    r"gemm|gemv|matmul|nvjet|cutlass|tensorop|splitk|_mma_|triton_tem_fused"
    r"|conv\d?d|_conv_|convolve|fprop|dgrad|wgrad|winograd",
    re.IGNORECASE,
)


def kernel_kind(name: str) -> Kind:
    """Returns the kind of a kernel that is not a collective."""
    if _OPTIMIZER.search(name):
        return "device compute" if _LISTS_OF_TENSORS.search(name) else "device update"
    if _TORCHS_OWN.search(name):
        return "device compute"
    if _ATTENTION.search(name):
        return "device attention"
    return "device matmul" if _MATMUL.search(name) else "device compute"


_PARTS: dict[Kind, str] = {
    "device matmul": "matmul",
    "device attention": "attention",
    "device update": "optimizer",
    "device compute": "kernels",
    "device communication": "communication",
    "device transfer": "communication",
    "device copy": "copy",
    "device data": "copy",
}
_COMPUTES = ("device matmul", "device attention", "device update", "device compute")


def gpu_parts(
    events: Sequence[Event], begin: float, end: float, step_seconds: float
) -> dict[str, float]:
    """Returns the seconds of each of GPU_PARTS in [begin, end], prefixed by `gpu_`; empty without
    device events.

    If kernels overlap, the first of GPU_PARTS counts. Compute kernels in the optimizer's step count
    as `optimizer`. The parts sum to `step_seconds`, the measured step time.
    """
    near = [e for e in events if e.kind.startswith("device") and e.end > begin and e.begin < end]
    if not near:
        return {}
    updating = Busy.of(e for e in near if e.kind == "device optimizer")
    busy = {kind: Busy.of(e for e in near if e.kind == kind) for kind in _PARTS}
    cuts = sorted({begin, end, *(t for e in near for t in (e.begin, e.end) if begin < t < end)})
    seconds = dict.fromkeys(GPU_PARTS, 0.0)
    for first, last in itertools.pairwise(cuts):
        middle = (first + last) / 2
        running = next((kind for kind in _PARTS if busy[kind].at(middle)), None)
        part = "idle" if running is None else _PARTS[running]
        if running in _COMPUTES and updating.at(middle):
            part = "optimizer"
        seconds[part] += last - first
    seconds["idle"] = step_seconds - sum(s for part, s in seconds.items() if part != "idle")
    return {f"gpu_{part}": s for part, s in seconds.items()}
