from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

OBJECTS_BEFORE_COLLECTION = 50_000
"""Threshold for processes whose many objects stay alive (Python's default: 700)."""


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Disables the garbage collector, which takes a fifth of the time of importing torch and
    libraries."""
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
