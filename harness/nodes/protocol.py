"""How coordinator and agents find and trust each other, and what they say."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any, TypeAlias

import psutil

from harness.spec.errors import UsageError

Message: TypeAlias = tuple[str, Any]
"""A word, and what belongs to it."""
HANDSHAKE_SECONDS = 10
# A node that lost its power says nothing: the kernel asks after 10 idle seconds, and gives up after
# four questions.
_KEEPALIVE = (
    (socket.TCP_KEEPIDLE, 10),
    (socket.TCP_KEEPINTVL, 5),
    (socket.TCP_KEEPCNT, 4),
    (socket.TCP_USER_TIMEOUT, 30_000),
)


@dataclass(frozen=True)
class Rendezvous:
    """Where the coordinator listens; written to a file that only its owner reads, in a folder that
    all nodes share.
    """

    machine: str
    """The coordinator's, see machine_id."""
    addresses: tuple[str, ...]
    """In the order to be tried: of hosts, or the path of a socket on this machine."""
    port: int
    key: str = field(repr=False)
    """Hex digits, known to those who can read the file."""

    @property
    def secret(self) -> bytes:
        return bytes.fromhex(self.key)

    def write(self, file: Path) -> None:
        """Whole or not at all, readable by its owner alone."""
        temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as sink:
            json.dump(
                {
                    "machine": self.machine,
                    "addresses": self.addresses,
                    "port": self.port,
                    "key": self.key,
                },
                sink,
            )
        temporary.replace(file)

    @classmethod
    def read(cls, file: Path) -> Rendezvous:
        content = json.loads(file.read_text())
        return cls(content["machine"], tuple(content["addresses"]), content["port"], content["key"])


def machine_id() -> str:
    """The same for everything that one kernel runs, until it is started anew: containers and
    network namespaces share it."""
    file = Path("/proc/sys/kernel/random/boot_id")
    return file.read_text().strip() if file.exists() else socket.gethostname()


def addresses_of(interface: str | None = None) -> list[str]:
    """IPv4 addresses of this host, or of one interface; the one that its name stands for first,
    loopback last.

    Raises UsageError for an interface that is not here.
    """
    by_interface = {
        name: [a.address for a in known if a.family == socket.AF_INET]
        for name, known in psutil.net_if_addrs().items()
    }
    if interface is not None:
        if not by_interface.get(interface):
            raise UsageError(
                f"network interface {interface!r} has no IPv4 address on this node; there are:"
                f" {', '.join(sorted(by_interface))}"
            )
        return by_interface[interface]
    named = ""
    with contextlib.suppress(OSError):
        named = socket.gethostbyname(socket.gethostname())
    return sorted(
        {a for known in by_interface.values() for a in known},
        key=lambda a: (a.startswith("127."), a != named, a),
    )


def interface_of(address: str) -> str | None:
    """The interface that has this address."""
    for name, known in psutil.net_if_addrs().items():
        if any(a.address == address for a in known):
            return name
    return None


class NodeConnection:
    """A connection whose messages are (word, what) pairs; several threads may send."""

    def __init__(self, connection: Connection[Message, Message], address: str) -> None:
        self.connection, self.address = connection, address
        self._sending = threading.Lock()

    def send(self, word: str, what: object = None) -> None:
        """Raises OSError where the other side is gone."""
        with self._sending:
            self.connection.send((word, what))

    def receive(self) -> Message:
        """Waits for a message; raises EOFError or OSError where the other side is gone."""
        return self.connection.recv()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.close()


def secure(raw: socket.socket, secret: bytes, *, coordinator: bool) -> NodeConnection:
    """Each side proves that it knows the secret; raises OSError, EOFError or AuthenticationError
    where one does not in time.

    The coordinator keeps that time limit on its connections: it reads when there is something to
    read, and a node may stall in the middle of a message.
    """
    over_tcp = raw.family != socket.AF_UNIX
    if over_tcp:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option, value in _KEEPALIVE:
            raw.setsockopt(socket.IPPROTO_TCP, option, value)
    raw.settimeout(None)
    set_timeout(raw, HANDSHAKE_SECONDS)
    address = raw.getsockname()[0] if over_tcp else ""
    connection: Connection[Message, Message] = Connection(raw.detach())
    try:
        for turn in (
            (deliver_challenge, answer_challenge)
            if coordinator
            else (answer_challenge, deliver_challenge)
        ):
            turn(connection, secret)
        if not coordinator:
            with socket.socket(fileno=os.dup(connection.fileno())) as same:
                set_timeout(same, 0)
    except BaseException:
        connection.close()
        raise
    return NodeConnection(connection, address)


def set_timeout(raw: socket.socket, seconds: int) -> None:
    """How long a read or write may wait; 0: for ever."""
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        raw.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", seconds, 0))


def reach_coordinator(file: Path, seconds: float) -> NodeConnection:
    """A line to the coordinator, which may not have written its file yet; raises UsageError where
    there is none in time.
    """
    deadline, why = time.monotonic() + seconds, f"there is no file {str(file)!r}"
    while time.monotonic() < deadline:
        if file.exists():
            rendezvous = Rendezvous.read(file)
            here = machine_id() == rendezvous.machine
            for address in rendezvous.addresses:
                if address.startswith("127.") and not here:
                    continue
                try:
                    return secure(
                        _connect(address, rendezvous.port), rendezvous.secret, coordinator=False
                    )
                except (OSError, EOFError, AuthenticationError) as error:
                    why = (
                        f"{address}:{rendezvous.port} of {str(file)!r}:"
                        f" {error or type(error).__name__}"
                    )
        time.sleep(0.2)  # the coordinator writes its file on a shared folder, which tells nobody
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


def new_key() -> str:
    return secrets.token_hex(32)
