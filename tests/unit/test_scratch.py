"""Scratch folders of killed processes are removed, those of living ones are not. Files are replaced
as a whole."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.cell.durable import write_atomically
from harness.cell.errors import UsageError
from harness.host.folders import (
    PREFIX,
    host_marks,
    keep_multiprocessing_files,
    remove_abandoned,
    scratch_folder,
)

HOLDER = """
import sys, time
from harness.host.folders import keep_multiprocessing_files, scratch_folder
keep_multiprocessing_files()
with scratch_folder() as folder:
    (folder / "rank0.log").write_text("...")
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yields a temporary folder whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr("tempfile.tempdir", folder)
        yield Path(folder)


def holder(folder: Path) -> subprocess.Popen[str]:
    """Starts a process with a scratch folder in `folder`, and one for multiprocessing's files."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},
    )
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    assert len(list(folder.iterdir())) == 2
    return process


def test_folders_of_a_killed_process_are_removed_once_it_is_dead(temporary: Path) -> None:
    process = holder(temporary)
    with scratch_folder() as own:
        assert remove_abandoned() == []
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert len(remove_abandoned()) == 2
        assert list(temporary.iterdir()) == [own]
    assert list(temporary.iterdir()) == []


def test_a_forked_child_leaves_its_parents_folder_alone(temporary: Path) -> None:
    """In a forked child, multiprocessing drops the parent's finalizers, which ends generators."""
    context = scratch_folder()
    folder = context.__enter__()
    child = os.fork()
    if child == 0:
        context.__exit__(None, None, None)
        os._exit(0)
    os.waitpid(child, 0)
    assert folder.exists()
    assert remove_abandoned() == []
    context.__exit__(None, None, None)
    assert not folder.exists()


def test_a_process_that_ends_leaves_nothing(temporary: Path) -> None:
    holder(temporary).communicate("")
    assert list(temporary.iterdir()) == []


def test_links_and_files_are_left_alone(temporary: Path) -> None:
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir()
    prefix = PREFIX + "-".join(host_marks())
    (temporary / f"{prefix}-link").symlink_to(elsewhere)
    (temporary / f"{prefix}-file").write_text("")
    assert remove_abandoned() == []
    assert len(list(temporary.iterdir())) == 3


def test_folders_of_other_hosts_are_left_alone(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a shared file system, their locks may not be seen here."""

    def be(kernel: str, name: str) -> None:
        monkeypatch.setattr("harness.host.folders.machine_id", lambda: kernel)
        monkeypatch.setattr("platform.node", lambda: name)

    def abandoned() -> Path:
        with scratch_folder() as folder:
            pass
        folder.mkdir()
        return folder

    be("kernel-1", "n1")
    folder = abandoned()
    assert folder.name.startswith(PREFIX)
    be("kernel-2", "n2")
    assert remove_abandoned() == []
    be("kernel-1", "node0")
    assert remove_abandoned() == [folder], "an emulated node on the same host"
    folder = abandoned()
    be("kernel-3", "node0")
    assert remove_abandoned() == [folder], "the host was rebooted"


def test_writers_of_one_file_do_not_share_a_temporary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two hosts may share a folder, and their processes may have equal ids."""
    file, replace = tmp_path / "counts.json", Path.replace

    def after_another_host(temporary: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "replace", replace)
        write_atomically(file, "another host's")
        return temporary.replace(target)

    monkeypatch.setattr(Path, "replace", after_another_host)
    assert write_atomically(file, "this host's").read_text() == "this host's"
    assert list(tmp_path.iterdir()) == [file]


def test_an_error_leaves_the_former_file(tmp_path: Path) -> None:
    file = write_atomically(tmp_path / "facts.json", "former")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(file, "a lone surrogate: \ud800")
    assert file.read_text() == "former"
    assert list(tmp_path.iterdir()) == [file]


def test_a_temporary_folder_whose_path_is_too_long_for_sockets_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SLURM sites give jobs such folders. Listening in it would fail without a reason."""
    folder = tmp_path / ("x" * 60)
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    process: Any = multiprocessing.current_process()
    monkeypatch.delitem(process._config, "tempdir", raising=False)
    with pytest.raises(UsageError, match=r"x{60}' is \d+ bytes too long for sockets; set TMPDIR"):
        keep_multiprocessing_files()
    assert list(folder.iterdir()) == []
