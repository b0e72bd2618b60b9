"""Packages hidden from libraries that import whatever is installed."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import cast

_MODULES = cast("dict[str, ModuleType | None]", sys.modules)
"""Loaded modules; those that are None cannot be imported."""


def hide(package: str) -> None:
    """Makes a package that is not yet imported look uninstalled, until `show`."""
    _MODULES.setdefault(package, None)


def show(package: str) -> None:
    """Undoes `hide`."""
    if _is_hidden(package):
        del _MODULES[package]


def is_installed(package: str) -> bool:
    """Returns whether a package can be imported, hidden or not; imports nothing."""
    hidden = _is_hidden(package)
    show(package)
    installed = importlib.util.find_spec(package) is not None
    if hidden:
        hide(package)
    return installed


def _is_hidden(package: str) -> bool:
    return package in _MODULES and _MODULES[package] is None
