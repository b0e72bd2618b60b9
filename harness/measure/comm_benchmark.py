"""Message times between two ranks by size, with a fitted latency and bandwidth."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from harness.analysis.stats import slowest
from harness.host.scratch import scratch_folder

if TYPE_CHECKING:
    import torch

SIZES = tuple(4**k * 1024 for k in range(1, 9))
"""Message sizes in bytes: 4 KiB to 64 MiB."""
RANKS = 2
WARMUP = 3
MOST_REPEATS, LEAST_REPEATS, BYTES_PER_SIZE = 50, 7, 2**26
METHOD = (
    f"{RANKS} ranks on this host, each on a core of its own; a message is what one rank gives;"
    f" median of 7 to 50 repetitions after {WARMUP} that do not count, a repetition being as long"
    " as its slowest rank's; point-to-point is half of there and back; latency + bytes /"
    " bandwidth, neither below 0, is fitted by least squares of the relative error"
)


@dataclass(frozen=True)
class Fit:
    latency_seconds: float
    bandwidth_bytes_per_second: float | None
    """Fitted bandwidth; None if the time did not grow with the size."""
    largest_deviation: float
    """Largest |fitted - measured| / measured."""

    def seconds(self, size: float) -> float:
        return self.latency_seconds + (
            size / self.bandwidth_bytes_per_second if self.bandwidth_bytes_per_second else 0.0
        )


def fit(sizes: Sequence[float], seconds: Sequence[float]) -> Fit:
    """Fits latency and 1 / bandwidth, both at least 0, by least squares of the relative error.

    Method: NNLS (Lawson and Hanson, Solving Least Squares Problems, 1974). `sizes`: bytes;
    `seconds`: time of a message of each size. With the relative error, the noise of large messages
    does not swamp the latency of small ones.
    """
    import numpy as np
    from scipy.optimize import nnls

    x, t = np.asarray(sizes, float), np.asarray(seconds, float)
    largest = x.max()  # relative sizes give both columns similar magnitudes
    (latency, per_largest), _ = nnls(np.stack([1 / t, x / largest / t], axis=1), np.ones(len(t)))
    bandwidth = float(largest / per_largest) if per_largest > 0 else None
    line = Fit(float(latency), bandwidth, 0.0)
    deviations = [
        abs(line.seconds(size) - measured) / measured
        for size, measured in zip(sizes, seconds, strict=True)
    ]
    return replace(line, largest_deviation=float(max(deviations)))


@dataclass(frozen=True)
class LinkFit:
    backend: str
    operation: str
    sizes: tuple[int, ...]
    """Message sizes in bytes."""
    seconds: tuple[float, ...]
    """Median times by size."""
    fit: Fit

    def as_json(self) -> dict[str, object]:
        return {
            "backend": self.backend,
            "operation": self.operation,
            "ranks": RANKS,
            "latency_seconds": self.fit.latency_seconds,
            "bandwidth_bytes_per_second": self.fit.bandwidth_bytes_per_second,
            "largest_deviation": self.fit.largest_deviation,
            "messages": [
                {"bytes": size, "seconds": seconds}
                for size, seconds in zip(self.sizes, self.seconds, strict=True)
            ],
        }


def repeats(size: int) -> int:
    """Returns the repetitions for a message size in bytes; small messages vary more."""
    return max(LEAST_REPEATS, min(MOST_REPEATS, BYTES_PER_SIZE // size))


def measure_links(backend: str, sizes: Sequence[int] = SIZES) -> list[LinkFit]:
    """Returns the times of all operations between two ranks on this host.

    `gloo` runs between two cores, `nccl` between GPUs 0 and 1. `sizes`: message sizes in bytes.
    Raises RuntimeError with the reason of the first rank that fails. Leaves no process behind.
    """
    from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

    with scratch_folder() as scratch:
        try:
            spawn(_rank, args=(backend, tuple(sizes), str(scratch)), nprocs=RANKS)
        except (ProcessExitedException, ProcessRaisedException) as error:
            raise RuntimeError(str(error).strip().splitlines()[-1]) from None
        by_rank = [json.loads((scratch / f"{rank}.json").read_text()) for rank in range(RANKS)]
    fits = []
    for operation in by_rank[0]:
        medians = tuple(
            statistics.median(slowest([rank[operation][i] for rank in by_rank]))
            for i in range(len(sizes))
        )
        fits.append(LinkFit(backend, operation, tuple(sizes), medians, fit(sizes, medians)))
    return fits


def _rank(rank: int, backend: str, sizes: Sequence[int], scratch: str) -> None:
    """Times every operation at every size and writes the times to `scratch`.

    Ends by os._exit, like a trial's rank (harness/worker/worker.py).
    """
    import torch
    import torch.distributed as dist

    from harness.host.cores import allowed_cores
    from harness.host.process import die_with_parent

    die_with_parent()
    cores = allowed_cores()
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        init_method=f"file://{scratch}/store",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=60),
    )
    synchronize = (
        (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else (lambda: None)
    )
    times: dict[str, list[list[float]]] = {}
    for size in sizes:
        for name, (run, messages) in _operations(rank, size, device).items():
            repetitions = timed(run, repeats(size), synchronize)
            times.setdefault(name, []).append([seconds / messages for seconds in repetitions])
    (Path(scratch) / f"{rank}.json").write_text(json.dumps(times))
    dist.barrier()
    os._exit(0)


def timed(
    run: Callable[[], object],
    count: int,
    synchronize: Callable[[], object],
    now: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Returns the seconds of each of `count` repetitions, after WARMUP untimed ones."""
    repetitions = []
    for _ in range(WARMUP + count):
        synchronize()
        begin = now()
        run()
        synchronize()
        repetitions.append(now() - begin)
    return repetitions[WARMUP:]


def _operations(
    rank: int, size: int, device: torch.device
) -> dict[str, tuple[Callable[[], object], int]]:
    """Returns operations on messages of `size` bytes, and their number of sequential messages.

    Checks each result once; raises RuntimeError if it is wrong.
    """
    import torch
    import torch.distributed as dist

    own = torch.full((size // 4,), float(rank + 1), device=device)
    work, other = own.clone(), torch.empty_like(own)
    gathered = [torch.empty_like(own) for _ in range(RANKS)]

    def there_and_back() -> None:
        if rank == 0:
            dist.send(own, 1)
            dist.recv(other, 1)
        else:
            dist.recv(other, 0)
            dist.send(own, 0)

    dist.all_reduce(work)
    dist.all_gather(gathered, own)
    there_and_back()
    is_right = (
        (work == 3).all()
        and all((part == place + 1).all() for place, part in enumerate(gathered))
        and (other == 2 - rank).all()
    )
    if not is_right:
        raise RuntimeError(
            f"rank {rank} received other numbers than were sent, in messages of {size} bytes"
        )
    work.zero_()  # otherwise the repeated sums would overflow
    return {
        "all_reduce": (lambda: dist.all_reduce(work), 1),
        "all_gather": (lambda: dist.all_gather(gathered, own), 1),
        "point_to_point": (there_and_back, 2),
    }
