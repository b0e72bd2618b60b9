"""Rendezvous of agents with the coordinator, and a node's addresses."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import struct
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from harness.spec.errors import UsageError

_ROUTE_UP = 1
"""RTF_UP of linux/route.h."""


@dataclass(frozen=True)
class Rendezvous:
    """The coordinator's addresses and key, in a private file in a folder that all nodes share."""

    machine: str
    addresses: tuple[str, ...]
    """Hosts to try in order, or the path of a socket on this machine."""
    port: int
    key: str = field(repr=False)
    """Hex digits, secret to readers of the file."""

    @property
    def secret(self) -> bytes:
        return bytes.fromhex(self.key)

    def write(self, file: Path) -> None:
        """Writes atomically and readable only by the owner; replaces a link instead of following
        it."""
        temporary = file.with_name(f".{file.name}.{secrets.token_hex(8)}.tmp")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with open(os.open(temporary, flags, 0o600), "w") as sink:
            json.dump(asdict(self), sink)
        temporary.replace(file)

    @classmethod
    def read(cls, file: Path) -> Rendezvous:
        """Raises UsageError if others own, may read or may change the file: an agent obeys whoever
        holds its key."""
        with open(file) as source:
            of = os.fstat(source.fileno())
            if of.st_uid != os.getuid() or of.st_mode & 0o077:
                raise UsageError(
                    f"{str(file)!r} must belong to this user, and nobody else may read it: whoever"
                    " can decides what this node runs"
                )
            try:
                content = json.load(source)
                found = cls(
                    content["machine"],
                    tuple(content["addresses"]),
                    int(content["port"]),
                    content["key"],
                )
                bytes.fromhex(found.key)
            except (ValueError, KeyError, TypeError):
                raise UsageError(f"{str(file)!r} was not written by a coordinator") from None
        return found


def new_key() -> str:
    return secrets.token_hex(32)


def machine_id() -> str:
    """Identifies the running kernel until reboot; containers and network namespaces share it."""
    file = Path("/proc/sys/kernel/random/boot_id")
    return file.read_text().strip() if file.exists() else socket.gethostname()


def addresses_of(interface: str | None = None) -> list[str]:
    """Returns IPv4 addresses of this host or one interface: the host name's first, loopback last.

    Raises UsageError for an unknown interface.
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
    routed = by_interface.get(default_interface() or "", [])
    return sorted(
        {a for known in by_interface.values() for a in known},
        key=lambda a: (a.startswith("127."), a != named, a not in routed, a),
    )


def default_interface(table: Path = Path("/proc/net/route")) -> str | None:
    with contextlib.suppress(OSError):
        for line in table.read_text().splitlines()[1:]:
            name, destination, _, flags, *_ = line.split()
            if int(destination, 16) == 0 and int(flags, 16) & _ROUTE_UP:
                return name
    return None


def interface_of(address: str) -> str | None:
    for name, known in psutil.net_if_addrs().items():
        if any(a.address == address for a in known):
            return name
    return None


def set_timeout(raw: socket.socket, seconds: float) -> None:
    """Limits each read and write; 0: no limit."""
    whole, part = divmod(seconds, 1)
    interval = struct.pack("ll", int(whole), int(part * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        raw.setsockopt(socket.SOL_SOCKET, option, interval)
