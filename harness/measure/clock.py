from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

B = TypeVar("B")
R = TypeVar("R")


def timed_step(
    fetch: Callable[[], B],
    step: Callable[[B], R],
    synchronize: Callable[[], None],
    now: Callable[[], float] = time.perf_counter,
) -> tuple[R, float, float]:
    """Runs one step; returns its result, and the seconds of fetching and of the whole step."""
    synchronize()
    begin = now()
    batch = fetch()
    fetched = now()
    result = step(batch)
    synchronize()
    end = now()
    return result, fetched - begin, end - begin


Method: TypeAlias = Callable[..., Any]


@contextlib.contextmanager
def replaced(owner: object, name: str, wrap: Callable[[Method], Method]) -> Iterator[None]:
    """Wraps `owner.name`, of a class, instance or module, within the context."""
    attributes = vars(owner) if hasattr(owner, "__dict__") else {}
    inherited = name not in attributes
    before = getattr(owner, name)
    setattr(owner, name, wrap(before))
    try:
        yield
    finally:
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def busy_fraction(
    step: Callable[[], None],
    compute: Sequence[tuple[object, str]],
    synchronize: Callable[[], None],
    repeats: int = 3,
    now: Callable[[], float] = time.perf_counter,
) -> float:
    """Returns the share of `repeats` steps' wall time that this rank spends in the methods
    `compute`.

    Synchronising around methods slows GPU steps, so only the ratio is used.
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

    Theory for GPipe and 1F1B, p stages and m micro-batches: (p-1)/(m+p-1) (GPipe, arXiv 1811.06965,
    section 2.3).
    """
    shares = list(busy)
    return max(0.0, 1.0 - sum(shares) / len(shares))
