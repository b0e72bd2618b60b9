"""Settings of the garbage collector for processes that load large libraries."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

OBJECTS_BEFORE_COLLECTION = 50_000
"""Garbage collection threshold (Python's: 700) for processes that load tables and libraries, whose
objects stay alive."""


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Disables Python's cyclic garbage collector within the context.

    Imported objects stay alive, so collections are wasted: a fifth of the import time of torch,
    transformers, DeepSpeed, Accelerate and PEFT.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def collect_seldom() -> None:
    """Lowers the collection frequency, for a process that imports lazily."""
    gc.set_threshold(OBJECTS_BEFORE_COLLECTION, 20, 20)
