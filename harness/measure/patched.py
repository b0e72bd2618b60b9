"""A method wrapped for the time of a measurement, and left as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def replaced(
    owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """`owner.name` wrapped by `make` for as long as the context lasts."""
    own = vars(owner) if hasattr(owner, "__dict__") else {}
    missing = name not in own
    before = getattr(owner, name)
    setattr(owner, name, make(before))
    try:
        yield
    finally:
        if missing:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
