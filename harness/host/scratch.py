"""Temporary folders that do not outlive their process for long.

Whoever makes one holds a lock on it (flock), which the kernel releases when the process ends,
however it ends. A folder without a holder was left by a process that was killed, and the next one
removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "parallelism-bench-scratch-"


@contextlib.contextmanager
def scratch_folder(parent: Path | None = None) -> Iterator[Path]:
    """A new folder for its owner alone, in `parent` or among the temporary files; it is removed
    with the context.

    Processes that this one starts by exec do not inherit the lock; one that it forks leaves the
    folder alone, also when multiprocessing drops what its parent meant to do at its end.
    """
    owner = os.getpid()
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        lock = _locked(folder)
        # Between its making and its lock another process may have taken it for an abandoned one.
        if lock is not None and folder.exists():
            break
        if lock is not None:
            os.close(lock)
    try:
        yield folder
    finally:
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def keep_multiprocessing_files() -> None:
    """Gives multiprocessing a scratch folder for the sockets of this process, to its end.

    The one it would make itself (`pymp-*`) stays behind where the process is killed.
    """
    process = multiprocessing.current_process()
    config: dict[str, object] = process._config  # type: ignore[attr-defined]
    if "tempdir" not in config:
        stack = contextlib.ExitStack()
        config["tempdir"] = str(stack.enter_context(scratch_folder()))
        # Not by atexit, which children of multiprocessing leave out; after its other files.
        multiprocessing.util.Finalize(None, stack.close, exitpriority=-100)


def remove_abandoned(parent: Path | None = None) -> list[Path]:
    """Removes this user's scratch folders that no living process holds, in `parent` or among the
    temporary files; returns them.

    Folders of other users, and what is no folder, are left alone.
    """
    removed = []
    for folder in (parent or Path(tempfile.gettempdir())).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            lock = _locked(folder)
            if lock is None:
                continue
            try:
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(folder)
            finally:
                os.close(lock)
    return removed


def _locked(folder: Path) -> int | None:
    """A file descriptor that holds the folder's lock; None where another process holds it, or the
    folder is gone."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
