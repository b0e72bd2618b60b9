"""Timing of steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

B = TypeVar("B")
R = TypeVar("R")


@dataclass(frozen=True)
class StepTime:
    data_seconds: float
    """Time to prepare the batch and move it to the device."""
    step_seconds: float
    """Step time including data, between two synchronisations of the device."""


def timed_step(
    fetch: Callable[[], B],
    step: Callable[[B], R],
    synchronize: Callable[[], None],
    now: Callable[[], float] = time.perf_counter,
) -> tuple[R, StepTime]:
    """Runs one step on the batch from `fetch`; returns the step's result and times.

    Nothing else runs between the first and the last reading of the clock `now`, in seconds.
    """
    synchronize()
    begin = now()
    batch = fetch()
    fetched = now()
    result = step(batch)
    synchronize()
    end = now()
    return result, StepTime(fetched - begin, end - begin)
