"""Files that replace others as a whole, survive a loss of power, and carry a digest."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import secrets
import warnings
from collections.abc import Iterator
from pathlib import Path

from harness.cell.errors import DamagedFileWarning


@contextlib.contextmanager
def replacing(file: Path, lasting: bool = True) -> Iterator[Path]:
    """Yields a path in the same folder, which replaces `file` on exit, or is removed after an
    error. `lasting`: whether the file must survive a loss of power."""
    # Hosts that share the folder may have processes with equal ids.
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(8)}.tmp")
    try:
        yield temporary
        if lasting:
            _sync(temporary)
        temporary.replace(file)
        if lasting:
            _sync(file.parent)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(file: Path, text: str, lasting: bool = True) -> Path:
    """Replaces a text file as a whole; raises OSError and leaves it unchanged."""
    with replacing(file, lasting) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")
    return file


def sealed(text: str) -> str:
    """Returns a text with its SHA-256 in an additional last line."""
    return f"{text}\n{hashlib.sha256(text.encode()).hexdigest()}\n"


def unsealed(content: bytes) -> str:
    """Returns the text of a sealed file; raises ValueError if a byte of it is damaged."""
    text, _, digest = content.decode().removesuffix("\n").rpartition("\n")
    if sealed(text) != f"{text}\n{digest}\n" or not content.endswith(b"\n"):
        raise ValueError("its digest differs from its content")
    return text


def write_cached(file: Path, text: str) -> None:
    """Replaces a file that can be made again, with its digest."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, sealed(text))


def read_cached(file: Path) -> str | None:
    """Returns the text of a file that can be made again; None if it is missing, or was damaged and
    therefore removed."""
    try:
        return unsealed(file.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError:
        remove_damaged(file)
        return None


def remove_damaged(file: Path) -> None:
    """Removes a file that can be made again, and warns."""
    file.unlink(missing_ok=True)
    warnings.warn(
        f"{str(file)!r} was missing or damaged, and is made again", DamagedFileWarning, stacklevel=2
    )


def file_digest(file: Path) -> str:
    """Returns a file's SHA-256; empty if there is no such file. Reads an unchanged file once."""
    try:
        of = file.stat()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    return _digest(file, of.st_size, of.st_mtime_ns)


@functools.cache
def _digest(file: Path, size: int, modified_nanoseconds: int) -> str:
    with open(file, "rb") as source:
        sha256 = hashlib.sha256()
        while part := source.read(2**20):
            sha256.update(part)
    return sha256.hexdigest()
