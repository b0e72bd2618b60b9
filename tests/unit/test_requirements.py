"""What is said in an environment that lacks a package, before anything needs it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from harness.host.packages import REQUIREMENTS, unmet

ROOT = Path(__file__).parents[2]

# Runs a module as `python -m` does, where packages cannot be found.
WITHOUT = """
import runpy, sys
hidden, module, *sys.argv[1:] = sys.argv[1:]
sys.modules.update(dict.fromkeys(filter(None, hidden.split(","))))
sys.path.insert(0, {root!r})
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


def without(hidden: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A module of the suite as a program, in an environment without these modules."""
    return subprocess.run(
        [sys.executable, "-c", WITHOUT.format(root=str(ROOT)), hidden, *words],
        capture_output=True,
        text=True,
        env=os.environ | variables,
        check=False,
        timeout=100,
    )


def named(line: str) -> list[str]:
    """The requirements in the command that a line ends with."""
    words = shlex.split(line.partition("install them with: ")[2])
    assert words[:4] == [sys.executable, "-m", "pip", "install"]
    return words[4:]


def older(folder: Path, package: str, version: str) -> str:
    """A folder for PYTHONPATH with an empty package of this version."""
    (folder / package).mkdir()
    (folder / package / "__init__.py").touch()
    (folder / f"{package}-{version}.dist-info").mkdir()
    return f"{folder}:{ROOT}"


@pytest.mark.parametrize("words", [["bench", "--help"], ["bench", "doctor"], ["harness.agent"]])
def test_all_missing_packages_are_named_in_one_line(words: list[str]) -> None:
    done = without("pydantic,yaml,torch", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert named(done.stderr) == ["torch>=2.10,<2.14", "pydantic>=2", "pyyaml"]


@pytest.mark.parametrize("module", REQUIREMENTS)
def test_each_of_them_is_missed(module: str) -> None:
    done = without(module, "bench", "list")
    assert (done.returncode, named(done.stderr)) == (2, [REQUIREMENTS[module]])


@pytest.mark.parametrize(
    ("package", "version", "enough"),
    [
        ("pydantic", "1.10.26", False),
        ("pydantic", "2.14.3", True),
        ("torch", "2.9.1+cu128", False),
        ("torch", "2.10.0a0+b558c986e8.nv25.11", True),
        ("transformers", "5.16.4", False),
        ("transformers", "5.17.0", True),
    ],
)
def test_a_version_that_is_too_old_counts_as_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, version: str, enough: bool
) -> None:
    monkeypatch.syspath_prepend(older(tmp_path, package, version).partition(":")[0])
    monkeypatch.delitem(sys.modules, package, raising=False)
    assert unmet() == ([] if enough else [(REQUIREMENTS[package], version)])


def test_a_version_that_is_too_old_is_told(tmp_path: Path) -> None:
    path = older(tmp_path, "transformers", "5.16.4")
    done = without("", "bench", "list", PYTHONPATH=path)
    assert (done.returncode, named(done.stderr)) == (2, [REQUIREMENTS["transformers"]])
    assert "5.16.4" in done.stderr


def test_nothing_is_said_where_all_is_there() -> None:
    done = without("", "bench", "--help")
    assert (done.returncode, done.stderr) == (0, "")


def test_they_are_the_dependencies_of_the_project() -> None:
    listed = re.search(
        r"^dependencies = \[\n(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.M | re.S
    )
    assert listed
    assert re.findall(r'"(.*)"', listed[1]) == list(REQUIREMENTS.values())


def test_asking_imports_none_of_them() -> None:
    code = (
        "import sys; from harness.host.packages import REQUIREMENTS, require; require();"
        " sys.exit(bool(REQUIREMENTS.keys() & sys.modules.keys()))"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
