"""Safe parsing of users' YAML."""

from __future__ import annotations

from typing import Any

import yaml

from harness.spec.errors import UsageError

# libyaml's parser with the safe loader's constructors: ten times faster.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def parse_yaml(text: str | bytes, where: str) -> Any:
    """Parses YAML; raises UsageError if it is invalid. `where`: source of the text, for the
    message."""
    try:
        return yaml.load(text, Loader=_LOADER)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"{where} is not valid YAML: {reason}") from None
