"""Garbage collector settings for processes that load large libraries."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

OBJECTS_BEFORE_COLLECTION = 50_000
"""Threshold for processes whose many objects stay alive (Python's default: 700)."""


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Disables the cyclic garbage collector within the context.

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
    """Makes collections rare, for a process that imports lazily."""
    gc.set_threshold(OBJECTS_BEFORE_COLLECTION, 20, 20)
