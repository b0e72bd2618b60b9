"""Memory limits of this process, and out-of-memory kills under them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

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
