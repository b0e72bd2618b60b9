"""Addresses on which a run's processes listen, from the kernel's tables."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil

LISTENS = "0A"


def address_of(digits: str) -> str:
    """Parses an address in /proc/net/tcp or tcp6, whose 32-bit words are in host byte order."""
    words = [int(digits[i : i + 8], 16) for i in range(0, len(digits), 8)]
    raw = struct.pack(f"={len(words)}I", *words)
    return socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, raw)


def listeners(process: int | str = "self") -> dict[str, str]:
    """Returns addresses of listening TCP sockets in a process's network, by inode."""
    found = {}
    with contextlib.suppress(OSError):  # it has ended
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{process}/net", table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTENS:
                    found[fields[9]] = address_of(fields[1].partition(":")[0])
    return found


def other_networks(processes: list[psutil.Process]) -> dict[int, bool]:
    """Returns one of these processes per other network namespace, and whether the namespace has
    only loopback."""
    found = {}
    for process in processes:
        with contextlib.suppress(OSError):
            network = os.readlink(f"/proc/{process.pid}/ns/net")
            devices = Path(f"/proc/{process.pid}/net/dev").read_text().splitlines()[2:]
            alone = [device.split(":")[0].strip() for device in devices] == ["lo"]
            found[network] = (process.pid, alone)
    found.pop(os.readlink("/proc/self/ns/net"), None)
    return dict(found.values())


def owned_by(processes: list[psutil.Process]) -> set[str]:
    """Returns the inodes of these processes' sockets."""
    found = set()
    for process in processes:
        with contextlib.suppress(OSError):
            for entry in os.scandir(f"/proc/{process.pid}/fd"):
                with contextlib.suppress(OSError):
                    found.add(os.readlink(entry.path).removeprefix("socket:[").rstrip("]"))
    return found


def is_loopback(address: str) -> bool:
    parsed = ipaddress.ip_address(address)
    mapped = getattr(parsed, "ipv4_mapped", None)
    return bool((mapped or parsed).is_loopback)


class Watched:
    """Addresses on which this process and its descendants listened."""

    def __init__(self) -> None:
        self.inside: list[str] = []
        """Loopback addresses, and all in networks that have only loopback."""
        self.outside: list[str] = []
        self.elsewhere: set[str] = set()
        """Addresses in networks of emulated nodes."""


@contextlib.contextmanager
def watched() -> Iterator[Watched]:
    """Reads the kernel's tables in a thread: this network's 50 times a second, and those of
    descendants in other networks, which cost more, six times a second."""
    seen, over, before = Watched(), threading.Event(), set(listeners())

    def look() -> None:
        looks = 0
        while not over.wait(0.02):
            looks += 1
            new = {inode: a for inode, a in listeners().items() if inode not in before}
            if not new and looks % 8:
                continue
            own = psutil.Process()
            below = own.children(recursive=True)
            for process, alone in other_networks(below).items():
                addresses = listeners(process).values()
                if alone:
                    seen.inside += addresses
                else:
                    seen.elsewhere |= set(addresses)
            mine = owned_by([own, *below]) if new else set()
            for inode in mine & new.keys():
                before.add(inode)
                (seen.inside if is_loopback(new[inode]) else seen.outside).append(new[inode])

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()
