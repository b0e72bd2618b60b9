"""Safe parsing of users' YAML."""

from __future__ import annotations

from typing import Any

import yaml

from harness.spec.errors import UsageError

# libyaml's parser with the safe loader's constructors: ten times faster.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def parse_yaml(text: str | bytes, where: str) -> Any:
    """Parses YAML; raises UsageError if invalid, such as a date that does not exist. `where`:
    source of the text, for the error."""
    try:
        return yaml.load(text, Loader=_LOADER)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"{where}: not readable as YAML: {reason}") from None
