"""`python -m tests.gpu.stubbed_ranks RANK RANKS FOLDER STRATEGY OPTIONS...`: a rank trains on
a CPU with a library that needs a GPU. Its streams and pinned memory do nothing.

For each of the OPTIONS, which are JSON, rank 0 prints the largest deviation of any tensor from
plain training, relative to its update. Only the order of kernels on streams differs from the
library's path on GPUs.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from harness.cell.cell import Cell
from harness.cell.training import Batch
from harness.parity.reference import full_parameters
from harness.seam.job import Job
from harness.seam.registry import make_strategy
from harness.workloads import make_workload, prepare_data

STEPS = 4


class IdleStream:
    """A stream whose work is always done."""

    current: Any = None

    def wait_stream(self, other: object) -> None: ...

    def synchronize(self) -> None: ...

    def is_capturing(self) -> bool:
        return False


@contextlib.contextmanager
def on(stream: IdleStream) -> Iterator[None]:
    """Makes the stream the current one, as fairscale asserts."""
    before, IdleStream.current = IdleStream.current, stream
    yield
    IdleStream.current = before


def replace_streams() -> None:
    """Replaces streams and pinned memory for the rest of this process, which is a rank."""
    IdleStream.current = IdleStream()
    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.Stream, cuda.stream = IdleStream, on
    cuda.current_stream = lambda: IdleStream.current
    cuda.synchronize = lambda: None
    accelerator: Any = torch.accelerator
    accelerator.current_stream = lambda device=None: IdleStream.current  # needed by CUDA builds
    cuda.is_current_stream_capturing = lambda: False
    cpu: Any = torch.cpu
    cpu.Stream.synchronize = lambda stream: None
    anything: Any = Tensor
    anything.record_stream = lambda tensor, stream: None
    anything.pin_memory = lambda tensor: tensor
    # NCCL takes a matrix with a row for each rank, gloo one long vector.
    scatter: Any = dist._reduce_scatter_base

    def scatter_rows(output: Tensor, rows: Tensor, **more: Any) -> Any:
        return scatter(output.view(-1), rows.view(-1), **more)

    dist._reduce_scatter_base = scatter_rows


def trained(
    strategy: str, options: dict[str, Any], rank: int, ranks: int, scratch: Path
) -> dict[str, Tensor]:
    """Returns full parameters after some steps on this rank's part of the batch, from seed 0."""
    cell = Cell(
        strategy=strategy,
        options=options,
        devices=ranks,
        workload="llama-nano",
        micro_batches=2,
    )
    workload, made = make_workload(cell.workload), make_strategy(cell)
    layout = made.layout(ranks)
    job = Job(cell, workload, layout, torch.device("cpu"), rank, scratch)
    step = made.setup(job)
    data = prepare_data(cell.data, workload, cell.sequence_length)
    share = cell.global_batch // ranks
    for number in range(STEPS):
        rows = slice(rank * share, (rank + 1) * share)
        batch = data.batch(cell.seed, number, cell.global_batch, rows)
        step(Batch(number, *(torch.as_tensor(part) for part in batch)))
    assert job.train_state is not None
    parameters = full_parameters(job.train_state)
    return {name: parameter.detach().clone() for name, parameter in parameters}


def main() -> None:
    rank, ranks, folder, strategy, *all_options = sys.argv[1:]
    number, count, scratch = int(rank), int(ranks), Path(folder)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{scratch}/store", rank=number, world_size=count
    )
    plain = trained("single", {}, 0, 1, scratch)
    before = dict(make_workload("llama-nano").build(0).named_parameters())
    replace_streams()
    deviations = []
    for options in all_options:
        found = trained(strategy, json.loads(options), number, count, scratch)
        assert found.keys() == plain.keys(), (sorted(found), sorted(plain))
        gaps = [
            (found[name] - plain[name]).norm() / (plain[name] - before[name].detach()).norm()
            for name in plain
        ]
        deviations.append(float(max(gaps)))
    if number == 0:
        print(json.dumps(deviations), flush=True)
    dist.barrier()
    os._exit(0)  # see harness/worker/worker.py: a wrapper's destructor may wait forever


if __name__ == "__main__":
    main()
