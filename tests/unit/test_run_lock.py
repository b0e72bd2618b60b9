"""A run has one writing process, or one per share of its cells."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.cell.errors import UsageError
from harness.record.store import sole_writer
from tests.waiting import LONG

HOLDER = """
import sys
from pathlib import Path
from harness.record.store import sole_writer
with sole_writer(Path(sys.argv[1]), "run-1", (int(sys.argv[2]), int(sys.argv[3]))):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def another(folder: Path, number: int = 0, of: int = 1) -> Iterator[subprocess.Popen[str]]:
    """Starts a process that holds a share of the run."""
    command = [sys.executable, "-c", HOLDER, str(folder), str(number), str(of)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def may_write(
    folder: Path, share: tuple[int, int] = (0, 1), run_id: str = "run-1", seconds: float = 0.0
) -> bool:
    try:
        with sole_writer(folder, run_id, share, seconds):
            return True
    except UsageError as error:
        return "is already running in another process" not in str(error)


def test_a_run_has_one_writer_until_it_ends_or_is_killed(tmp_path: Path) -> None:
    with another(tmp_path) as process:
        assert not may_write(tmp_path)
        assert not may_write(tmp_path, (1, 2))
        assert may_write(tmp_path, run_id="run-2")
        assert not may_write(tmp_path, seconds=0.3)
        threading.Timer(0.3, process.kill).start()
        assert may_write(tmp_path, seconds=LONG)
    assert list((tmp_path / "runs").iterdir()) == []


def test_shares_of_a_run_are_written_side_by_side(tmp_path: Path) -> None:
    with another(tmp_path, 0, 2):
        assert may_write(tmp_path, (1, 2))
        assert not may_write(tmp_path, (0, 2))
        assert not may_write(tmp_path)
        assert may_write(tmp_path, (1, 2))


def test_a_folder_without_locks_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", unsupported)
    assert may_write(tmp_path)
