from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from harness.cell.cell import Cell

MEBIBYTE = 2**20
PROCESS = Path("/proc/self")
CGROUPS = Path("/sys/fs/cgroup")
_KEY = "oom_kill"


def memory_bytes(process: Path = PROCESS, groups: Path = CGROUPS) -> int:
    """Returns the bytes that this process may use: the least of host memory, control groups' limits
    and the SLURM job's memory. `process`: its folder in /proc. `groups`: mount point of control
    groups."""
    limits = [limit for limit, _ in _group_limits(process, groups)]
    return min([psutil.virtual_memory().total, *limits, *_slurm_limit(os.environ)])


def available_memory_bytes(process: Path = PROCESS, groups: Path = CGROUPS) -> int:
    """Returns the bytes that this process can still allocate without swapping or being killed,
    including reclaimable page cache."""
    free = [max(0, limit - used) for limit, used in _group_limits(process, groups)]
    free += [max(0, limit - _resident_bytes()) for limit in _slurm_limit(os.environ)]
    return min([psutil.virtual_memory().available, *free])


def _group_limits(process: Path, groups: Path) -> Iterator[tuple[int, int]]:
    """Yields limit and use in bytes of a process's control group and of its ancestors.

    Files: the kernel's Documentation/admin-guide, cgroup-v1/memory.rst and cgroup-v2.rst.
    """
    for group in groups_of(process, groups):
        names = ("memory.limit_in_bytes", "memory.max", "memory.high")
        limits = [limit for name in names if (limit := _number(group / name)) is not None]
        if limits:
            used = _number(group / "memory.usage_in_bytes") or _number(group / "memory.current")
            yield min(limits), max(0, (used or 0) - _inactive_file_bytes(group))


def _inactive_file_bytes(group: Path) -> int:
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    figures = dict(line.split()[:2] for line in lines if " " in line)
    return int(figures.get("total_inactive_file", figures.get("inactive_file", 0)))


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _slurm_limit(variables: Mapping[str, str]) -> list[int]:
    """Returns the SLURM job's memory on this node in bytes; empty without a limit.

    SLURM counts in MiB; 0 means the whole node (sbatch, --mem and --mem-per-cpu).
    """
    try:
        mebibytes = int(variables.get("SLURM_MEM_PER_NODE", 0)) or (
            int(variables.get("SLURM_MEM_PER_CPU", 0)) * int(variables.get("SLURM_CPUS_ON_NODE", 0))
        )
    except ValueError:
        return []
    return [mebibytes * MEBIBYTE] if mebibytes > 0 else []


def _resident_bytes() -> int:
    total = 0
    this_process = psutil.Process()
    for process in (this_process, *this_process.children(recursive=True)):
        try:
            total += process.memory_info().rss
        except psutil.Error:
            continue
    return total


def groups_of(
    process: Path = PROCESS, groups: Path = CGROUPS, controller: str = "memory"
) -> Iterator[Path]:
    """Yields the folders of a process's control group and of its ancestors. In containers, which
    mount only the end of a group's path, it is the mount point."""
    folder = group_folder(process, groups, controller)
    if folder is None:
        return
    top = groups / controller if folder.is_relative_to(groups / controller) else groups
    for group in (folder, *folder.parents):
        yield group
        if group == top:
            return


def group_folder(
    process: Path = PROCESS, groups: Path = CGROUPS, controller: str = "memory"
) -> Path | None:
    folder = None
    for line in _lines(process / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):  # version 1 takes precedence over version 2
            return groups / controller / path.lstrip("/")
        if not controllers:
            folder = groups / path.lstrip("/")
    return folder


def oom_kills(process: Path = PROCESS, groups: Path = CGROUPS) -> int | None:
    """Returns how many processes of a memory control group, or else of the machine, were killed so
    far; None if unknown.

    Source: `memory.oom_control` (version 1),
    `memory.events` (version 2), `oom_kill` of /proc/vmstat.
    """
    group = group_folder(process, groups)
    of_group = [group / "memory.oom_control", group / "memory.events"] if group else []
    for file in (*of_group, process.parent / "vmstat"):
        for line in _lines(file):
            key, _, number = line.partition(" ")
            if key == _KEY:
                return int(number)
    return None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []


def physical_cores(threads: Iterable[int]) -> list[tuple[int, ...]]:
    """Groups hardware threads (the kernel's CPU numbers) by core."""
    groups: dict[str, list[int]] = {}
    for thread in sorted(threads):
        path = Path(f"/sys/devices/system/cpu/cpu{thread}/topology/thread_siblings_list")
        siblings = path.read_text().strip() if path.exists() else str(thread)
        groups.setdefault(siblings, []).append(thread)
    return [tuple(group) for group in groups.values()]


def quota_cores(process: Path = PROCESS, groups: Path = CGROUPS) -> int | None:
    """Returns the CPU quota of this process's control groups in cores, rounded up; None without
    one.

    Files: the kernel's Documentation/admin-guide/cgroup-v2.rst and scheduler/sched-bwc.rst.
    """
    quotas = []
    for group in groups_of(process, groups, "cpu"):
        limits = _text(group / "cpu.max").split() or [
            _text(group / "cpu.cfs_quota_us"),
            _text(group / "cpu.cfs_period_us"),
        ]
        quota, period = (int(limit) if limit.isdecimal() else 0 for limit in limits[:2])
        if quota and period:  # else "max" or -1, or no file
            quotas.append(math.ceil(quota / period))
    return min(quotas, default=None)


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def allowed_cores() -> list[int]:
    """Returns this process's CPUs, up to its CPU quota; one hardware thread of each core comes
    first."""
    cores = physical_cores(os.sched_getaffinity(0))
    threads = [core[0] for core in cores] + sorted(thread for core in cores for thread in core[1:])
    return threads[: quota_cores()]


def pin(cell: Cell, processes: int, local: int) -> tuple[tuple[int, ...], ...]:
    """Returns each local process's cores; shared if too few. `processes`: of the whole trial,
    servers included; `local`: on this node."""
    if cell.device == "cuda":
        return _near_gpus(cell, local)
    cores = allowed_cores()
    per_process = cell.threads_per_device * max(1, cell.devices // processes)
    return tuple(
        tuple(sorted({cores[(p * per_process + i) % len(cores)] for i in range(per_process)}))
        for p in range(local)
    )


def _near_gpus(cell: Cell, local: int) -> tuple[tuple[int, ...], ...]:
    """Returns each local process's cores near its GPUs: several, because autograd, NCCL and
    libraries have threads of their own."""
    allowed = os.sched_getaffinity(0)
    gpus = cell.devices // cell.nodes
    workers = min(local, gpus)
    shares = _shares(gpus)
    per_worker = gpus // workers
    worker_shares = (shares[rank * per_worker : (rank + 1) * per_worker] for rank in range(workers))
    servers = local - workers
    return (
        *(tuple(sorted(set().union(*parts))) for parts in worker_shares),
        *[tuple(sorted(allowed))] * servers,
    )


def _shares(gpus: int) -> list[tuple[int, ...]]:
    from harness.host.gpu_inventory import nearby_cores

    cores = physical_cores(os.sched_getaffinity(0))
    shares = share_cores(cores, [nearby_cores(gpu) for gpu in range(gpus)])
    quota = quota_cores()
    return shares if quota is None else [_first_cores(share, quota // gpus) for share in shares]


def _first_cores(threads: Sequence[int], count: int) -> tuple[int, ...]:
    return tuple(thread for core in physical_cores(threads)[: max(1, count)] for thread in core)


def share_cores(
    cores: Sequence[tuple[int, ...]], near: Sequence[Sequence[int]]
) -> list[tuple[int, ...]]:
    """Returns each GPU's hardware threads; shared if too few. `cores`: threads of each core.
    `near`: threads near each GPU; all cores if it has none of them."""
    groups: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for gpu, threads in enumerate(near):
        usable = tuple(core for core in cores if set(core) & set(threads)) or tuple(cores)
        groups.setdefault(usable, []).append(gpu)
    shares: list[tuple[int, ...]] = [()] * len(near)
    for usable, gpus in groups.items():
        size = len(usable) // len(gpus)
        for index, gpu in enumerate(gpus):
            part = (
                usable[index * size : (index + 1) * size]
                if size
                else usable[index % len(usable) :][:1]
            )
            shares[gpu] = tuple(thread for core in part for thread in core)
    return shares


def threads_of(cell: Cell, cores: Sequence[int]) -> int:
    """Returns a pinned rank's number of intra-op threads; on a GPU, one per core."""
    return max(1, len(physical_cores(cores))) if cell.device == "cuda" else cell.threads_per_device


def core_ranges(cores: Iterable[int]) -> str:
    """Formats numbers in the kernel's notation: `0-3,8`."""
    parts: list[list[int]] = []
    for core in sorted(cores):
        if parts and core == parts[-1][-1] + 1:
            parts[-1].append(core)
        else:
            parts.append([core])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def oversubscribed(cell: Cell, cores: int | None, processes: int = 0) -> bool:
    """Returns whether the ranks need more than `cores`, those of all nodes (if None, this is
    unknown and the answer False). A CPU rank needs a core for each of its threads, a GPU rank one
    core, which launches kernels. `processes`: number of ranks, if more than devices."""
    if cores is None:
        return False
    threads = cell.threads_per_device if cell.device == "cpu" else 1
    return threads * max(cell.devices, processes) > cores


def cores_of_nodes(cell: Cell) -> int:
    """Returns all nodes' cores, assuming that they are like this host."""
    return cell.nodes * len(allowed_cores())
