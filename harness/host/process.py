"""Ties the lifetimes of processes together, so that none is left behind.

Imports nothing that starts a thread: harness/links uses it before it creates namespaces, which the
kernel allows only for single-threaded processes.
"""

from __future__ import annotations

import ctypes
import signal

LAUNCHER = "PARALLELISM_BENCH_LAUNCHER"
"""Environment variable with the process id that the fork server must not outlive."""


def die_with_parent() -> None:
    """Makes the kernel kill this process when its parent ends for any reason."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def adopt_orphans() -> None:
    """Makes orphaned descendants children of this process, so that it can find them."""
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
