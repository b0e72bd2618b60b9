"""The action compares cells before and after a change, in alternating rounds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STRATEGIES = """
import time
from harness.strategies.single import Single

class Same(Single):
    pass

class Changed(Single):
    def setup(self, job):
        step = super().setup(job)
        def slowed(batch):
            began = time.perf_counter()
            loss = step(batch)
            time.sleep({slowdown} * (time.perf_counter() - began))
            return loss
        return slowed
"""
MATRIX = """
cells:
  - {strategy: ["mine.py:Same", "mine.py:Changed"], workload: llama-nano, sequence_length: 32,
     warmup_steps: 3, timed_steps: 10}
"""


def measure(
    folder: Path, slowdown: float, rounds: int, *more: str, python: str = sys.executable
) -> tuple[int, dict[str, dict[str, object]]]:
    for name, planted in (("a", 0.0), ("b", slowdown)):
        # A project may have a package with the name of the suite's folder scripts/.
        (folder / name / "scripts").mkdir(parents=True)
        (folder / name / "scripts" / "__init__.py").touch()
        (folder / name / "mine.py").write_text(STRATEGIES.format(slowdown=planted))
    matrix = folder / "two.yaml"
    matrix.write_text(MATRIX)
    arguments = ["--before", sys.executable, "--before-folder", str(folder / "a")]
    arguments += ["--after", python, "--after-folder", str(folder / "b")]
    arguments += ["--matrix", str(matrix), "--rounds", str(rounds), "--json", *more]
    arguments += ["--results", str(folder / "results"), "--summary", str(folder / "md")]
    command = [sys.executable, "-m", "scripts.slower", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    print(done.stderr)
    assert "Traceback" not in done.stderr
    cells = json.loads(done.stdout)["cells"] if done.stdout else []
    return done.returncode, {
        name: cell for cell in cells for name in ("Same", "Changed") if name in cell["cell_name"]
    }


@pytest.mark.thorough
@pytest.mark.timeout(1800)
def test_a_planted_sleep_is_found_and_an_equal_cell_is_silent(tmp_path: Path) -> None:
    code, cells = measure(tmp_path, 20.0, 5)
    kinds = {name: cell["kind"] for name, cell in cells.items()}
    assert kinds == {"Changed": "slower", "Same": "no difference seen"}
    high = cells["Changed"]["ratio_high"]
    assert isinstance(high, float)
    assert high < 1
    assert cells["Changed"]["trials"] == 5
    assert code == 1
    assert "slower" in (tmp_path / "md").read_text()


@pytest.mark.thorough
@pytest.mark.timeout(3600)
def test_four_percent_are_found_and_twenty_equal_pairs_are_silent(tmp_path: Path) -> None:
    """Each of the equal pairs is four comparisons that may raise a false alarm."""
    steps = ("--set", "workload=llama-micro", "--set", "timed_steps=100")
    code, cells = measure(tmp_path, 0.04, 30, *steps)
    kinds = {name: cell["kind"] for name, cell in cells.items()}
    assert (code, kinds) == (1, {"Changed": "slower", "Same": "no difference seen"})
    for number in range(20):
        folder = tmp_path / str(number)
        folder.mkdir()
        code, cells = measure(folder, 0.0, 5)
        assert [cell["kind"] for cell in cells.values()] == ["no difference seen"] * 2
        assert code == 0


def test_a_side_that_cannot_run_is_a_mistake(tmp_path: Path) -> None:
    assert measure(tmp_path, 0.0, 2, python=str(tmp_path / "nothing")) == (2, {})


def test_one_round_is_a_mistake(tmp_path: Path) -> None:
    assert measure(tmp_path, 0.0, 1) == (2, {})
