"""Imported once, in the fork server only: what every rank needs, so that a rank starts with it."""

from __future__ import annotations

import contextlib
import gc
import os

import harness.imports
import harness.registry
import harness.worker
from harness.parents import adopt_orphans, die_with_parent

die_with_parent()
if os.getppid() != int(os.environ.pop(harness.worker.LAUNCHER)):  # it died while this was importing
    os._exit(1)
adopt_orphans()

with open(os.devnull, "w") as nowhere:  # what these say of themselves on import is no news of any trial
    said = os.dup(1), os.dup(2)
    os.dup2(nowhere.fileno(), 1)
    os.dup2(nowhere.fileno(), 2)
    harness.imports.import_packages(os.environ.pop(harness.worker.PRELOAD).split())
    with contextlib.suppress(Exception):  # what is wrong with one is said to whoever wants it
        harness.registry.strategies()
    for number, copy in zip((1, 2), said, strict=True):
        os.dup2(copy, number)
        os.close(copy)

# What the libraries made is not garbage: without this every collection in a rank walks, and copies, a million objects.
gc.collect()
gc.freeze()
