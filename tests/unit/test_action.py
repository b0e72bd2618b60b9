"""The action's steps and scripts/two_sides.sh, run with stubs that log their arguments."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PYTHON, INSTALL, COMPARE = yaml.safe_load((ROOT / "action.yaml").read_text())["runs"]["steps"]
STUB = """#!/bin/sh
echo "$*" >>"{log}"
[ "$2" != venv ] || {{ mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; }}
"""


def executable(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(0o755)
    return file


def call(folder: Path, *command: str | Path, **variables: str) -> None:
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), **variables}
    subprocess.run(command, cwd=folder, env=environment, check=True)


def installs(folder: Path, sides: Path, **variables: str) -> list[list[str]]:
    """Runs two_sides.sh in a folder; returns the arguments of each call of pip."""
    log = sides.with_suffix(".log")
    python = executable(sides.with_suffix(".python"), STUB.format(log=log))
    call(folder, ROOT / "scripts" / "two_sides.sh", sides, PYTHON=str(python), **variables)
    lines = log.read_text().splitlines()
    return [line.split() for line in lines if "pip" in line.split()]


def test_each_side_gets_all_lines_of_its_packages(tmp_path: Path) -> None:
    sides = tmp_path / "sides"
    packages = "torch==2.12.1\nnumpy<3\n"
    before, after = installs(tmp_path, sides, BEFORE=packages, AFTER="torch==2.13.0")
    assert {"torch==2.12.1", "numpy<3", f"{ROOT}[run]"} <= set(before)
    assert "torch==2.13.0" in after
    for name in ("before", "after"):
        assert (sides / f"{name}-project").samefile(tmp_path), "a matrix may be in this folder"


@pytest.mark.parametrize(
    ("name", "text", "installed"),
    [
        ("pyproject.toml", "[project]\nname = 'mine'\n", True),
        ("setup.py", "", True),
        ("pyproject.toml", "[tool.ruff]\n", False),
    ],
)
def test_a_project_is_installed_with_the_packages_if_it_can_be(
    tmp_path: Path, name: str, text: str, installed: bool
) -> None:
    """Installed alone, it could replace the torch that the user asked for."""
    project, sides = tmp_path / "project", tmp_path / "sides"
    project.mkdir()
    (project / name).write_text(text)
    call(project, "git", "init", "--quiet")
    call(project, "git", "add", name)
    author = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    call(project, "git", *author, "commit", "--quiet", "--message", "first")
    calls = installs(project, sides, BEFORE_REF="HEAD", AFTER="torch==2.13.0")
    folders = [str(sides / f"{side}-project") for side in ("before", "after")]
    has_project = [folder in packages for folder, packages in zip(folders, calls, strict=True)]
    assert has_project == [installed] * 2
    assert all((Path(folder) / name).exists() for folder in folders)


def outputs(script: str, folder: Path, **variables: str) -> dict[str, str]:
    """Runs a step; returns its outputs."""
    file = folder / "outputs"
    file.write_text("")
    call(folder, "bash", "-eo", "pipefail", "-c", script, GITHUB_OUTPUT=str(file), **variables)
    return dict(line.split("=", 1) for line in file.read_text().splitlines())


def test_a_job_can_use_the_action_twice(tmp_path: Path) -> None:
    executable(tmp_path / "scripts" / "two_sides.sh", '#!/bin/sh\n[ -d "$1" ]\n')
    variables = {"SUITE": str(tmp_path), "RUNNER_TEMP": str(tmp_path)}
    first, second = (outputs(INSTALL["run"], tmp_path, **variables)["work"] for _ in range(2))
    assert first != second
    assert INSTALL["id"] in COMPARE["env"]["WORK"]


def test_empty_inputs_are_left_out(tmp_path: Path) -> None:
    executable(tmp_path / "after" / "bin" / "python", '#!/bin/sh\necho "$*"\n')
    variables = {"SUITE": "/suite", "WORK": str(tmp_path), "GITHUB_STEP_SUMMARY": "s"}
    variables |= {"MATRIX": "my.yaml", "ONLY": "", "SETTINGS": "a=1\nb=2\n", "ROUNDS": "5"}
    made = outputs(COMPARE["run"], tmp_path, **variables)
    arguments = Path(made["comparison"]).read_text().split()
    assert arguments[0] == "/suite/scripts/slower.py", "a project may have a package named scripts"
    assert (arguments.count("--set"), arguments.count("--only")) == (2, 0)
    assert "python-version" in PYTHON["if"], "a runner may have no build of this version"
