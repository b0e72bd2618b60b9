"""`bench bisect` finds the first slower candidate, with stubs for environments and trainings."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from bench.cli import bisect as module
from bench.cli.bisect import bisect
from harness.cell.errors import UsageError
from tests.commands import told

TWO_SIDES = """#!/bin/sh
mkdir -p "$1/after/bin"
printf '#!/bin/sh\necho "%s|$*" >>"{log}"\n' "$AFTER$AFTER_REF" >"$1/after/bin/python"
case "$AFTER$AFTER_REF" in {slow}) echo 'exit 1' >>"$1/after/bin/python";; esac
chmod +x "$1/after/bin/python"
"""


def stubs(folder: Path, monkeypatch: pytest.MonkeyPatch, slow: str) -> Path:
    """Returns a log of the compared candidates. `slow`: pattern of those that are slower."""
    scripts = folder / "scripts"
    scripts.mkdir()
    (scripts / "slower.py").touch()
    (scripts / "two_sides.sh").write_text(TWO_SIDES.format(log=folder / "log", slow=slow))
    (scripts / "two_sides.sh").chmod(0o755)
    monkeypatch.setattr(module, "SCRIPTS", scripts)
    monkeypatch.chdir(folder)
    return folder / "log"


def test_a_slower_version_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = [f"torch==2.{minor}.0" for minor in range(8, 16)]
    log = stubs(tmp_path, monkeypatch, "*.1[345].0")
    told_json = told(bisect, *versions, "--only", "ddp", "--rounds", "5", "--json")
    found = json.loads(told_json)
    assert found == {"first_slower": "torch==2.13.0", "last_good": "torch==2.12.0"}
    calls = log.read_text().splitlines()
    assert len(calls) == 4
    assert all("--only ddp" in call and "--rounds 5" in call for call in calls)


def test_a_slower_commit_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run([*git, "init", "--quiet", tmp_path], check=True)
    ids = []
    for _ in range(5):
        commit = [*git, "-C", tmp_path, "commit", "--quiet", "--allow-empty", "--message", "one"]
        subprocess.run(commit, check=True)
        head = subprocess.run([*git, "-C", tmp_path, "rev-parse", "HEAD"], capture_output=True)
        ids.append(head.stdout.decode().strip())
    stubs(tmp_path, monkeypatch, f"{ids[3]}|{ids[4]}")
    assert ids[3] in told(bisect, f"{ids[0]}..{ids[4]}")


def test_equal_ends_are_a_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stubs(tmp_path, monkeypatch, "none")
    with pytest.raises(UsageError, match="is no slower than"):
        told(bisect, "torch==2.13.0", "torch==2.15.0")
    with pytest.raises(UsageError, match="two candidates or more"):
        told(bisect, "torch==2.13.0")
