"""What ties processes together, so that none is left.

Imports nothing that starts a thread: who has one may not make namespaces.
"""

from __future__ import annotations

import ctypes
import signal


def die_with_parent() -> None:
    """The kernel kills this process when the one that started it is gone, however it went."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def adopt_orphans() -> None:
    """Descendants whose parent dies become this process's children, where they can be found."""
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
