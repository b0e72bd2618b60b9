from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from harness.spec.errors import UsageError


@contextlib.contextmanager
def sole_writer(
    folder: Path, run_id: str, share: tuple[int, int] = (0, 1), timeout_seconds: float = 0.0
) -> Iterator[None]:
    """Locks a run, or share i of n, so that no other process runs these trials.

    Raises UsageError if another process holds the lock after `timeout_seconds`. No effect on file
    systems without locks.
    """
    number, of = share
    runs, deadline = folder / "runs", time.monotonic() + timeout_seconds
    wanted = [(runs / f".{run_id}.lock", fcntl.LOCK_EX if of == 1 else fcntl.LOCK_SH)]
    if of > 1:
        wanted.append((runs / f".{run_id}.{number}-of-{of}.lock", fcntl.LOCK_EX))
    with contextlib.ExitStack() as held:
        for file, how in wanted:
            try:
                held.callback(_release, file, _locked(file, how, deadline))
            except BlockingIOError:
                raise UsageError(
                    f"run {run_id!r} in {str(folder)!r} is already running in another process: wait"
                    " until it ends, or stop it"
                ) from None
            except OSError:  # No locks here, or a read-only folder, which is reported elsewhere.
                continue
        yield


def _locked(file: Path, how: int, deadline: float) -> int:
    """Raises BlockingIOError after `deadline` (time.monotonic)."""
    while True:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, how | fcntl.LOCK_NB)
            # The previous holder may have removed the file in the meantime.
            if file.exists() and os.path.samestat(os.fstat(descriptor), file.stat()):
                return descriptor
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(descriptor)
                raise
            time.sleep(0.2)
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _release(file: Path, descriptor: int) -> None:
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.unlink()
    os.close(descriptor)
