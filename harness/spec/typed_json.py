"""Reads what the suite itself wrote as JSON back into its types."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from pydantic import TypeAdapter

Value = TypeVar("Value")


def parsed(kind: type[Value], text: str | bytes) -> Value:
    """Returns the value of a type, such as a dataclass; raises ValueError for another text."""
    kind_as_key: Any = kind
    value: Value = adapter(kind_as_key).validate_json(text)
    return value


@functools.cache
def adapter(kind: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)
