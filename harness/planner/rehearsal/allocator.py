"""Measures real ranks' allocations in torch's CPU allocator, to check rehearsals against.

Resident memory would add glibc's caches, stacks, and gloo's buffers.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harness.planner.rehearsal.world import fake_batch, globals_put_back, launcher_variables
from harness.spec.cell import Cell
from harness.spec.errors import UsageError
from harness.strategy.job import Job
from harness.strategy.registry import validate
from harness.workloads import make_workload

if TYPE_CHECKING:
    from torch._C._profiler import _ProfilerEvent

SETTLED_STEPS = 2
"""Steps before the measured cycles; DDP rearranges its buckets after the first."""
MEASURED_CYCLES = 8
"""Measured cycles (see Strategy.cycle); several, because gloo may free some buffers late."""
_SETTLED, _CYCLE = "rehearsal: settled steps", "rehearsal: cycle"
_TIME_LIMIT_SECONDS = 600.0
_KEPT: list[object] = []
"""Objects kept forever, because destroying DDP's reducer can hang."""


@dataclass(frozen=True)
class AllocatedMemory:
    rank: int
    peak_bytes: int
    """Smallest peak of a cycle, in which gloo freed its buffers in time."""
    largest_peak_bytes: int
    setup_peak_bytes: int
    kept_bytes: int


def measure(cells: Sequence[Cell]) -> list[tuple[AllocatedMemory, ...]]:
    """Trains some steps of each cell here, over gloo; returns its ranks' memory.

    All cells need the same number of processes. Raises UsageError with the first failed rank's
    reason.
    """
    from torch.multiprocessing.spawn import spawn

    sizes = {validate(cell, make_workload(cell.workload))[1].processes for cell in cells}
    if len(sizes) != 1:
        raise UsageError(f"cells measured together need the same number of ranks, not {sizes}")
    (world,) = sizes
    with tempfile.TemporaryDirectory() as folder:
        store = f"{folder}/store"
        started = spawn(
            _measured_rank, (world, store, list(cells), folder), nprocs=world, join=False
        )
        for process in started.processes:
            process.join(_TIME_LIMIT_SECONDS)
            if process.is_alive():
                process.kill()
        return [
            tuple(_answer(Path(folder), number, rank, cell) for rank in range(world))
            for number, cell in enumerate(cells)
        ]


def _file(folder: Path, cell: int, rank: int) -> Path:
    return folder / f"cell{cell}-rank{rank}.json"


def _answer(folder: Path, number: int, rank: int, cell: Cell) -> AllocatedMemory:
    file = _file(folder, number, rank)
    if file.exists():
        return AllocatedMemory(**json.loads(file.read_text()))
    reasons = sorted(folder.glob("failed-*"), key=lambda path: path.stat().st_mtime)
    reason = reasons[0].read_text() if reasons else f"rank {rank} did not answer"
    raise UsageError(f"{cell.name} could not be measured: {reason}")


def _measured_rank(rank: int, world: int, store: str, cells: list[Cell], folder: str) -> None:
    import torch

    log = os.open(Path(folder) / f"rank{rank}.log", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    try:
        for number, cell in enumerate(cells):
            measured = _train(cell, rank, world, f"{store}{number}", Path(folder))
            text = json.dumps(asdict(measured))
            temporary = Path(folder) / f"{number}-{rank}.tmp"
            temporary.write_text(text)
            temporary.replace(_file(Path(folder), number, rank))
    except Exception as error:
        lines = str(error).strip().partition("\n")
        Path(folder, f"failed-{rank}").write_text(f"{type(error).__name__}: {lines[0]}")
        os._exit(1)
    os._exit(0)


def _train(cell: Cell, rank: int, world: int, store: str, scratch: Path) -> AllocatedMemory:
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore
    from torch.profiler import ProfilerActivity, profile, record_function

    workload = make_workload(cell.workload)
    strategy, layout = validate(cell, workload)
    if strategy.capabilities.process_group:
        shared = FileStore(store, world)
        dist.init_process_group("gloo", store=shared, rank=rank, world_size=world)
    torch.manual_seed(cell.seed)
    job = Job(cell, workload, layout, torch.device("cpu"), rank, scratch, local_processes=world)
    os.environ |= launcher_variables(job)
    _count_in_all_threads()
    with (
        globals_put_back(strategy.requires),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
    ):
        step = strategy.setup(job)
        steps = itertools.count()
        with record_function(_SETTLED):
            for _ in range(SETTLED_STEPS):
                step(fake_batch(job, next(steps)))
        for _ in range(MEASURED_CYCLES):
            with record_function(_CYCLE):
                for _ in range(strategy.cycle):
                    step(fake_batch(job, next(steps)))
    _KEPT.extend([job, step])
    if strategy.capabilities.process_group:
        dist.barrier()
        dist.destroy_process_group()
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    return _peaks(profiler.profiler.kineto_results.experimental_event_tree(), rank)


def _count_in_all_threads() -> None:
    """Makes the allocator count in threads unknown to the profiler, such as gloo's."""
    import torch

    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage").value = True


def _flat(events: Sequence[_ProfilerEvent]) -> Iterator[_ProfilerEvent]:
    for event in events:
        yield event
        yield from _flat(event.children)


def _peaks(events: Sequence[_ProfilerEvent], rank: int) -> AllocatedMemory:
    from torch._C._profiler import _ExtraFields_Allocation

    flat = list(_flat(events))
    begin = next(event.start_time_ns for event in flat if event.name == _SETTLED)
    cycles = [(e.start_time_ns, e.end_time_ns) for e in flat if e.name == _CYCLE]
    changes = sorted(
        (event.start_time_ns, fields.total_allocated, fields.alloc_size)
        for event in flat
        if isinstance(fields := event.extra_fields, _ExtraFields_Allocation)
    )
    # Memory of cells measured earlier in this process.
    before = changes[0][1] - changes[0][2]
    return AllocatedMemory(
        rank=rank,
        peak_bytes=min(
            max(total for at, total, _ in changes if start <= at <= end) for start, end in cycles
        )
        - before,
        largest_peak_bytes=max(total for at, total, _ in changes if at > begin) - before,
        setup_peak_bytes=max(total for at, total, _ in changes if at <= begin) - before,
        kept_bytes=changes[-1][1] - before,
    )
