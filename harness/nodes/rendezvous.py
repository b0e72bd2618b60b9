"""Where a coordinator listens, how agents find it, and a node's addresses."""

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
    """Address and key of the coordinator, in a file readable only by its owner, in a folder that
    all nodes share."""

    machine: str
    """Coordinator's machine_id."""
    addresses: tuple[str, ...]
    """Addresses to try in order: hosts, or the path of a socket on this machine."""
    port: int
    key: str = field(repr=False)
    """Secret key as hex digits, for those who can read the file."""

    @property
    def secret(self) -> bytes:
        return bytes.fromhex(self.key)

    def write(self, file: Path) -> None:
        """Writes the file atomically, readable only by its owner. Replaces a link in its place
        instead of following it."""
        temporary = file.with_name(f".{file.name}.{secrets.token_hex(8)}.tmp")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with open(os.open(temporary, flags, 0o600), "w") as sink:
            json.dump(asdict(self), sink)
        temporary.replace(file)

    @classmethod
    def read(cls, file: Path) -> Rendezvous:
        """Reads the file. Raises UsageError if it is another user's, or others may read or change
        it: an agent obeys whoever holds its key."""
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
    """Returns a new key for one run, as hex digits."""
    return secrets.token_hex(32)


def machine_id() -> str:
    """Returns an id of the running kernel until its reboot; containers and network namespaces share
    it."""
    file = Path("/proc/sys/kernel/random/boot_id")
    return file.read_text().strip() if file.exists() else socket.gethostname()


def addresses_of(interface: str | None = None) -> list[str]:
    """Returns the IPv4 addresses of this host, or of one interface: that of the host's name first,
    then of the default route, loopback last.

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
    routed = by_interface.get(default_interface() or "", [])
    return sorted(
        {a for known in by_interface.values() for a in known},
        key=lambda a: (a.startswith("127."), a != named, a not in routed, a),
    )


def default_interface(table: Path = Path("/proc/net/route")) -> str | None:
    """Returns the interface of IPv4's default route; None without one."""
    with contextlib.suppress(OSError):
        for line in table.read_text().splitlines()[1:]:
            name, destination, _, flags, *_ = line.split()
            if int(destination, 16) == 0 and int(flags, 16) & _ROUTE_UP:
                return name
    return None


def interface_of(address: str) -> str | None:
    """Returns the interface that has this address."""
    for name, known in psutil.net_if_addrs().items():
        if any(a.address == address for a in known):
            return name
    return None


def set_timeout(raw: socket.socket, seconds: float) -> None:
    """Limits how long reads and writes may wait; 0: forever."""
    whole, part = divmod(seconds, 1)
    interval = struct.pack("ll", int(whole), int(part * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        raw.setsockopt(socket.SOL_SOCKET, option, interval)
