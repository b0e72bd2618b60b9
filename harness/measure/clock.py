"""How long did each step take?"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

B = TypeVar("B")
R = TypeVar("R")


@dataclass(frozen=True)
class StepTime:
    """Times of one step on one rank, in seconds."""

    data_seconds: float
    """Making the batch and moving it to the device."""
    step_seconds: float
    """The whole step, data included, from one synchronisation of the device to the next."""


def timed_step(
    fetch: Callable[[], B],
    step: Callable[[B], R],
    synchronize: Callable[[], None],
    now: Callable[[], float] = time.perf_counter,
) -> tuple[R, StepTime]:
    """Runs one step on the batch that `fetch` returns; returns what `step` returned, and the times.

    Nothing else happens between the first and the last reading of the clock `now`, in seconds.
    """
    synchronize()
    begin = now()
    batch = fetch()
    fetched = now()
    result = step(batch)
    synchronize()
    end = now()
    return result, StepTime(fetched - begin, end - begin)
