"""Classes that users name by file (`my.py:Tiny`), module (`package.module:Tiny`) or entry point."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import re
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from harness.cell.errors import UsageError

MOST_SHOWN = 200
USER_CLASS = re.compile(r"(?P<source>.+):(?P<name>[A-Za-z_]\w*)")


@dataclass(frozen=True)
class UserClass:
    name: str
    loaded: type
    digest: str
    """First sixteen hex digits of the SHA-256 of the class's file."""


def names_user_class(name: str) -> bool:
    """Returns whether a name is FILE:NAME or MODULE:NAME."""
    return USER_CLASS.fullmatch(name) is not None and not name.startswith("hf:")


def user_class(name: str) -> UserClass:
    """Imports FILE:NAME or MODULE:NAME; raises UsageError that says what is missing."""
    match = USER_CLASS.fullmatch(name)
    assert match is not None
    source = match["source"]
    if source.endswith(".py"):
        source = str(Path(source).expanduser().resolve())
    return _imported(source, match["name"])


def entry_point_class(group: str, name: str) -> UserClass | None:
    """Returns the class that an installed package declares under this name; None if no package
    does."""
    point = entry_points(group).get(name)
    if point is None:
        return None
    found = _imported(point.module, point.attr)
    return UserClass(name, found.loaded, found.digest)


@functools.cache
def entry_points(group: str) -> dict[str, importlib.metadata.EntryPoint]:
    """Returns a group's entry points by name. If two have equal names, the first counts. Cached,
    because it reads the metadata of all packages: 50 ms if there are 150."""
    points = importlib.metadata.entry_points(group=group)
    return {point.name: point for point in reversed(tuple(points))}


def digest_of(path: Path) -> str:
    """Returns the first sixteen hex digits of a file's SHA-256; raises UsageError without one."""
    if not path.is_file():
        raise UsageError(f"there is no file {str(path)!r}")
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


@functools.cache
def _imported(source: str, name: str) -> UserClass:
    label = f"{source}:{name}"
    try:
        module = _file(source) if source.endswith(".py") else importlib.import_module(source)
    except (Exception, SystemExit) as error:  # a user's file may raise anything
        raise UsageError(f"{source!r} cannot be imported: {first_line(error)}") from None
    loaded = getattr(module, name, None)
    if not isinstance(loaded, type):
        classes = [n for n, c in inspect.getmembers(module, inspect.isclass) if _of(c, module)]
        raise UsageError(
            f"{source!r} has no class {name!r}; its classes are: {', '.join(classes) or 'none'}"
        )
    return UserClass(label, loaded, digest_of(Path(inspect.getfile(loaded))))


def _of(loaded: type, module: ModuleType) -> bool:
    return loaded.__module__ == module.__name__


def _file(path: str) -> ModuleType:
    if not Path(path).is_file():
        raise FileNotFoundError("there is no such file")
    name = f"user_code_{hashlib.sha256(path.encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Pickling looks a class up by its module.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def one_line(error: BaseException) -> str:
    """Returns an error's message, or else its type, in one line of about MOST_SHOWN characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def first_line(error: BaseException) -> str:
    """Returns an error's type and the first line of its message, or else the line that raised
    it."""
    lines = str(error).strip().splitlines()
    if not lines and error.__traceback__:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        lines = [f"{frame.line} (in {frame.name} of {Path(frame.filename).name})"]
    return ": ".join([type(error).__name__, *lines[:1]])
