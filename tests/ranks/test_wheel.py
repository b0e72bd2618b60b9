"""A wheel of this checkout works in other environments, outside of the checkout."""

from __future__ import annotations

import json
import shutil
import site
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]
PACKAGED = ("bench", "harness", "reports", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in PACKAGED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    pip(sys.executable, "wheel", "--no-deps", "--no-build-isolation", "-w", target, source)
    (built,) = target.glob("*.whl")
    return built


def pip(python: str | Path, *arguments: str | Path) -> None:
    command = [python, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True)


def environment(folder: Path) -> Path:
    """Returns the bin folder of a new virtual environment."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    return folder / "bin"


def packages_of(programs: Path) -> set[str]:
    command = [programs / "python", "-m", "pip", "list", "--format", "json"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {package["name"] for package in json.loads(listed)}


def test_without_torch_it_plans_and_reports(wheel: Path, tmp_path: Path) -> None:
    programs = environment(tmp_path / "light")
    pip(programs / "python", "install", wheel)
    assert "torch" not in packages_of(programs)
    shutil.copytree(ROOT / "results" / "reference", tmp_path / "results")

    def run(*arguments: str) -> str:
        command = [programs / "parallelism-bench", *arguments]
        return subprocess.run(
            command, cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    plan = ("plan", "--model", "llama-8b", "--gpus", "8xh100", "--batch", "64", "--json")
    assert json.loads(run(*plan))
    assert json.loads(run("fits", "llama-8b", "--gpus", "2 x 4090", "--method", "qlora", "--json"))
    run("report", "--results", "results", "--out", "page.html")
    assert "horovod" in (tmp_path / "page.html").read_text()


def test_with_torch_it_trains(wheel: Path, tmp_path: Path) -> None:
    """Uses this environment's torch and libraries."""
    programs = environment(tmp_path / "complete")
    pip(programs / "python", "install", "--no-deps", wheel)
    (packages,) = (tmp_path / "complete" / "lib").glob("*/site-packages")
    (packages / "others.pth").write_text("\n".join(site.getsitepackages()))
    command = [programs / "parallelism-bench", "run", "--matrix", "smoke", "--json"]
    done = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0
    verdicts = [cell["parity_verdict"] for cell in json.loads(done.stdout)["cells"]]
    assert verdicts == ["exact"] * 6
