"""Python packages: those required, those hidden, and libraries that setup could not build.

Imports only the standard library at first, because other packages may be missing. `python -m
harness.host.packages LIBRARY` prints the path of the file that says why it was not built. `python
-m harness.host.packages VERSION LOG FOLDER REMEDY` writes that file and prints the log's first
error.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import cast

REQUIREMENTS = {
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
    "packaging": "packaging",
    "psutil": "psutil",
    "pynvml": "nvidia-ml-py>=12.535",
}
"""Requirement of every command by module, as in pyproject.toml."""
TRAINING = {
    "torch": "torch>=2.10,<2.14",
    "transformers": "transformers>=5.17,<6",
    "safetensors": "safetensors",
}
"""Further requirements of commands that build or train models: the extra `run`."""

UNTRIED = "PARALLELISM_BENCH_UNTRIED"
"""Environment variable that allows versions newer than those that were tried."""


def require(requirements: Mapping[str, str] = REQUIREMENTS) -> None:
    """Exits with code 2 and one sentence if packages are missing, too old or too new."""
    if sentence := missing(requirements):
        print(f"bench: {sentence}", file=sys.stderr)
        sys.exit(2)


def missing(requirements: Mapping[str, str]) -> str:
    """Returns which packages are missing, too old or too new, and the remedy; empty if there are
    none."""
    lacking = unmet(requirements)
    if not lacking:
        return ""
    described = (f"{need} (here: {version})" if version else need for need, version in lacking)
    command = [sys.executable, "-m", "pip", "install", *(need for need, _ in lacking)]
    return (
        f"Python packages are missing or of other versions: {', '.join(described)}; install them"
        f" with: {shlex.join(command)}"
    )


def unmet(requirements: Mapping[str, str]) -> list[tuple[str, str]]:
    """Returns unmet requirements with their installed versions."""
    lacking = []
    for module, need in requirements.items():
        spec = find_spec(module)
        name = re.split("[<>=]", need)[0]
        bounds = need.removeprefix(name)
        version = _version(spec, name) if spec and bounds else ""
        if spec is None or (version and not _within(version, bounds)):
            lacking.append((need, version))
    return lacking


def _within(version: str, bounds: str) -> bool:
    """Returns whether a version is within bounds such as `>=2.10,<2.14`. A pre-release counts as
    its release. Without the package `packaging`, which is required itself, every version counts as
    within. With the variable UNTRIED, no version is too new."""
    try:
        from packaging.specifiers import SpecifierSet
        from packaging.version import Version
    except ImportError:
        return True
    if os.environ.get(UNTRIED):
        bounds = bounds.partition(",")[0]
    return SpecifierSet(bounds).contains(Version(version).base_version)


def _version(spec: ModuleSpec, name: str) -> str:
    """Returns the version in a module's metadata; empty if it has none. importlib.metadata takes
    longer than all other checks together."""
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
    return [int(number) for number in re.findall(r"\d+", version)[:2]]


_MODULES = cast("dict[str, ModuleType | None]", sys.modules)


def hide(package: str) -> None:
    """Makes a package look uninstalled until `show` is called. Does nothing if it is already
    imported."""
    _MODULES.setdefault(package, None)


def show(package: str) -> None:
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


def how_to_install(extra: str) -> str:
    return f"make setup in a checkout, or pip install 'parallelism-bench[{extra}]'"


def _is_hidden(package: str) -> bool:
    return package in _MODULES and _MODULES[package] is None


# Explanations of a failed build, most specific first: compiler or linker, CMake, Python, pip.
_ERRORS = (
    re.compile(
        r"\S: (?:fatal )?error: |undefined reference|^(?:nvcc|g\+\+|gcc|c\+\+)\S* ?:"
        r" (?:fatal|error)|^\S*ld: cannot|^Fatal Python error"
    ),
    re.compile(r"^CMake Error"),
    re.compile(r"^[\w.]*(?:Error|Exception)\b:? "),
    re.compile(r"^(?:ERROR|error): (?!subprocess-exited)"),
)


@dataclass(frozen=True)
class Unbuilt:
    library: str
    version: str
    error: str
    remedy: str
    log: str

    @property
    def reason(self) -> str:
        failure = f"setup could not build {self.library} {self.version}: {self.error}"
        return f"{failure}; {self.remedy}, then run `make setup` again; log: {self.log}"


def reason_file(library: str) -> Path:
    """Returns the path of the file that says why a library was not built."""
    return Path(sys.prefix) / "share" / "parallelism-bench" / "unbuilt" / f"{library}.json"


def unbuilt(library: str) -> Unbuilt | None:
    """Returns why setup could not build a library; None if it did not fail."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return Unbuilt(**json.loads(reason_file(library).read_text()))
    return None


def first_error(log: str, folder: str = "") -> str:
    """Returns the line that best explains a failure, with paths relative to `folder`."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    for pattern in _ERRORS:
        for index, line in enumerate(lines):
            if pattern.search(line):
                if line.startswith("CMake Error") and lines[index + 1 :]:
                    line = f"{line} {lines[index + 1]}"
                prefix = rf"{re.escape(folder)}/(?:[^/\s]+-[\d.]+/)?"
                return re.sub(prefix, "", line) if folder else line
    return lines[-1] if lines else "its log is empty"


def keep(library: str, version: str, log: Path, folder: str, remedy: str) -> Unbuilt:
    error = first_error(log.read_text(errors="replace"), folder)
    failure = Unbuilt(library=library, version=version, error=error, remedy=remedy, log=str(log))
    reason_file(library).parent.mkdir(parents=True, exist_ok=True)
    reason_file(library).write_text(json.dumps(asdict(failure), indent=1) + "\n")
    return failure


def main(library: str, *details: str) -> None:
    if not details:
        print(reason_file(library))
        return
    version, log, folder, remedy = details
    print(keep(library, version, Path(log), folder, remedy).error)


if __name__ == "__main__":
    main(*sys.argv[1:])
