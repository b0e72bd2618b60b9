from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
import sys
import warnings
from collections.abc import Callable

from harness.host.process import (
    ALONE,
    LAUNCHER,
    adopt_orphans,
    die_with_parent,
    enter_loopback_only,
    take_stops,
)

gc.disable()  # see harness/host/gc_tuning.py
signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher ends this process
take_stops()
die_with_parent()  # before the slow imports
# The parent died before the kernel was told, or Python restarted a killed fork server.
if str(os.getppid()) != os.environ.pop(LAUNCHER, ""):
    os._exit(1)
adopt_orphans()
# Only single-threaded processes can enter, so before the other imports.
if os.environ.pop(ALONE, "") and enter_loopback_only():
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # else lookups wait for a network

import harness.seam.registry  # noqa: E402
import harness.worker.preload  # noqa: E402
import harness.worker.worker  # noqa: E402
from harness.host.environment import cuda_is_initialized  # noqa: E402
from harness.host.nvml import end_nvml  # noqa: E402

# Orphaned processes of killed ranks become children of this process.
warnings.filterwarnings("ignore", "forkserver: waitpid returned unexpected pid")

INITIALIZED_CUDA: str | None = None
"""Import that initialised CUDA, which makes it unusable in ranks."""


# A launcher that stops while it starts a process sends half a request, or removes its locks.
_STOPPED = EOFError, FileNotFoundError
sys.excepthook = lambda kind, *of: None if kind in _STOPPED else sys.__excepthook__(kind, *of)


def _preload(name: str, load: Callable[[], object]) -> None:
    global INITIALIZED_CUDA
    # Ranks that use the library report the error.
    with contextlib.suppress(Exception):
        load()
    if INITIALIZED_CUDA is None and cuda_is_initialized():
        INITIALIZED_CUDA = name


with open(os.devnull, "w") as nowhere:  # output of an import belongs to no trial
    copies = os.dup(1), os.dup(2)
    os.dup2(nowhere.fileno(), 1)
    os.dup2(nowhere.fileno(), 2)
    _preload("the suite itself", lambda: None)
    for package in os.environ.pop(harness.worker.worker.PRELOAD).split():
        _preload(
            f"package {package}",
            functools.partial(harness.worker.preload.import_packages, [package]),
        )
    _preload(
        "a strategy's module (harness.strategies, or a plug-in's)",
        harness.seam.registry.strategies,
    )
    for number, copy in zip((1, 2), copies, strict=True):
        os.dup2(copy, number)
        os.close(copy)
end_nvml()

# Otherwise each collection in a rank would traverse a million objects and copy their pages.
gc.collect()
gc.freeze()
gc.enable()
