"""Lifetimes and Linux namespaces of processes.

`python -m harness.host.process COMMAND...` runs a command where only loopback exists, if allowed.

Imports nothing that starts a thread: only single-threaded processes can create namespaces.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import multiprocessing
import os
import signal
import socket
import struct
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TypeVar

LAUNCHER = "PARALLELISM_BENCH_LAUNCHER"
"""Environment variable: process id that the fork server must not outlive."""
ALONE = "PARALLELISM_BENCH_ALONE"
"""Environment variable: whether the fork server enters a network of its own."""
OPEN_NETWORK = "PARALLELISM_BENCH_OPEN_NETWORK"
"""Environment variable: with 1, ranks on one host keep its network, such as for data that they
download themselves."""


def machine_id() -> str:
    """Identifies the kernel until reboot; containers and network namespaces share it."""
    file = Path("/proc/sys/kernel/random/boot_id")
    return file.read_text().strip() if file.exists() else socket.gethostname()


def die_with_parent() -> None:
    """Ends this process when its parent ends, or at once if the parent has ended already."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    starter = multiprocessing.parent_process()  # the launcher, if the fork server forked this
    if starter and not starter.is_alive():
        os._exit(1)


def adopt_orphans() -> None:
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


def descendants(pid: int) -> list[int]:
    """Returns the process ids of all descendants.

    psutil would read the files of all processes, which takes 60 ms on a node with 3,000.
    """
    children: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # this thread has ended
                children += map(int, (task / "children").read_text().split())
    return [*children, *(below for child in children for below in descendants(child))]


STOPS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def starting_without_stops() -> Iterator[None]:
    """Blocks SIGINT and SIGTERM in processes started in this context until they call `take_stops`:
    Ctrl-C reaches the whole process group, even a process that is still importing."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def take_stops() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)


@contextlib.contextmanager
def caller_not_imported() -> Iterator[None]:
    """Keeps multiprocessing from running a script without `if __name__ == "__main__"` in each new
    process."""
    caller = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = caller


# linux/sched.h
NEW_MOUNTS, NEW_HOST_NAME, NEW_USER, NEW_NETWORK = 0x20000, 0x4000000, 0x10000000, 0x40000000
_BIND, _RECURSIVE, _PRIVATE = 0x1000, 0x4000, 0x40000  # linux/mount.h
_SET_FLAGS, _UP = 0x8914, 0x1  # linux/sockios.h, linux/if.h
_LIBC = ctypes.CDLL(None, use_errno=True)


def _checked(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def unshare(flags: int) -> None:
    """Moves this single-threaded process to new namespaces; raises OSError if forbidden."""
    _checked(_LIBC.unshare(flags))


def own_hosts(file: Path) -> None:
    """Mounts a file over /etc/hosts for this process and its children.

    Libraries look up their own host name there.
    """
    unshare(NEW_MOUNTS)
    _checked(_LIBC.mount(b"none", b"/", None, _RECURSIVE | _PRIVATE, None))
    _checked(_LIBC.mount(os.fsencode(file), b"/etc/hosts", None, _BIND, None))


def own_network(as_root: bool = True) -> None:
    """Moves this process to a new network namespace, if necessary in a user namespace, in which it
    is root or stays the same user; raises OSError if forbidden."""
    user, group = os.getuid(), os.getgid()
    inside = (0, 0) if as_root else (user, group)
    try:
        unshare(NEW_NETWORK)
    except PermissionError:
        unshare(NEW_USER | NEW_NETWORK)
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{inside[0]} {user} 1"),
            ("gid_map", f"{inside[1]} {group} 1"),
        ):
            Path(f"/proc/self/{name}").write_text(text)
    die_with_parent()  # a change of credentials clears this setting


def bring_up_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh14x", b"lo", _UP)  # struct ifreq of linux/if.h
        fcntl.ioctl(any_socket, _SET_FLAGS, request)


def enter_loopback_only() -> bool:
    """Moves this process to a namespace that has only loopback; returns False if forbidden, or not
    wanted (OPEN_NETWORK).

    A child process tries first, since there is no way back: AppArmor (Ubuntu 24.04) permits the
    namespace, but denies bringing up loopback.
    """
    if os.environ.get(OPEN_NETWORK, "0") not in ("", "0"):
        return False
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(OSError):
            own_network(as_root=False)
            bring_up_loopback()
            code = 0
        os._exit(code)
    _, failed = os.waitpid(child, 0)
    if not failed:
        own_network(as_root=False)
        bring_up_loopback()
    return not failed


def why_not_alone() -> str:
    """Returns why other users of this host can reach the ranks' ports; empty if they cannot."""
    shows_network = "import os; print(os.readlink('/proc/self/ns/net'))"
    command = [sys.executable, "-m", "harness.host.process", sys.executable, "-Sc", shows_network]
    inside = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    if inside and inside != os.readlink("/proc/self/ns/net"):
        return ""
    wanted = f"{OPEN_NETWORK} is set" if OPEN_NETWORK in os.environ else ""
    cause = wanted or "the system permits no network namespace"
    return f"other users of this host can reach the ranks' ports, because {cause} (SECURITY.md)"


if __name__ == "__main__":
    enter_loopback_only()
    os.execvp(sys.argv[1], sys.argv[1:])


_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of linux/mman.h, since Linux 5.14
_PRESENT = 1 << 63  # Documentation/admin-guide/mm/pagemap.rst
_BYTES_PER_ENTRY = 8


def copy_shared_pages() -> int:
    """Copies each present writable page, so that a forked rank's first steps need not. Returns
    their bytes; 0 before Linux 5.14."""
    libc, page = ctypes.CDLL(None), os.sysconf("SC_PAGE_SIZE")
    copied = 0
    for first, end in _present_pages(page):
        start, length = first * page, (end - first) * page
        if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _POPULATE_WRITE) == 0:
            copied += length
    return copied


def _present_pages(page: int) -> Iterator[tuple[int, int]]:
    """Yields runs of present pages in private writable mappings: the first page, and the one past
    the last."""
    import numpy as np

    with open("/proc/self/maps") as maps, open("/proc/self/pagemap", "rb", buffering=0) as entries:
        for line in maps.read().splitlines():
            addresses, access, *_ = line.split()
            if access[1] + access[3] != "wp":
                continue
            first, end = (int(address, 16) // page for address in addresses.split("-"))
            entries.seek(first * _BYTES_PER_ENTRY)
            content = entries.read((end - first) * _BYTES_PER_ENTRY)
            present = np.frombuffer(content, np.uint64) & np.uint64(_PRESENT) != 0
            edges = np.flatnonzero(np.diff(np.concatenate(([False], present, [False])).astype(int)))
            for begin, stop in edges.reshape(-1, 2).tolist():
                yield first + begin, first + stop


Value = TypeVar("Value")


@dataclass(frozen=True)
class Ended:
    """How a call ended that gave no result."""

    reason: str


def call_apart(function: Callable[..., Value], *arguments: object, limit: float) -> Value | Ended:
    """Calls a function in a new process, in which it may crash, hang, or initialise CUDA.

    Its output is only used to explain how it ended: with an error, without an answer, or after
    `limit` seconds.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    with receiver, NamedTemporaryFile() as output:
        call = (sender, output.name, function, arguments)
        process = context.Process(target=_answer, args=call)
        with sender, caller_not_imported(), starting_without_stops():
            process.start()
        try:
            if not receiver.poll(limit):
                return Ended(f"did not finish within {limit:g} s")
            answer: Value | Ended = receiver.recv()
            return answer
        except EOFError:
            process.join()
            lines = Path(output.name).read_text(errors="replace").strip().splitlines()
            return Ended((lines or [f"exit code {process.exitcode}"])[-1])
        finally:
            process.kill()
            process.join()
            process.close()


def _answer(
    sender: Connection[object, object],
    output: str,
    function: Callable[..., object],
    arguments: tuple[object, ...],
) -> None:
    die_with_parent()
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        answer = function(*arguments)
    except Exception as error:
        text = str(error).strip().splitlines()
        answer = Ended(f"{type(error).__name__}: {text[-1]}" if text else type(error).__name__)
    sender.send(answer)
