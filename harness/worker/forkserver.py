"""Imported once, in the fork server only: what every rank needs, so that a rank starts with it."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import warnings
from collections.abc import Callable

from harness.host.process import LAUNCHER, adopt_orphans, die_with_parent

gc.disable()  # see harness/host/imports.py
die_with_parent()  # before the imports that take seconds
# It died before the kernel was told, or Python has started this one, where the former was killed.
if str(os.getppid()) != os.environ.pop(LAUNCHER, ""):
    os._exit(1)
adopt_orphans()

import harness.strategy.registry  # noqa: E402
import harness.worker.preload  # noqa: E402
import harness.worker.worker  # noqa: E402
from harness.host.cuda import cuda_is_initialized  # noqa: E402
from harness.host.nvml import end_nvml  # noqa: E402

# A rank that was killed leaves its control process to this one, whose end is no news.
warnings.filterwarnings("ignore", "forkserver: waitpid returned unexpected pid")

INITIALIZED_CUDA: str | None = None
"""What of the following imports initialised CUDA, so that no rank can use it; None: nothing did."""


def _preload(name: str, load: Callable[[], object]) -> None:
    """Runs one import and notes whether it was the one that initialised CUDA."""
    global INITIALIZED_CUDA
    with contextlib.suppress(
        Exception
    ):  # what is wrong with a library is said to whoever wants to use it
        load()
    if INITIALIZED_CUDA is None and cuda_is_initialized():
        INITIALIZED_CUDA = name


with open(os.devnull, "w") as nowhere:  # what libraries print on import is no news of any trial
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
        harness.strategy.registry.strategies,
    )
    for number, copy in zip((1, 2), copies, strict=True):
        os.dup2(copy, number)
        os.close(copy)
end_nvml()

# What the libraries made is not garbage: without this every collection in a rank walks, and copies,
# a million objects.
gc.collect()
gc.freeze()
gc.enable()
