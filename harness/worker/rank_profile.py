from __future__ import annotations

import bisect
import contextlib
import functools
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from harness.cell.cell import Cell
from harness.measure.clock import Method, replaced
from harness.measure.memory_kinds import STEPS as TRACKED_STEPS
from harness.measure.memory_kinds import peak_split
from harness.measure.rank_traffic import step_calls
from harness.measure.step_breakdown import Event, Kind, breakdown, gpu_parts, kernel_kind
from harness.record.profile_record import COMPONENTS
from harness.worker.rank_answer import ProfiledAnswer, RankAnswer

if TYPE_CHECKING:
    from torch._C._autograd import _KinetoEvent

    from harness.seam.job import TrainState
    from harness.worker.loop import Loop


PLAIN_STEPS = 5
PROFILED_STEPS = 6
"""Number of profiled steps, including a first step that is dropped, because ranks start profilers
at different times."""
_MARK = "bench:"
_MARKS: dict[str, Kind] = {
    "wait": "wait",
    "communication": "wait",
    "optimizer": "optimizer",
    "data": "data",
    "bubble": "bubble",
    "offload": "offload",
}
_NOT_COMPUTING = ("autograd::", "torch::autograd::", "profiler::")
_FUNCTION = 0
"""Profiler's scope of operators; annotations have another scope."""
_HOOKS = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
_NODE = "autograd::engine::evaluate_function"
_TRANSFERS = ("gloo:send", "gloo:recv")


def profiled_cell(cell: Cell) -> Cell:
    """Returns the cell with plain, profiled, counted and tracked steps."""
    return cell.model_copy(
        update={"timed_steps": PLAIN_STEPS + PROFILED_STEPS + 1 + TRACKED_STEPS, "parity_steps": 1}
    )


def profile_rank(loop: Loop, answer: RankAnswer, traces: str | None) -> ProfiledAnswer:
    cell, train_state = loop.job.cell, loop.job.train_state
    assert train_state is not None
    indices = iter(range(cell.total_steps))
    for _ in range(cell.warmup_steps + PLAIN_STEPS):
        loop.run_step(next(indices))
    loop.stop_counting()
    profiled = _profiled(loop, train_state, indices, traces)
    calls, sees_operators = _counted(loop, train_state, next(indices))
    seen = ProfiledAnswer(
        plain_seconds=tuple(step.step_seconds for step in loop.steps if step.phase == "timed"),
        profiled=tuple(profiled),
        calls=calls,
        sent_bytes_per_step=loop.per_step(loop.traffic.sent),
        # NCCL's algorithms send as many bytes as a ring.
        wire="ring" if loop.job.device.type == "cuda" else train_state.wire,
        memory=None,
        unseen_buffers=None,
        memory_reason=(
            "torch's memory tracker sees only the thread that calls the step, but the library"
            " trains in another"
        ),
        private_bytes=None,
    )
    if not sees_operators:
        return seen

    def write(reason: str) -> None:
        profile = replace(seen, memory_reason=f"torch's memory tracker{reason}")
        replace(answer, profiled=profile).write(loop.spec.scratch)

    write(" failed on another rank")
    loop.meter.reset()
    try:
        split = peak_split(
            train_state, loop.job.device.type, lambda: loop.step(loop.fetch(next(indices)))
        )
    except Exception as error:
        # Other ranks wait for this one in the middle of a step. Its exit frees them, and their
        # answers already have the results so far.
        write(f": {type(error).__name__}: {' '.join(str(error).split())[:300]}")
        os._exit(1)
    return replace(
        seen,
        memory={kind: size for kind, size in split.items() if isinstance(size, int)},
        unseen_buffers=split["unseen"],
        memory_reason="",
        private_bytes=loop.meter.peak().allocated,
    )


def _counted(
    loop: Loop, train_state: TrainState, index: int
) -> tuple[tuple[tuple[str, int, int, int], ...] | None, bool]:
    batch = loop.fetch(index)
    with step_calls(train_state, loop.job.layout.processes) as seen:
        loop.step(batch)
    counts = tuple(
        (call.operation, call.tensor_bytes, call.group_size, count)
        for call, count in sorted(seen.calls.items())
    )
    return counts if seen.complete else None, bool(seen.operators[0])


def _profiled(
    loop: Loop, train_state: TrainState, indices: Iterator[int], traces: str | None
) -> list[dict[str, float | None]]:
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (loop.job.device.type == "cuda")
    # Strategies and libraries also compute in other threads.
    everyone = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    took: list[float] = []
    with (
        _named(train_state),
        _waits(),
        profile(
            activities=activities, record_shapes=True, experimental_config=everyone
        ) as profiler,
    ):
        for _ in range(PROFILED_STEPS):
            index = next(indices)
            loop.synchronize()
            begin = time.perf_counter()
            with record_function(f"{_MARK}step"):
                with record_function(f"{_MARK}data"):
                    batch = loop.fetch(index)
                loop.step(batch)
                loop.synchronize()
            took.append(time.perf_counter() - begin)
    if traces:
        profiler.export_chrome_trace(str(Path(traces) / f"rank{loop.job.rank}.json.gz"))
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    raw = profiler.profiler.kineto_results.events()
    if loop.job.device.type == "cuda":
        require_device_events(raw)
    steps = sorted(
        (e.start_ns(), e.end_ns(), e.start_thread_id())
        for e in raw
        if e.name() == f"{_MARK}step" and _on_host(e)
    )
    zero = steps[0][0]  # as seconds since the epoch, a double would lose nanoseconds
    events = events_of(raw, zero)
    thread = training_thread(events, steps[0][2])
    layout = loop.job.layout
    rows = []
    for seconds, (begin_ns, end_ns, _) in list(zip(took, steps, strict=True))[1:]:
        begin, end = (begin_ns - zero) / 1e9, (end_ns - zero) / 1e9
        parts = breakdown(
            events, thread, begin, end, pipeline=layout.pipeline > 1, alone=layout.processes == 1
        )
        parts["other"] = seconds - sum(parts[name] for name in COMPONENTS if name != "other")
        # Traffic of a library's own threads, and its overlap, is not visible.
        rows.append(
            {
                "step": seconds,
                **parts,
                **gpu_parts(events, begin, end, seconds),
                "overlapped": None if train_state.collectives else parts["overlapped"],
            }
        )
    return rows


def require_device_events(raw: Sequence[_KinetoEvent]) -> None:
    """Raises RuntimeError if there are no GPU events, because the GPU would then seem idle."""
    if all(_on_host(event) for event in raw):
        raise RuntimeError(
            "the profiler saw no device events: this process may not use CUPTI, as in some virtual"
            " machines and containers; the driver's option NVreg_RestrictProfilingToAdminUsers=0,"
            " or running as root, allows it"
        )


def _on_host(event: _KinetoEvent) -> bool:
    return event.device_type().name == "CPU"


def events_of(raw: Sequence[_KinetoEvent], zero: int) -> list[Event]:
    """Returns the events of a breakdown, in seconds after `zero` (nanoseconds)."""
    copies = _batch_copies(raw)
    events = [
        Event(kind, e.start_thread_id(), (e.start_ns() - zero) / 1e9, (e.end_ns() - zero) / 1e9)
        for e in raw
        if (kind := _kind(e, copies))
    ]
    nodes: dict[int, list[float]] = {}
    for e in raw:
        if e.name().startswith(_NODE):
            nodes.setdefault(e.start_thread_id(), []).append((e.end_ns() - zero) / 1e9)
    for ends in nodes.values():
        ends.sort()
    for e in raw:
        if e.name() == f"{_MARK}backward":
            begin, end = (e.start_ns() - zero) / 1e9, (e.end_ns() - zero) / 1e9
            ends = nodes.get(e.start_thread_id(), [])
            last = bisect.bisect_left(ends, end) - 1
            # Once all gradients exist, wrappers wait for their collectives.
            if last >= 0 and ends[last] > begin:
                events.append(Event("hook", e.start_thread_id(), ends[last], end))
    return events


def _batch_copies(raw: Sequence[_KinetoEvent]) -> set[int]:
    spans = [e for e in raw if e.name() == f"{_MARK}data" and _on_host(e)]
    return {
        e.correlation_id()
        for e in raw
        if e.name() == "aten::copy_"
        and any(
            span.start_thread_id() == e.start_thread_id()
            and span.start_ns() <= e.start_ns() < span.end_ns()
            for span in spans
        )
    }


def training_thread(events: list[Event], calling: int) -> int:
    """Returns the thread that trains. That is the thread which calls the step, unless a library's
    thread computes more; the caller's data events are then copied to that thread."""
    computed = dict.fromkeys({calling, *(e.thread for e in events)}, 0.0)
    for event in events:
        if event.kind == "operator":
            computed[event.thread] += event.end - event.begin
    most = max(computed, key=lambda thread: computed[thread])
    if most == calling or computed[calling] > 0.05 * computed[most]:
        return calling
    events += [Event("data", most, e.begin, e.end) for e in events if e.kind == "data"]
    return most


def _kind(event: _KinetoEvent, batch_copies: set[int]) -> Kind | None:
    name = event.name()
    if not _on_host(event):
        kind = _device_kind(event, name)
        if kind == "device copy" and event.linked_correlation_id() in batch_copies:
            return "device data"
        return kernel_kind(name) if kind == "device compute" else kind
    if name.startswith(_MARK):
        return _MARKS.get(name.removeprefix(_MARK))
    if name.startswith(("gloo:", "nccl:")):
        if name.endswith("barrier"):
            return "wait"
        return "transfer" if name.startswith(_TRANSFERS) else "flight"
    if name == "_c10d_functional::wait_tensor":
        return "wait"
    if name.startswith(("c10d::", "_c10d_functional::", "c10d_functional::")):
        return "launch"
    if name.startswith(("Optimizer.step#", "Optimizer.zero_grad#")):
        return "optimizer"
    if name.startswith(_HOOKS):
        return "hook"
    return (
        "operator"
        if "::" in name and event.scope() == _FUNCTION and not name.startswith(_NOT_COMPUTING)
        else None
    )


def _device_kind(event: _KinetoEvent, name: str) -> Kind | None:
    if event.is_user_annotation():
        return "device optimizer" if name.startswith("Optimizer.step#") else None
    if "nccl" in name.lower():
        return "device transfer" if "SendRecv" in name else "device communication"
    # Before torch 2.12, events have no type; copies and fills are recognised by name.
    named = {"Memcpy": "gpu_memcpy", "Memset": "gpu_memset"}.get(name[:6], "kernel")
    activity = event.activity_type() if hasattr(event, "activity_type") else named
    if activity == "gpu_memcpy":
        return "device compute" if "DtoD" in name else "device copy"
    return "device compute" if activity in ("kernel", "gpu_memset") else None


def _marked(component: str, method: Method) -> Method:
    import torch

    @functools.wraps(method)
    def call(*args: object, **kwargs: object) -> object:
        with torch.profiler.record_function(_MARK + component):
            return method(*args, **kwargs)

    return call


@contextlib.contextmanager
def _named(train_state: TrainState) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for owner, name, component in train_state.waits:
            stack.enter_context(replaced(owner, name, functools.partial(_marked, component)))
        yield


@contextlib.contextmanager
def _waits() -> Iterator[None]:
    import torch
    import torch.distributed as dist

    with contextlib.ExitStack() as stack:
        if dist.is_available():
            stack.enter_context(replaced(dist.Work, "wait", functools.partial(_marked, "wait")))
        stack.enter_context(
            replaced(torch.futures.Future, "wait", functools.partial(_marked, "wait"))
        )
        stack.enter_context(
            replaced(torch.autograd, "_engine_run_backward", functools.partial(_marked, "backward"))
        )
        yield
