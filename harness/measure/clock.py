"""How long did each step take?"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StepTime:
    """Times of one step on one rank, in seconds."""

    data_seconds: float
    """Getting the batch and moving it to the device."""
    step_seconds: float
    """The whole step, data included, between two device synchronisations."""


def timed_step(
    fetch: Callable[[], Any],
    step: Callable[[Any], Any],
    synchronize: Callable[[], None],
    now: Callable[[], float] = time.perf_counter,
) -> tuple[Any, StepTime]:
    """Runs one step; returns what the step returned and its times.

    Nothing else happens between the two readings.
    """
    synchronize()
    begin = now()
    batch = fetch()
    fetched = now()
    result = step(batch)
    synchronize()
    end = now()
    return result, StepTime(fetched - begin, end - begin)
