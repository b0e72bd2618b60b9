"""Messages in an environment that lacks a package, before anything needs it."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness.host.packages import REQUIREMENTS, TRAINING, UNTRIED, unmet

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "results" / "reference"
PROJECT = (ROOT / "pyproject.toml").read_text()

# Runs a module like `python -m`, with some packages hidden.
WITHOUT = """
import runpy, sys
hidden, module, *sys.argv[1:] = sys.argv[1:]
sys.modules.update(dict.fromkeys(filter(None, hidden.split(","))))
sys.path.insert(0, {root!r})
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


def without(hidden: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs one of the suite's modules as a program, with these packages hidden."""
    return subprocess.run(
        [sys.executable, "-c", WITHOUT.format(root=str(ROOT)), hidden, *words],
        capture_output=True,
        text=True,
        env=os.environ | variables,
        check=False,
    )


# Hides packages from finders, because scipy and others look for torch in sys.modules.
NOT_FOUND = """
import runpy, sys
class Hiding:
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        hidden = name.partition(".")[0] in {hidden!r}
        return None if hidden else self.finder.find_spec(name, path, target)
sys.meta_path[:] = map(Hiding, sys.meta_path)
sys.path.insert(0, {root!r})
runpy.run_module("bench", run_name="__main__", alter_sys=True)
"""


def without_torch(*words: str) -> subprocess.CompletedProcess[str]:
    """Runs a command with only the packages of the light core."""
    code = NOT_FOUND.format(hidden=set(TRAINING), root=str(ROOT))
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        check=False,
    )


def named(line: str) -> list[str]:
    """Returns the requirements in the install command at the end of a line."""
    words = shlex.split(line.partition("install them with: ")[2])
    assert words[:4] == [sys.executable, "-m", "pip", "install"]
    return words[4:]


def older(folder: Path, package: str, version: str) -> str:
    """Creates an empty package of this version; returns a PYTHONPATH."""
    (folder / package).mkdir()
    (folder / package / "__init__.py").touch()
    (folder / f"{package}-{version}.dist-info").mkdir()
    return f"{folder}:{ROOT}"


def test_all_missing_packages_are_named_in_one_line() -> None:
    done = without(",".join(REQUIREMENTS), "bench", "--help")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert named(done.stderr) == list(REQUIREMENTS.values())
    agent = without("pydantic,torch", "harness.agent")
    assert (agent.returncode, agent.stdout) == (2, "")
    assert named(agent.stderr) == ["pydantic>=2", TRAINING["torch"]]


def test_commands_that_train_name_torch_and_transformers() -> None:
    done = without_torch("run", "--matrix", "smoke")
    assert (done.returncode, done.stdout) == (2, "")
    assert named(done.stderr) == list(TRAINING.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["list", "strategies"],
        ["plan", "--model", "llama-8b", "--gpus", "8xh100"],
        ["show", "7468f6f3bd0c", "--results", str(REFERENCE)],
        ["compare", "--cells", "ddp", "fsdp2", "--results", str(REFERENCE)],
        ["check", str(REFERENCE)],
        ["report", "--results", "{results}", "--out", "{out}"],
    ],
    ids=lambda words: words[0],
)
def test_other_commands_need_no_torch(words: list[str], tmp_path: Path) -> None:
    places = {"results": tmp_path / "results", "out": tmp_path / "out"}
    shutil.copytree(REFERENCE, places["results"])
    done = without_torch(*(word.format(**places) for word in words))
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize(
    ("package", "version", "enough"),
    [
        ("pydantic", "1.10.26", False),
        ("pydantic", "2.14.3", True),
        ("torch", "2.9.1+cu128", False),
        ("torch", "2.10.0a0+b558c986e8.nv25.11", True),
        ("transformers", "5.16.4", False),
        ("transformers", "5.17.0", True),
        ("transformers", "6.0.0", False),
        ("torch", "9.0.0", False),
    ],
)
def test_a_version_that_is_too_old_counts_as_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, version: str, enough: bool
) -> None:
    monkeypatch.syspath_prepend(older(tmp_path, package, version).partition(":")[0])
    monkeypatch.delitem(sys.modules, package, raising=False)
    monkeypatch.delenv(UNTRIED, raising=False)
    need = (REQUIREMENTS | TRAINING)[package]
    assert unmet({package: need}) == ([] if enough else [(need, version)])


def test_an_outdated_version_is_reported(tmp_path: Path) -> None:
    path = older(tmp_path, "transformers", "5.16.4")
    done = without("", "bench", "run", "--matrix", "smoke", PYTHONPATH=path)
    assert (done.returncode, named(done.stderr)) == (2, [TRAINING["transformers"]])
    assert "5.16.4" in done.stderr


@pytest.mark.parametrize(("key", "needs"), [("dependencies", REQUIREMENTS), ("run", TRAINING)])
def test_requirements_are_the_projects_dependencies(key: str, needs: dict[str, str]) -> None:
    listed = re.search(rf"^{key} = \[(.*?)\]\n", PROJECT, re.M | re.S)
    assert listed
    assert re.findall(r'"(.*?)"', listed[1]) == list(needs.values())


def test_the_package_contains_every_file_of_its_folders() -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "bench", "harness", "reports"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    declared = set()
    for package, patterns in re.findall(r"^(bench|harness|reports) = (\[.*\])$", PROJECT, re.M):
        for pattern in json.loads(patterns):
            declared |= set((ROOT / package).glob(pattern))
    data = {ROOT / name for name in tracked if not name.endswith(".py")}
    assert len(data) > 30
    assert data <= declared


def test_a_shell_completes_the_console_script() -> None:
    environment = {"_PARALLELISM_BENCH_COMPLETE": "complete_bash", "COMP_CWORD": "1"}
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); sys.argv = ['parallelism-bench'];"
        " from bench.__main__ import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | environment | {"COMP_WORDS": "parallelism-bench com"},
    )
    assert done.stdout.split() == ["compare"]
