"""Parsing of what users write in YAML, and of the suite's own JSON."""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import yaml

from harness.cell.errors import UsageError

if TYPE_CHECKING:
    from pydantic import TypeAdapter

# libyaml's parser with the safe loader's constructors: ten times faster.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def parse_yaml(text: str | bytes, where: str) -> Any:
    """Parses YAML; raises UsageError if it is invalid. `where`: the text's source."""
    try:
        return yaml.load(text, Loader=_LOADER)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"{where} is not valid YAML: {reason}") from None


def require_keys(keys: Iterable[str], allowed: Iterable[str], where: str) -> None:
    """Raises UsageError for the first unknown key, with the nearest allowed key."""
    names = list(allowed)
    for key in keys:
        if key not in names:
            near = difflib.get_close_matches(str(key), names, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(names)}"
            raise UsageError(f"{where}: unknown key {key!r}; {hint}")


Value = TypeVar("Value")


def parsed(kind: type[Value], text: str | bytes) -> Value:
    """Returns the value of a type, such as a dataclass, from JSON. Raises ValueError if the text
    has another form. Python's own parser reads the lone surrogates that a rank's error message may
    contain."""
    try:
        content = json.loads(text)
    except RecursionError:
        raise ValueError("too deeply nested") from None
    value: Value = adapter(cast("Hashable", kind)).validate_python(content)
    return value


@functools.cache
def adapter(kind: Hashable) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(cast("type[object]", kind))
