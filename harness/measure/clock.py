"""Timing of steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

B = TypeVar("B")
R = TypeVar("R")


def timed_step(
    fetch: Callable[[], B],
    step: Callable[[B], R],
    synchronize: Callable[[], None],
    now: Callable[[], float] = time.perf_counter,
) -> tuple[R, float, float]:
    """Runs one step on the batch from `fetch`; returns its result, and the seconds of getting the
    batch and of the whole step.

    Nothing else runs between the first and the last reading of the clock `now`, in seconds.
    """
    synchronize()
    begin = now()
    batch = fetch()
    fetched = now()
    result = step(batch)
    synchronize()
    end = now()
    return result, fetched - begin, end - begin
