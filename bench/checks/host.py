"""Conditions that skew results on any host."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import psutil

from bench.checks.trouble import Trouble

GIB = 2**30
MOST_SWAP_BYTES = 256 * 2**20
BUSY_SHARE = 0.1
"""Reported load by other processes, as a share of all cores."""
LOOK_SECONDS = 0.5
SHARED_MEMORY_BYTES = GIB
"""NCCL takes tens of MiB of shared memory per pair of ranks; containers get 64 MiB by default."""
LOCKED_BYTES = 2**30


def host_troubles(root: Path = Path("/")) -> list[Trouble]:
    """`root`: folder that contains /sys and /dev."""
    checked = (_governor(root), _turbo(root), _siblings(root), _neighbours(), _swap(), _disk())
    return [trouble for trouble in checked if trouble]


def _governor(root: Path) -> Trouble | None:
    files = (root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_governor")
    kinds = Counter(text for file in files if (text := _read(file)) != "performance" and text)
    if not kinds:
        return None
    return Trouble(
        "CPU",
        f"{sum(kinds.values())} cores have the frequency governor {', '.join(kinds)}",
        "they slow down between steps and take time to come back: launches differ",
        "sudo cpupower frequency-set -g performance",
    )


def _turbo(root: Path) -> Trouble | None:
    """Reports turbo: clocks fall as the processor warms up, so the first cells of a run are
    faster."""
    system = root / "sys/devices/system/cpu"
    for file, on, off in (
        (system / "intel_pstate/no_turbo", "0", "1"),
        (system / "cpufreq/boost", "1", "0"),
    ):
        if _read(file) == on:
            return Trouble(
                "CPU",
                "turbo is on",
                "clocks depend on heat and on how many cores work: one rank alone looks faster than"
                " one of many",
                f"echo {off} | sudo tee {file}",
            )
    return None


def _siblings(root: Path) -> Trouble | None:
    if _read(root / "sys/devices/system/cpu/smt/active") != "1":
        return None
    return Trouble(
        "CPU",
        "two hardware threads share each core (SMT)",
        "two ranks may get one core between them, and are then slower than two cores would be",
        "echo off | sudo tee /sys/devices/system/cpu/smt/control",
    )


def _neighbours() -> Trouble | None:
    own = {psutil.Process().pid}
    others = [process for process in psutil.process_iter(["name"]) if process.pid not in own]
    for process in others:
        _share(process)
    psutil.cpu_percent(None)
    whole = psutil.cpu_percent(LOOK_SECONDS) / 100
    if whole < BUSY_SHARE:
        return None
    busiest = sorted(((_share(process), process) for process in others), key=lambda pair: -pair[0])[
        :3
    ]
    names = ", ".join(
        f"{process.info['name']} ({process.pid})" for share, process in busiest if share >= 0.05
    )
    return Trouble(
        "CPU",
        f"other processes keep {whole:.0%} of all cores busy" + (f": {names}" if names else ""),
        "they take time from the ranks",
        "end them or wait; to see them: top",
    )


def _share(process: psutil.Process) -> float:
    try:
        return float(process.cpu_percent(None)) / 100
    except psutil.Error:
        return 0.0


def _swap() -> Trouble | None:
    used = psutil.swap_memory().used
    if used < MOST_SWAP_BYTES:
        return None
    return Trouble(
        "memory",
        f"{used / GIB:.1f} GiB are swapped out",
        "a step that needs them waits for the disk",
        "sudo swapoff -a && sudo swapon -a",
    )


def _disk() -> Trouble | None:
    from harness.host.cache import cache_folder
    from harness.parity.reference_runs import DEFAULT_LIMIT_GIB

    folder = cache_folder()
    free = shutil.disk_usage(folder).free
    if free >= DEFAULT_LIMIT_GIB * GIB:
        return None
    return Trouble(
        "disk",
        f"{free / GIB:.1f} GiB are free for the cache in {folder}",
        f"reference runs may need up to {DEFAULT_LIMIT_GIB:.0f} GiB; without them parity is unknown"
        " and nothing is ranked",
        "export PARALLELISM_BENCH_CACHE=/a/larger/disk",
    )


def shared_memory_trouble(folder: Path = Path("/dev/shm")) -> Trouble | None:
    """Reports too little shared memory for NCCL between GPUs."""
    try:
        size = shutil.disk_usage(folder).total
    except OSError:
        size = 0
    if size >= SHARED_MEMORY_BYTES:
        return None
    return Trouble(
        "memory",
        f"{folder} has {size / 2**20:.0f} MiB",
        "NCCL and data loaders fail where it is full, or go another way",
        f"docker run --shm-size=8g ..., or: sudo mount -o remount,size=8G {folder}",
    )


def locked_memory_trouble(root: Path = Path("/"), limit: int | None = None) -> Trouble | None:
    """Reports too little lockable memory for InfiniBand. `limit`: bytes, -1 for no limit."""
    import resource

    allowed = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if limit is None else limit
    if (
        not any((root / "sys/class/infiniband").glob("*"))
        or allowed in (-1, resource.RLIM_INFINITY)
        or allowed >= LOCKED_BYTES
    ):
        return None
    return Trouble(
        "memory",
        f"a process may lock {allowed / 2**20:.1f} MiB",
        "NCCL cannot register buffers with InfiniBand, and fails or uses TCP",
        "ulimit -l unlimited (docker run --ulimit memlock=-1)",
    )


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
