"""Messages between coordinator and agents, authenticated with the run's key.

A message is a word and a value of the word's type, as JSON. Nothing received is executed or
unpickled; a wrong type ends the connection.

Each side sends a nonce; its first tag proves that it knows the key. Both nonces enter each
direction's key, so recorded connections are useless. Numbered tags (HMAC-SHA256, RFC 2104) prevent
forged, repeated, dropped or reordered messages. Nothing is encrypted.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import dataclasses
import functools
import hashlib
import hmac
import itertools
import json
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias

from harness.cell.durable import file_digest, replacing
from harness.cell.errors import UsageError
from harness.cell.yaml_text import adapter
from harness.host.folders import cache_folder
from harness.host.process import machine_id
from harness.launch.outcome import RankOutputs
from harness.nodes.rendezvous import Rendezvous, addresses_of_host, set_timeout
from harness.worker.spec import TrialSpec

CHUNK_BYTES = 2**24
"""Number of bytes in a piece of a file; as base64 it is less than MOST_BYTES."""
LEAST_READ_RATE = 2e7
"""Minimum rate in bytes per second at which a node is assumed to read its copies."""


@dataclass(frozen=True)
class FileFact:
    name: str
    """Path of the file below the cache."""
    bytes: int
    modified_nanoseconds: int
    digest: str

    def __post_init__(self) -> None:
        path = PurePosixPath(self.name)
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(f"{self.name!r} is outside the cache")


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
    return FileFact(name, of.st_size, of.st_mtime_ns, file_digest(file))


class OwnFiles:
    """An agent's copies of the coordinator's files."""

    def __init__(self) -> None:
        self.problem = ""
        """Reason why the last trial's files are missing; empty if they are complete."""

    def complete(self, facts: Sequence[FileFact], chunk: Callable[[int, int], str]) -> None:
        """Downloads files that are missing or whose digest differs, piece by piece from `chunk(file
        number, offset)`. If one cannot be stored, sets `problem` and stops."""
        self.problem = ""
        for number, fact in enumerate(facts):
            file = cache_folder() / fact.name
            try:
                if file_digest(file) != fact.digest:
                    _receive(file, fact, functools.partial(chunk, number))
            except (OSError, binascii.Error) as error:
                reason = error.strerror if isinstance(error, OSError) else None
                self.problem = f"cannot keep {str(file)!r}: {reason or error}"
                return


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
    def local(path: str | None) -> str | None:
        return path and str(cache_folder() / _below_cache(path))

    data = dataclasses.replace(spec.data, tokens_file=local(spec.data.tokens_file))
    return dataclasses.replace(spec, data=data, reference=local(spec.reference))


Message: TypeAlias = tuple[str, Any]

_NOTHING: Any = type(None)
_VALUES: dict[str, Any] = {
    # From agents:
    "hello": dict[str, Any],
    "met": int,
    "pong": _NOTHING,
    "listening": int,
    "measured": float,
    "received": float,
    "step": tuple[int, float],
    "left": tuple[float, RankOutputs],
    "want": tuple[int, int],
    "kept": _NOTHING,
    # From the coordinator:
    "warm": list[str],
    "meet": _NOTHING,
    "ping": _NOTHING,
    "listen": _NOTHING,
    "measure": tuple[str, int],
    "files": list[FileFact],
    "chunk": str,
    "run": TrialSpec,
    "stop": _NOTHING,
    "quit": _NOTHING,
}


class ProtocolError(OSError):
    """The peer speaks another protocol or lacks the key."""


def encoded(word: str, value: object = None) -> bytes:
    """Returns a message as JSON, which keeps non-finite floats."""
    return json.dumps([word, adapter(_VALUES[word]).dump_python(value)]).encode()


def decoded(body: bytes) -> Message:
    """Inverse of `encoded`; raises ProtocolError for anything else."""
    try:
        word, value = json.loads(body)
        if word not in _VALUES:
            raise ProtocolError(f"unknown message {word!r}")
        return word, adapter(_VALUES[word]).validate_python(value)
    except (ValueError, TypeError, RecursionError) as error:
        raise ProtocolError(f"not a message of this protocol: {type(error).__name__}") from None


HANDSHAKE_SECONDS = 10
MOST_BYTES = 2**26
"""Maximum size of a message in bytes; one node's answers, logs and stacks are far smaller."""
_PURPOSE = b"parallelism-bench nodes 2"
"""Prefix of the first tag, so that keys are useless to other protocol versions."""
_SIZE = 32
_HEADER = struct.Struct(">II")
"""Header of a message: its length in bytes, and that of the padding after its tag."""
_TO_AGENT, _TO_COORDINATOR = b"to agent", b"to coordinator"
# A node that lost power sends nothing: the kernel gives up after 10 idle seconds and four probes.
_KEEPALIVE = (
    (socket.TCP_KEEPIDLE, 10),
    (socket.TCP_KEEPINTVL, 5),
    (socket.TCP_KEEPCNT, 4),
    (socket.TCP_USER_TIMEOUT, 30_000),
)


def _tag(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"".join(parts), hashlib.sha256)


class NodeConnection:
    """An authenticated connection; many threads may send messages, one receives."""

    def __init__(self, connection: socket.socket, address: str, sends: bytes, hears: bytes) -> None:
        """`sends`, `hears`: keys of the two directions."""
        self.connection, self.address = connection, address
        self._sends, self._hears = sends, hears
        self._sent = self._received = 0
        self._sending = threading.Lock()

    def send(self, word: str, value: object = None, padding: int = 0) -> None:
        """Sends a message. Raises OSError if the peer is gone. `padding`: zero bytes that the peer
        discards."""
        body = encoded(word, value)
        with self._sending:
            head = _HEADER.pack(len(body), padding)
            tag = _tag(self._sends, self._sent.to_bytes(8, "big"), head, body)
            self._sent += 1
            self.connection.sendall(head + body + tag + bytes(padding))

    def receive(self) -> Message:
        """Receives a message. Raises EOFError or OSError if the peer is gone or fails
        authentication."""
        head = self._read(_HEADER.size)
        size, padding = _HEADER.unpack(head)
        if size > MOST_BYTES:
            raise ProtocolError(f"a message of {size} bytes")
        body, tag = self._read(size), self._read(_SIZE)
        expected = _tag(self._hears, self._received.to_bytes(8, "big"), head, body)
        if not hmac.compare_digest(tag, expected):
            raise ProtocolError("a message that was not sent with the run's key")
        self._received += 1
        while padding:
            padding -= len(self._read(min(padding, 2**20)))
        return decoded(body)

    def _read(self, size: int) -> bytes:
        return read_exactly(self.connection, size)

    def shut_down(self) -> None:
        """Makes pending `receive` and `send` calls fail; the owner closes it later."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.close()


def read_exactly(connection: socket.socket, size: int, deadline: float | None = None) -> bytes:
    """Reads exactly `size` bytes. Raises EOFError if the peer ends first, TimeoutError after
    `deadline` (time.monotonic)."""
    parts = bytearray()
    while len(parts) < size:
        if deadline is not None:
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
        part = connection.recv(min(size - len(parts), 2**20))
        if not part:
            raise EOFError("the connection was closed")
        parts += part
    return bytes(parts)


def secure(raw: socket.socket, secret: bytes, *, coordinator: bool) -> NodeConnection:
    """Authenticates both sides within HANDSHAKE_SECONDS; raises OSError or EOFError.

    The coordinator keeps that timeout, since nodes may stall in mid-message.
    """
    over_tcp = raw.family != socket.AF_UNIX
    if over_tcp:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option, value in _KEEPALIVE:
            raw.setsockopt(socket.IPPROTO_TCP, option, value)
    deadline = time.monotonic() + HANDSHAKE_SECONDS
    try:
        address = raw.getsockname()[0] if over_tcp else ""
        raw.settimeout(HANDSHAKE_SECONDS)
        nonce = secrets.token_bytes(_SIZE)
        raw.sendall(nonce)
        other = read_exactly(raw, _SIZE, deadline)
        nonces = nonce + other if coordinator else other + nonce
        to_agent, to_coordinator = (
            _tag(secret, _PURPOSE, direction, nonces) for direction in (_TO_AGENT, _TO_COORDINATOR)
        )
        sends, hears = (to_agent, to_coordinator) if coordinator else (to_coordinator, to_agent)
        # The agent proves itself first, so the coordinator tells strangers nothing that depends on
        # the key.
        if not coordinator:
            raw.sendall(_tag(sends, b"proof"))
        if not hmac.compare_digest(read_exactly(raw, _SIZE, deadline), _tag(hears, b"proof")):
            raise ProtocolError("the other side does not know the run's key")
        if coordinator:
            raw.sendall(_tag(sends, b"proof"))
        raw.settimeout(None)
        set_timeout(raw, HANDSHAKE_SECONDS if coordinator else 0)
    except BaseException:
        raw.close()
        raise
    return NodeConnection(raw, address, sends, hears)


def reach_coordinator(where: Path | Rendezvous, seconds: float) -> NodeConnection:
    """Waits for the coordinator, or its file, and connects; raises UsageError after `seconds`."""
    deadline, why = time.monotonic() + seconds, f"there is no file {str(where)!r}"
    while time.monotonic() < deadline:
        if isinstance(where, Rendezvous) or where.exists():
            rendezvous = where if isinstance(where, Rendezvous) else Rendezvous.read(where)
            here = machine_id() == rendezvous.machine
            for address in itertools.chain(*map(addresses_of_host, rendezvous.addresses)):
                if address.startswith("127.") and not here:
                    continue
                try:
                    return secure(
                        _connect(address, rendezvous.port), rendezvous.secret, coordinator=False
                    )
                except (OSError, EOFError) as error:
                    origin = "" if where is rendezvous else f" of {str(where)!r}"
                    why = f"{address}:{rendezvous.port}{origin}: {error or type(error).__name__}"
        time.sleep(0.2)  # nothing tells this process of a coordinator or its file
    raise UsageError(f"no coordinator of a run was found within {seconds:g} s: {why}")


def _connect(address: str, port: int) -> socket.socket:
    if not address.startswith("/"):
        return socket.create_connection((address, port), timeout=HANDSHAKE_SECONDS)
    raw = socket.socket(socket.AF_UNIX)
    try:
        raw.connect(address)
    except OSError:
        raw.close()
        raise
    return raw
