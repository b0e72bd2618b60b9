"""A trial's reference and data: sent to nodes that lack them, and verified by digest.

Agents ask for one chunk at a time, which bounds memory.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from harness.host.folders import cache_folder, replacing
from harness.worker.spec import TrialSpec

CHUNK_BYTES = 2**24
"""Less than protocol.MOST_BYTES as base64."""
LEAST_READ_RATE = 2e7
"""Minimum bytes per second at which a node is assumed to read its copies."""


@dataclass(frozen=True)
class FileFact:
    name: str
    """Path below the cache."""
    bytes: int
    modified_nanoseconds: int
    digest: str

    def __post_init__(self) -> None:
        path = PurePosixPath(self.name)
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(f"{self.name!r} is outside the cache")


@functools.cache
def _digest(file: Path, size: int, modified_nanoseconds: int) -> str:
    with open(file, "rb") as source:
        sha256 = hashlib.sha256()
        while part := source.read(2**20):
            sha256.update(part)
    return sha256.hexdigest()


def _below_cache(path: str) -> PurePosixPath:
    return PurePosixPath(*PurePosixPath(path).parts[-2:])


@dataclass(frozen=True)
class Offer:
    files: tuple[Path, ...]
    facts: tuple[FileFact, ...]

    @classmethod
    def of(cls, spec: TrialSpec) -> Offer:
        """Lists `reference.json` last, since it marks a reference as complete."""
        names: dict[Path, str] = {}
        if folder := spec.reference:
            for name in ("final.safetensors", "ahead.safetensors", "reference.json"):
                names[Path(folder, name)] = str(_below_cache(folder) / name)
        if tokens := spec.data.tokens_file:
            names[Path(tokens)] = str(_below_cache(tokens))
        files = tuple(file for file in names if file.is_file())
        return cls(files, tuple(_fact(file, names[file]) for file in files))

    @property
    def bytes(self) -> int:
        return sum(fact.bytes for fact in self.facts)

    def chunk(self, number: int, offset: int) -> str:
        """Returns bytes from `offset` of the numbered file, as base64; empty at its end."""
        with open(self.files[number], "rb") as source:
            source.seek(offset)
            return base64.b64encode(source.read(CHUNK_BYTES)).decode()


def _fact(file: Path, name: str) -> FileFact:
    of = file.stat()
    digest = _digest(file, of.st_size, of.st_mtime_ns)
    return FileFact(name, of.st_size, of.st_mtime_ns, digest)


class OwnFiles:
    """An agent's copies of the coordinator's files."""

    def __init__(self) -> None:
        self.problem = ""
        """Reason why the last trial's files are missing; empty if they are complete."""

    def complete(self, facts: Sequence[FileFact], chunk: Callable[[int, int], str]) -> None:
        """Gets missing and different files by `chunk(number, offset)`; sets `problem`."""
        self.problem = ""
        for number, fact in enumerate(facts):
            file = cache_folder() / fact.name
            try:
                if not _is_copy(file, fact):
                    _receive(file, fact, functools.partial(chunk, number))
            except (OSError, binascii.Error) as error:
                reason = error.strerror if isinstance(error, OSError) else None
                self.problem = f"cannot keep {str(file)!r}: {reason or error}"
                return


def _is_copy(file: Path, fact: FileFact) -> bool:
    """Compares digests only if modification times differ, which they never do on a shared disk."""
    try:
        of = file.stat()
    except FileNotFoundError:
        return False
    if of.st_size != fact.bytes:
        return False
    if of.st_mtime_ns == fact.modified_nanoseconds:
        return True
    return _digest(file, of.st_size, of.st_mtime_ns) == fact.digest


def _receive(file: Path, fact: FileFact, chunk: Callable[[int], str]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    sha256, received = hashlib.sha256(), 0
    with replacing(file) as temporary:
        with open(temporary, "xb") as sink:
            while received < fact.bytes:
                part = base64.b64decode(chunk(received), validate=True)
                if not part:
                    break
                sha256.update(part)
                received += sink.write(part)
        if (received, sha256.hexdigest()) != (fact.bytes, fact.digest):
            raise OSError("the coordinator sent a different file than it announced")
        os.utime(temporary, ns=(fact.modified_nanoseconds, fact.modified_nanoseconds))


def in_own_cache(spec: TrialSpec) -> TrialSpec:
    def own(path: str | None) -> str | None:
        return path and str(cache_folder() / _below_cache(path))

    data = dataclasses.replace(spec.data, tokens_file=own(spec.data.tokens_file))
    return dataclasses.replace(spec, data=data, reference=own(spec.reference))
