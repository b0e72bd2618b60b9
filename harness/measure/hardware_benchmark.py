"""Benchmarks messages between two ranks, matrix products, memory copies and kernel launches."""

from __future__ import annotations

import itertools
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from harness.analysis.stats import slowest
from harness.host.folders import scratch_folder
from harness.host.process import Ended, call_apart, caller_not_imported
from harness.record.trial import DeviceSpeed, SpeedMeasurement
from harness.workloads.low_precision import has_float8

if TYPE_CHECKING:
    import torch


RANKS = 2
WARMUP, REPEATS = 3, 9
LATENCY_BYTES, BANDWIDTH_BYTES = 4 * 2**10, 64 * 2**20
"""Sizes of the messages that show latency and bandwidth."""


@dataclass(frozen=True)
class LinkSpeed:
    """Speed of all-reduces between two ranks, each timed on its slower rank: medians."""

    backend: str
    latency_seconds: float
    """Seconds of an all-reduce of LATENCY_BYTES."""
    bytes_per_second: float
    """BANDWIDTH_BYTES per second of an all-reduce of as many."""


def measure_link(backend: str) -> LinkSpeed:
    """Times messages between two cores (`gloo`) or GPUs 0 and 1 (`nccl`). Raises RuntimeError with
    a failed rank's reason."""
    from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

    with scratch_folder() as scratch:
        try:
            with caller_not_imported():
                spawn(_rank, args=(backend, str(scratch)), nprocs=RANKS)
        except (ProcessExitedException, ProcessRaisedException) as error:
            raise RuntimeError(str(error).strip().splitlines()[-1]) from None
        by_rank = [json.loads((scratch / f"{rank}.json").read_text()) for rank in range(RANKS)]
    small, large = (
        statistics.median(slowest([seconds[size] for seconds in by_rank])) for size in range(2)
    )
    return LinkSpeed(backend, small, BANDWIDTH_BYTES / large)


def _rank(rank: int, backend: str, scratch: str) -> None:
    """Writes the seconds of all-reduces of both sizes to `scratch`."""
    import torch
    import torch.distributed as dist

    from harness.host.cores import allowed_cores
    from harness.host.process import die_with_parent
    from harness.host.tcp_store import listening_on

    die_with_parent()
    cores = allowed_cores()
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    os.environ |= listening_on("lo")
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
    seconds = [all_reduce_seconds(rank, size, device) for size in (LATENCY_BYTES, BANDWIDTH_BYTES)]
    (Path(scratch) / f"{rank}.json").write_text(json.dumps(seconds))
    dist.barrier()
    os._exit(0)


def all_reduce_seconds(rank: int, size: int, device: torch.device) -> list[float]:
    """Times all-reduces of `size` bytes. Raises RuntimeError if the sum is wrong."""
    import torch
    import torch.distributed as dist

    message = torch.full((size // 4,), float(rank + 1), device=device)
    dist.all_reduce(message)
    if not (message == 3).all():
        raise RuntimeError(f"rank {rank} received wrong numbers in messages of {size} bytes")
    message.zero_()  # repeated sums would overflow
    return timed(lambda: dist.all_reduce(message), REPEATS, lambda: _synchronize(device))


def timed(
    run: Callable[[], object],
    count: int,
    synchronize: Callable[[], object],
    now: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Returns the seconds of `count` repetitions, after WARMUP untimed repetitions."""
    repetitions = []
    for _ in range(WARMUP + count):
        synchronize()
        begin = now()
        run()
        synchronize()
        repetitions.append(now() - begin)
    return repetitions[WARMUP:]


MEMORY_SHARE = 1 / 8
"""Maximum share of the device's free memory to use."""
PRODUCT_SIZES = {"cuda": (4096, 8192, 16384), "cpu": (256, 512, 1024)}
COPY_BYTES = {"cuda": 2**28, "cpu": 2**25}
TRANSFER_BYTES = 2**27
SECONDS_PER_SIZE = {"cuda": 0.15, "cpu": 0.08}
"""Time budget per matrix size in seconds; larger sizes are skipped once it is spent."""
LEAST_REPEATS, MOST_REPEATS = 3, 50
LAUNCHES, LAUNCH_ROUNDS = 500, 9
FLOAT8_LARGEST = 448.0
TIME_LIMIT_SECONDS = 90.0
"""Limit for a process that imports from a slow disk."""


def measure_device_speed(device: torch.device) -> DeviceSpeed:
    """Measures one GPU in about 5 s, or this process's CPU threads in 2 s. Initialises CUDA, so
    that this process can no longer fork ranks. Raises RuntimeError if the device cannot be used."""
    import torch

    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32, cudnn.allow_tf32 = False, False
    try:
        with torch.inference_mode():
            return _measure(device)
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before
        if device.type == "cuda":
            torch.cuda.empty_cache()


def measure_apart(device: str = "cuda:0", limit: float = TIME_LIMIT_SECONDS) -> SpeedMeasurement:
    """Measures a device in a separate process, so that this process leaves CUDA alone. If that
    fails, the result holds the reason."""
    speed = call_apart(_device_speed, device, limit=limit)
    if isinstance(speed, Ended):
        return SpeedMeasurement(None, speed.reason[:300])
    return SpeedMeasurement(speed)


def _device_speed(device: str) -> DeviceSpeed:
    import torch

    return measure_device_speed(torch.device(device))


def _measure(device: torch.device) -> DeviceSpeed:
    import torch

    most_bytes = int(_free_bytes(device) * MEMORY_SHARE)
    products = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    if has_float8(device):
        products["fp8"] = torch.float8_e4m3fn
    rates = {name: _matmul_rate(device, dtype, most_bytes) for name, dtype in products.items()}
    source = torch.ones(min(COPY_BYTES[device.type], most_bytes // 2), dtype=torch.uint8).to(device)
    target = torch.empty_like(source)
    copy_seconds = median_seconds(
        lambda: target.copy_(source), device, SECONDS_PER_SIZE[device.type]
    )
    transfers: dict[str, tuple[float, float]] = {}
    if device.type == "cuda":
        del target
        transfers = _transfers(device, source[:TRANSFER_BYTES])
    return DeviceSpeed(
        matmul_flops_per_second={name: rate for name, rate in rates.items() if rate},
        copy_bytes_per_second=2 * source.numel() / copy_seconds,
        host_to_device_bytes_per_second={name: rates[0] for name, rates in transfers.items()},
        device_to_host_bytes_per_second={name: rates[1] for name, rates in transfers.items()},
        launch_seconds=_launch_seconds(device),
    )


def _free_bytes(device: torch.device) -> int:
    import psutil
    import torch

    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return int(psutil.virtual_memory().available)


def _matmul_rate(device: torch.device, dtype: torch.dtype, most_bytes: int) -> float | None:
    best: float | None = None
    budget = SECONDS_PER_SIZE[device.type]
    for size in PRODUCT_SIZES[device.type]:
        flops = 2 * size**3
        too_large = 3 * size**2 * 4 > most_bytes  # the factors are drawn in fp32
        if best and (too_large or flops / best * (LEAST_REPEATS + 1) > budget):
            break
        try:
            best = max(
                best or 0.0, flops / median_seconds(_product(size, dtype, device), device, budget)
            )
        except RuntimeError:
            break  # no kernel for this precision, or not enough memory
    return best


def _product(size: int, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    """Returns a square product of random numbers; zeros would run faster."""
    import torch

    a, b = (torch.randn(size, size, device=device) for _ in range(2))
    if dtype is not torch.float8_e4m3fn:
        a, b = a.to(dtype), b.to(dtype)
        return lambda: a @ b
    scales = [x.abs().amax(1, keepdim=True) / FLOAT8_LARGEST for x in (a, b)]
    a, b = ((x / scale).to(torch.float8_e4m3fn) for x, scale in zip((a, b), scales, strict=True))
    return lambda: torch._scaled_mm(
        a,
        b.t(),
        scale_a=scales[0],
        scale_b=scales[1].t(),
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


def median_seconds(run: Callable[[], object], device: torch.device, budget: float) -> float:
    """Returns the median seconds of the calls that fit into `budget` seconds, at least
    LEAST_REPEATS."""
    import torch

    run()
    _synchronize(device)
    begin = time.perf_counter()
    run()
    _synchronize(device)
    once = max(time.perf_counter() - begin, 1e-7)
    count = max(LEAST_REPEATS, min(MOST_REPEATS, int(budget / once)))
    if device.type != "cuda":
        seconds = []
        for _ in range(count):
            begin = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - begin)
        return statistics.median(seconds)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    with torch.cuda.device(device):
        events[0].record()
        for event in events[1:]:
            run()
            event.record()
    _synchronize(device)
    # Back to back, so that the clocks settle as in training.
    between = itertools.pairwise(events)
    return statistics.median(float(a.elapsed_time(b)) / 1e3 for a, b in between)


def _transfers(device: torch.device, on_device: torch.Tensor) -> dict[str, tuple[float, float]]:
    import torch

    pageable = torch.ones(on_device.numel(), dtype=torch.uint8)
    rates = {}
    for name, host in (("pinned", pageable.pin_memory()), ("pageable", pageable)):
        to, back = (
            statistics.median(timed(run, LEAST_REPEATS, lambda: _synchronize(device)))
            for run in (
                lambda host=host: on_device.copy_(host, non_blocking=True),
                lambda host=host: host.copy_(on_device, non_blocking=True),
            )
        )
        rates[name] = (on_device.numel() / to, on_device.numel() / back)
    return rates


def _launch_seconds(device: torch.device) -> float:
    """Returns the median seconds per launch, in rounds too short to fill the queue."""
    import torch

    tiny = torch.zeros(1, device=device)

    def enqueue() -> float:
        begin = time.perf_counter()
        for _ in range(LAUNCHES):
            tiny.add_(1)
        seconds = (time.perf_counter() - begin) / LAUNCHES
        _synchronize(device)
        return seconds

    return statistics.median(enqueue() for _ in range(LAUNCH_ROUNDS))


def _synchronize(device: torch.device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
