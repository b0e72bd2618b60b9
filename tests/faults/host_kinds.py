"""Faults of a run's host: disks, clock, ports and memory. Most need root; faults that the system
does not permit are left out, with a reason."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from harness.host.cores import group_folder
from harness.host.process import OPEN_NETWORK
from tests.faults.place import Inject, Place
from tests.faults.run_process import Run
from tests.waiting import LONG, PROMPT, until

CLOCK = Path(__file__).with_name("clock.c")
FROZEN_SECONDS = 3.0
OOM_LIMIT = 3 * 2**29
"""Most bytes of a run, its fork server and two ranks, one of which tries to take 8 GiB."""


def _do(*words: str | Path) -> None:
    subprocess.run([str(word) for word in words], check=True, capture_output=True)


@contextlib.contextmanager
def mounted(folder: Path, *options: str | Path) -> Iterator[Path]:
    """Mounts a separate file system."""
    folder.mkdir()
    _do("mount", *options, folder)
    try:
        yield folder
    finally:
        _do("umount", "--lazy", folder)
        folder.rmdir()


def in_memory(place: Place, size: str = "16m") -> contextlib.AbstractContextManager[Path]:
    disk = place.temporary.parent / "disk"
    return mounted(disk, "-t", "tmpfs", "-o", f"size={size}", "tmpfs")


def full_disk(place: Place) -> None:
    """The disk with the results is full until something is deleted."""
    with in_memory(place) as disk:
        run = Run(place, disk / "results")
        run.until_in_the_middle()
        filler = disk / "filler"
        with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as sink:
            while True:
                sink.write(bytes(4096))
        run.refused("cannot be written: No space left on device")
        filler.unlink()
        run.finish()


def read_only(place: Place) -> None:
    """The results' file system is read-only for a while, as after disk errors."""
    with in_memory(place) as disk:
        run = Run(place, disk / "results")
        run.until_in_the_middle()
        while run.process.poll() is None:
            try:
                _do("mount", "-o", "remount,ro", disk)
                break
            except subprocess.CalledProcessError:  # a file is being written
                time.sleep(0.01)
        run.refused("Read-only file system")
        _do("mount", "-o", "remount,rw", disk)
        run.finish()


def folder_removed(place: Place) -> None:
    """The results folder is removed: the run says so, and does not create an unreadable one."""
    folder = place.temporary.parent / "removed"
    run = Run(place, folder)
    run.until_in_the_middle()
    while folder.exists():
        shutil.rmtree(folder, ignore_errors=True)
    code, errors = run.process.wait(timeout=LONG), run.errors()
    assert code == 2, (code, errors)
    assert re.search("is no longer in results|no runs? |cannot be written", errors), errors
    assert "Traceback" not in errors, errors
    shutil.rmtree(folder, ignore_errors=True)


def file_system_hangs(place: Place) -> None:
    """Writes to the results block for some seconds: the run waits, and loses nothing."""
    image = place.temporary.parent / "image"
    with open(image, "wb") as sink:
        sink.truncate(32 * 2**20)
    _do("mkfs.ext4", "-q", image)
    with mounted(place.temporary.parent / "disk", "-o", "loop", image) as disk:
        run = Run(place, disk / "results")
        run.until_in_the_middle()
        _do("fsfreeze", "--freeze", disk)
        try:
            time.sleep(FROZEN_SECONDS)
        finally:
            _do("fsfreeze", "--unfreeze", disk)
        run.finish(good=3)
    image.unlink()


def clock_jumps(place: Place) -> None:
    """The clock of a run's processes alternates every second between an hour ahead and an hour
    behind."""
    library = place.temporary.parent / "clock.so"
    if not library.exists():
        _do("cc", "-shared", "-fPIC", "-O1", "-o", library, CLOCK, "-ldl")
    run = Run(place, environment={"LD_PRELOAD": str(library)})
    run.finish(good=3)
    trials = run.store.load([run.name], steps=False).trials
    assert (trials["wall_seconds"].between(0, 120)).all()
    known = trials["startup_seconds"].dropna()
    assert known.between(0, 120).all()


def no_port(place: Place) -> None:
    """Every ephemeral port is in use."""
    run = Run(
        place,
        before=[sys.executable, "-m", "tests.faults.no_ports"],
        environment={OPEN_NETWORK: "1"},  # ranks would have the ports of a network of their own
    )
    for status, reason in run.ended():
        assert status == "failed", (status, reason)
        assert "in use" in reason, reason


def kernel_kills(place: Place) -> None:
    """A rank exceeds the memory of its run's control group, and the kernel kills it."""
    group = _new_group(place.chance.randrange(10**9))
    try:
        cell = "{strategy: faulty, options: {fault: eats_memory}}"
        run = Run(
            place,
            cell=cell,
            enter=functools.partial(_enter, group),
            # Filling the group takes longer than the campaign waits for a hanging rank.
            environment={"PARALLELISM_BENCH_HANG_SECONDS": "15"},
        )
        (ended,) = run.ended()
        assert ended[0] == "out_of_memory", ended
        assert re.search("rose by [12]$", ended[1]), ended
    finally:
        # The fork server ends just after its run.
        until(lambda: not (group / "cgroup.procs").read_text(), "processes outlive the run", PROMPT)
        group.rmdir()


def _new_group(number: int) -> Path:
    """Creates a limited memory control group (version 1) below this process's own."""
    own = group_folder()
    assert own
    group = own / f"campaign-{number}"
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(OOM_LIMIT))
    return group


def _enter(group: Path) -> None:
    (group / "cgroup.procs").write_text(str(os.getpid()))


@functools.cache
def _may_mount() -> bool:
    """Returns whether this user is root and no container forbids mounting."""
    with contextlib.suppress(OSError):
        tried = subprocess.run(["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"])
        return os.getuid() == 0 and tried.returncode == 0
    return False


def _needs(*programs: str) -> str:
    missing = [program for program in programs if not shutil.which(program)]
    return f"{', '.join(missing)} is not installed" if missing else ""


def mounts(*programs: str) -> str:
    return _needs(*programs) or ("" if _may_mount() else "this user may not mount file systems")


def _group() -> str:
    own = group_folder()
    if own is None or not (own / "memory.limit_in_bytes").exists():
        return "there is no memory control group of version 1"
    return "" if os.access(own, os.W_OK) else "this user may not create control groups"


HOST_KINDS: dict[str, Inject] = {
    "a disk is full": full_disk,
    "a results folder is read-only": read_only,
    "a results folder is removed": folder_removed,
    "a file system hangs": file_system_hangs,
    "a clock jumps": clock_jumps,
    "no port is free": no_port,
    "the kernel kills for lack of memory": kernel_kills,
}
_LACKING: dict[str, Callable[[], str]] = {
    "a disk is full": lambda: mounts("mount"),
    "a results folder is read-only": lambda: mounts("mount"),
    "a file system hangs": lambda: mounts("mount", "mkfs.ext4", "fsfreeze", "losetup"),
    "a clock jumps": lambda: _needs("cc"),
    "the kernel kills for lack of memory": _group,
}


def left_out(kinds: Sequence[str], more: Mapping[str, Callable[[], str]]) -> dict[str, str]:
    """Returns the reasons for kinds that cannot be injected here. `more`: what tells that of
    further kinds."""
    lacking = {**_LACKING, **more}
    reasons = {kind: lacking[kind]() for kind in kinds if kind in lacking}
    return {kind: reason for kind, reason in reasons.items() if reason}
