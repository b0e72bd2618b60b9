"""Commands of scripts/other_torch.sh, run with a stub of Python that only logs its arguments."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STUB = """#!/bin/sh
echo "$*" >> "{calls}"
[ "$2" != config ] || exit 1
case "$*" in *"bench run --matrix quick"*) exit {quick} ;; esac
"""


def script(**variables: str) -> subprocess.CompletedProcess[str]:
    inherited = {k: v for k, v in os.environ.items() if k not in ("TORCH", "TRANSFORMERS", "VENV")}
    return subprocess.run(
        [ROOT / "scripts" / "other_torch.sh"],
        env={**inherited, "PYTHON": sys.executable, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def calls(folder: Path, quick: int = 0, **variables: str) -> tuple[int, list[str]]:
    """Returns the script's exit code in an environment with the stub, and the logged commands."""
    (folder / "venv" / "bin").mkdir(parents=True, exist_ok=True)
    python = folder / "venv" / "bin" / "python"
    python.write_text(STUB.format(calls=folder / "calls", quick=quick))
    python.chmod(0o755)
    (folder / "calls").unlink(missing_ok=True)
    done = script(VENV=str(folder / "venv"), TORCH="2.11.0", **variables)
    return done.returncode, (folder / "calls").read_text().splitlines()


@pytest.mark.parametrize("versions", [{}, {"TORCH": "2.11.0", "TRANSFORMERS": ">=5"}])
def test_versions_are_asked_for(versions: dict[str, str], tmp_path: Path) -> None:
    done = script(PARALLELISM_BENCH_CACHE=str(tmp_path), **versions)
    assert (done.returncode, done.stdout, list(tmp_path.iterdir())) == (2, "", [])


def test_an_environment_is_filled_once_and_used(tmp_path: Path) -> None:
    code, asked = calls(tmp_path, TRANSFORMERS="5.17.0")
    assert code == 0
    assert next(line for line in asked if " install " in line).endswith(" setuptools torch")
    assert "-m pytest tests/unit tests/gpu" in asked
    runs = [line.split()[4] for line in asked if " bench run " in line]
    assert runs == ["smoke", "quick"]
    pins = (tmp_path / "venv" / "pins.txt").read_text().splitlines()
    versions = (tmp_path / "venv" / "constraints.txt").read_text().splitlines()
    assert versions == [*pins, "torch==2.11.0", "transformers==5.17.0"]
    names = {pin.partition("==")[0] for pin in pins}
    assert {"nvidia-ml-py", "pydantic", "accelerate", "pytest"} <= names
    assert not names & {"torch", "triton", "nvidia-nccl-cu13", "huggingface-hub", "horovod"}

    code, asked = calls(tmp_path, TRANSFORMERS="5.17.0")
    assert (code, [line for line in asked if " install " in line]) == (0, [])
    code, asked = calls(tmp_path, TRANSFORMERS="5.18.0")
    assert len([line for line in asked if " install " in line]) == 3


def test_a_matrix_that_fails_fails_the_whole(tmp_path: Path) -> None:
    assert calls(tmp_path, quick=1)[0] == 1
    versions = (tmp_path / "venv" / "constraints.txt").read_text().splitlines()
    pinned = [line for line in versions if line.startswith("transformers==")]
    assert pinned
    assert all(line in (ROOT / "constraints.txt").read_text().splitlines() for line in pinned)
