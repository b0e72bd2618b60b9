"""Temporary folders that are removed even if their process is killed, and the cache folder.

A process locks its folder (flock), and the next process on its host removes folders that are not
locked. Hosts may not see each other's locks, so a folder is named after its host.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import multiprocessing.util
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from harness.cell.errors import UsageError
from harness.host.process import machine_id

PREFIX = "parallelism-bench-scratch-"
_LONGEST_SOCKET_BYTES = 107
"""Maximum length of a socket's path: struct sockaddr_un of unix(7), without the final zero."""
_LISTENER = "listener-12345678"
"""A name like multiprocessing's: the longest of any socket in a scratch folder."""


def host_marks() -> tuple[str, str]:
    """Returns short marks of this host's running kernel, which emulated nodes share, and of its
    name, which survives a reboot."""
    kernel, name = (
        hashlib.sha256(text.encode()).hexdigest()[:6] for text in (machine_id(), platform.node())
    )
    return kernel, name


@contextlib.contextmanager
def scratch_folder(parent: Path | None = None) -> Iterator[Path]:
    """Creates a private folder in `parent` or the temporary folder; this process removes it on
    exit, its forked children do not."""
    owner = os.getpid()
    while True:
        kernel, name = host_marks()
        folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{kernel}-{name}-", dir=parent))
        lock = _locked(folder)
        # Until it was locked, another process may have removed it as abandoned.
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
    """Puts multiprocessing's sockets into a scratch folder, since a killed process would leave
    `pymp-*` behind. Raises UsageError if their paths would be too long."""
    process = multiprocessing.current_process()
    config: dict[str, object] = process._config  # type: ignore[attr-defined]
    if "tempdir" not in config:
        stack = contextlib.ExitStack()
        folder = stack.enter_context(scratch_folder())
        excess = len(os.fsencode(folder / _LISTENER)) - _LONGEST_SOCKET_BYTES
        if excess > 0:
            stack.close()
            raise UsageError(
                f"the path of the temporary folder {tempfile.gettempdir()!r} is {excess} bytes too"
                " long for sockets; set TMPDIR to a shorter one, such as /tmp"
            )
        config["tempdir"] = str(folder)
        # multiprocessing's children skip atexit. With this priority, it runs after their other
        # files.
        multiprocessing.util.Finalize(None, stack.close, exitpriority=-100)


def remove_abandoned(parent: Path | None = None) -> list[Path]:
    """Removes this user's unlocked scratch folders of this host from `parent` or the temporary
    folder; returns them."""
    removed = []
    parent, (kernel, name) = parent or Path(tempfile.gettempdir()), host_marks()
    for folder in {*parent.glob(f"{PREFIX}{kernel}-*"), *parent.glob(f"{PREFIX}*-{name}-*")}:
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


def cache_folder() -> Path:
    """Returns the folder of prepared data and reference runs, created if needed:
    $PARALLELISM_BENCH_CACHE, else `parallelism-bench` in the user's cache folder."""
    users = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(os.environ.get("PARALLELISM_BENCH_CACHE") or Path(users) / "parallelism-bench")
    folder.mkdir(parents=True, exist_ok=True)
    return folder
