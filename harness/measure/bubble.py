"""Idle share of a pipeline's devices."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence

from harness.measure.patched import Method, replaced


def busy_fraction(
    step: Callable[[], None],
    compute: Sequence[tuple[object, str]],
    synchronize: Callable[[], None],
    repeats: int = 3,
    now: Callable[[], float] = time.perf_counter,
) -> float:
    """Returns the share of the wall time of `repeats` steps that this rank spent in `compute`.

    `compute`: methods by owner and name, wrapped for these steps only. Synchronising the device
    around each call makes GPU steps slower than timed ones; only the ratio is used.
    """
    busy = 0.0

    def timed(method: Method) -> Method:
        def call(*args: object, **kwargs: object) -> object:
            nonlocal busy
            synchronize()
            begin = now()
            try:
                return method(*args, **kwargs)
            finally:
                synchronize()
                busy += now() - begin

        return call

    with contextlib.ExitStack() as stack:
        for owner, name in compute:
            stack.enter_context(replaced(owner, name, timed))
        begin = now()
        for _ in range(repeats):
            step()
        synchronize()
        total = now() - begin
    return busy / total


def bubble_fraction(busy: Iterable[float]) -> float:
    """Returns 1 - the ranks' mean busy share.

    Theory for GPipe and 1F1B with p stages and m micro-batches: (p-1)/(m+p-1) (GPipe, arXiv
    1811.06965, section 2.3).
    """
    shares = list(busy)
    return max(0.0, 1.0 - sum(shares) / len(shares))
