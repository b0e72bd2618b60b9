"""Ties the lives of processes together, so that none is left behind.

Imports nothing that starts a thread: harness/links uses it before it makes namespaces, which the
kernel allows only to a process with one thread.
"""

from __future__ import annotations

import ctypes
import signal

LAUNCHER = "PARALLELISM_BENCH_LAUNCHER"
"""Environment variable that tells the fork server the process id it must not outlive."""


def die_with_parent() -> None:
    """Makes the kernel kill this process when its parent ends, in whichever way."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def adopt_orphans() -> None:
    """Makes descendants whose parent dies children of this process, which can then find them."""
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
