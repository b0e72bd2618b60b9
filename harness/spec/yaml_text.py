"""YAML that a user wrote: read as plain values, or refused in one sentence."""

from __future__ import annotations

from typing import Any

import yaml

from harness.spec.errors import UsageError

# libyaml's parser with the safe loader's own constructors: ten times as fast.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def parse_yaml(text: str | bytes, where: str) -> Any:
    """The value of a YAML document; raises UsageError where it is none, or has a value such as a
    date that does not exist. `where`: what the text is, for the error."""
    try:
        return yaml.load(text, Loader=_LOADER)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"{where}: not readable as YAML: {reason}") from None
