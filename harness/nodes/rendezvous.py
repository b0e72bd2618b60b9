from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import socket
import struct
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from harness.cell.durable import replacing, sealed, unsealed
from harness.cell.errors import UsageError
from harness.cell.yaml_text import parsed
from harness.host.process import machine_id

KEY, KEY_FILE = "PARALLELISM_BENCH_KEY", "PARALLELISM_BENCH_KEY_FILE"
"""Environment variables: a run's key, or the path of a file with it."""
LEAST_KEY_DIGITS = 32
_ADDRESS = re.compile(r"([\w.-]*):(\d{1,5})", re.ASCII)
_IPV6 = re.compile(r"\[.*:.*\](:\d+)?|[0-9a-fA-F.]*(:[0-9a-fA-F.%\w]*){2,}", re.ASCII)
_ROUTE_UP = 1


@dataclass(frozen=True)
class Rendezvous:
    """The coordinator's addresses and key, from a private shared file or given to each node."""

    machine: str
    addresses: tuple[str, ...]
    """Hosts to try in order, or the path of a socket on this machine."""
    port: int
    key: str = field(repr=False)

    @property
    def secret(self) -> bytes:
        return bytes.fromhex(self.key)

    def write(self, file: Path) -> None:
        """Replaces the file, or a link, by one that only its owner can read."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with replacing(file) as temporary, open(os.open(temporary, flags, 0o600), "w") as sink:
            sink.write(sealed(json.dumps(asdict(self))))

    @classmethod
    def read(cls, file: Path) -> Rendezvous:
        """Reads the file. Raises UsageError if another user owns it or may read or change it,
        because its key controls an agent."""
        with open(file, "rb") as source:
            of = os.fstat(source.fileno())
            if of.st_uid != os.getuid() or of.st_mode & 0o077:
                raise UsageError(
                    f"{str(file)!r} must belong to this user and be readable by nobody else,"
                    " because its key lets anyone run code on this node"
                )
            try:
                found = parsed(cls, unsealed(source.read()))
                bytes.fromhex(found.key)
            except ValueError:
                raise UsageError(
                    f"{str(file)!r} was not written by a coordinator, or is damaged; give the file"
                    " that the run wrote"
                ) from None
        return found


def parse_rendezvous(text: str) -> Path | Rendezvous:
    """Returns the path of a rendezvous file, or the rendezvous at [HOST]:PORT with the
    environment's key. Raises UsageError without a usable key."""
    if _IPV6.fullmatch(text):
        raise UsageError(f"--rendezvous {text}: give a host name or an IPv4 address, not IPv6")
    if not (match := _ADDRESS.fullmatch(text)):
        return Path(text)
    host, port = match[1], int(match[2])
    if port > 65535:
        raise UsageError(f"--rendezvous {text}: the port must be at most 65535")
    return Rendezvous(machine_id(), (host,) if host else (), port, _key_from_environment())


def _key_from_environment() -> str:
    """Returns the key and removes it from the environment, which ranks inherit."""
    key, origin = os.environ.pop(KEY, "").strip(), KEY
    if not key and (file := os.environ.get(KEY_FILE)):
        origin = file
        try:
            if Path(file).stat().st_mode & 0o007:
                raise UsageError(f"{file!r} must not be open to all users; try chmod o= {file!r}")
            key = Path(file).read_text("ascii").strip()
        except (OSError, ValueError) as error:
            raise UsageError(f"{KEY_FILE}: {file!r} is not a readable key: {error}") from None
    if not key:
        raise UsageError(
            f"nodes that connect by address need the same secret in {KEY}, or in a file named by"
            f" {KEY_FILE}; make one with: openssl rand -hex 32"
        )
    if len(key) < LEAST_KEY_DIGITS or len(key) % 2 or not re.fullmatch(r"[0-9a-fA-F]+", key):
        raise UsageError(
            f"{origin} must hold an even number of hex digits, {LEAST_KEY_DIGITS} or more; make"
            " them with: openssl rand -hex 32"
        )
    return key


def new_key() -> str:
    return secrets.token_hex(32)


def addresses_of(interface: str | None = None) -> list[str]:
    """Returns IPv4 addresses of this host or one interface: the host name's first, loopback last.
    Raises UsageError for an unknown interface."""
    by_interface = {
        name: [a.address for a in addresses if a.family == socket.AF_INET]
        for name, addresses in psutil.net_if_addrs().items()
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
        {a for addresses in by_interface.values() for a in addresses},
        key=lambda a: (a.startswith("127."), a != named, a not in routed, a),
    )


def addresses_of_host(host: str, interface: str | None = None) -> list[str]:
    """Returns [host]; if `host` is this host's name and resolves to loopback (Debian's 127.0.1.1),
    this host's addresses come first."""
    host_name = socket.gethostname().partition(".")[0]
    if host.partition(".")[0] == host_name != "localhost":
        with contextlib.suppress(OSError):
            if socket.gethostbyname(host).startswith("127."):
                return [*addresses_of(interface), host]
    return [host]


def default_interface(table: Path = Path("/proc/net/route")) -> str | None:
    with contextlib.suppress(OSError):
        for line in table.read_text().splitlines()[1:]:
            name, destination, _, flags, *_ = line.split()
            if int(destination, 16) == 0 and int(flags, 16) & _ROUTE_UP:
                return name
    return None


def interface_of(address: str) -> str | None:
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.address == address for a in addresses):
            return name
    return None


def set_timeout(raw: socket.socket, seconds: float) -> None:
    """Sets the time limit in seconds of each read and write. 0 means no limit."""
    whole, part = divmod(seconds, 1)
    interval = struct.pack("ll", int(whole), int(part * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        raw.setsockopt(socket.SOL_SOCKET, option, interval)
