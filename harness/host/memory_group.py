"""Out-of-memory kills under this process's memory limit (a container, a job)."""

from __future__ import annotations

from pathlib import Path

PROCESS = Path("/proc/self")
CGROUPS = Path("/sys/fs/cgroup")
_KEY = "oom_kill"


def group_folder(process: Path = PROCESS, groups: Path = CGROUPS) -> Path | None:
    """Returns the folder of a process's memory control group; None without one.

    `process`: its folder in /proc.
    """
    folder = None
    for line in _lines(process / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":  # version 1; takes precedence over version 2
            return groups / "memory" / path.lstrip("/")
        if not controllers:
            folder = groups / path.lstrip("/")
    return folder


def oom_kills(process: Path = PROCESS, groups: Path = CGROUPS) -> int | None:
    """Returns the number of processes killed so far in a process's memory control group.

    Without such a group, counts the whole machine. None: the system does not count them. Source:
    `memory.oom_control` of control groups version 1, `memory.events` of version 2 (the kernel's
    Documentation/admin-guide), `oom_kill` of /proc/vmstat.
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
