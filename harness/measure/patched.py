"""Temporarily wrapped methods."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

Method: TypeAlias = Callable[..., Any]


@contextlib.contextmanager
def replaced(owner: object, name: str, wrap: Callable[[Method], Method]) -> Iterator[None]:
    """Wraps `owner.name` by `wrap` within the context.

    `owner`: a class, an instance or a module.
    """
    own = vars(owner) if hasattr(owner, "__dict__") else {}
    inherited = name not in own
    before = getattr(owner, name)
    setattr(owner, name, wrap(before))
    try:
        yield
    finally:
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
