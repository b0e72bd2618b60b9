"""Required packages, and those missing from an environment.

Imports only the standard library: it runs before anything that may be missing.
"""

from __future__ import annotations

import re
import shlex
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

REQUIREMENTS = {
    "torch": "torch>=2.10,<2.14",
    "transformers": "transformers>=5.17,<6",
    "numpy": "numpy",
    "pandas": "pandas",
    "pyarrow": "pyarrow",
    "matplotlib": "matplotlib",
    "scipy": "scipy",
    "jinja2": "jinja2",
    "typer": "typer",
    "rich": "rich",
    "pydantic": "pydantic>=2",
    "yaml": "pyyaml",
    "psutil": "psutil",
    "safetensors": "safetensors",
    "pynvml": "nvidia-ml-py>=12.535",
}
"""Requirement by module name, as in pyproject.toml."""


def require() -> None:
    """Exits with code 2 if required packages are missing or too old.

    Prints one line to stderr with the required versions and the command that installs them.
    """
    if lacking := unmet():
        found = (f"{need} (here: {version})" if version else need for need, version in lacking)
        command = [sys.executable, "-m", "pip", "install", *(need for need, _ in lacking)]
        print(
            f"bench: Python packages are missing or too old: {', '.join(found)}; install them with:"
            f" {shlex.join(command)}",
            file=sys.stderr,
        )
        sys.exit(2)


def unmet() -> list[tuple[str, str]]:
    """Returns unmet requirements with their installed versions (empty if none)."""
    lacking = []
    for module, need in REQUIREMENTS.items():
        spec = find_spec(module)
        name, _, bounds = need.partition(">=")
        version = _version(spec, name) if spec and bounds else ""
        too_old = version and _numbers(version) < _numbers(bounds.partition(",")[0])
        if spec is None or too_old:
            lacking.append((need, version))
    return lacking


def _version(spec: ModuleSpec, name: str) -> str:
    """Returns the version in the metadata next to a module; empty if missing.

    importlib.metadata would take longer than all other checks together.
    """
    folder = Path(spec.origin or "").parent
    if spec.submodule_search_locations:
        folder = folder.parent
    stem = name.replace("-", "_")
    names = [path.name for path in folder.glob(f"{stem}-*-info")]
    versions = [
        re.sub(r"(-py\d.*)?\.(dist|egg)-info$", "", name[len(stem) + 1 :]) for name in names
    ]
    return max(versions, key=_numbers, default="")


def _numbers(version: str) -> list[int]:
    """Returns the first two numbers of a version; pre-releases count as the release."""
    return [int(number) for number in re.findall(r"\d+", version)[:2]]
