"""What share of a pipeline's devices' time is spent waiting?"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from harness.measure.patched import replaced


def busy_fraction(
    step: Callable[[], None],
    compute: Sequence[tuple[Any, str]],
    synchronize: Callable[[], None],
    repeats: int = 3,
    now: Callable[[], float] = time.perf_counter,
) -> float:
    """Share of the wall time of `repeats` steps that this rank spent inside the named methods.

    The methods are wrapped for this pass only. The device is synchronised around each call, so the
    pass is slower than a timed step on a GPU; fractions are taken within it.
    """
    busy = 0.0

    def wrapped(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
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
            stack.enter_context(replaced(owner, name, wrapped))
        begin = now()
        for _ in range(repeats):
            step()
        synchronize()
        total = now() - begin
    return busy / total


def bubble_fraction(busy: Iterable[float]) -> float:
    """1 - mean busy share over the ranks.

    Theory for GPipe and 1F1B: (p-1)/(m+p-1) (GPipe, arXiv 1811.06965).
    """
    shares = list(busy)
    return max(0.0, 1.0 - sum(shares) / len(shares))
