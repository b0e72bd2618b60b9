"""Network and disk traffic of this process."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from dataclasses import dataclass
from pathlib import Path

_NOT_SENT, _BYTES_SENT = 144, 200
"""Byte offsets in struct tcp_info of linux/tcp.h (Linux 4.19 and newer).

The first is the 32-bit tcpi_notsent_bytes; the second the 64-bit tcpi_bytes_sent, followed by
tcpi_bytes_retrans.
"""

STILL_SECONDS = 0.002
"""Time within which a library's thread sends the data of its step."""
MOST_LOOKS = 5
"""Bound on waiting, as some libraries never stop sending small messages (Horovod's cycles)."""


def tcp_bytes_sent() -> int | None:
    """Returns the payload bytes given to this process's open TCP connections; None on older
    kernels.

    Bytes that the kernel still holds count as sent; otherwise, with a slow reader, a step's last
    message would count in the next step. Retransmissions do not count: they depend on how busy the
    machine is, not on the strategy.
    """
    total = 0
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(entry.path).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as copy:
                if (
                    copy.family not in (socket.AF_INET, socket.AF_INET6)
                    or copy.type != socket.SOCK_STREAM
                ):
                    continue
                info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            if len(info) < _BYTES_SENT + 16:
                return None
            sent, repeated = struct.unpack_from("QQ", info, _BYTES_SENT)
            (held,) = struct.unpack_from("I", info, _NOT_SENT)
            total += sent - repeated + held
    return total


def wait_until_sent() -> None:
    """Waits until a library's threads stop sending.

    A step may end before its last messages have reached the kernel.
    """
    before = tcp_bytes_sent()
    for _ in range(MOST_LOOKS):
        time.sleep(STILL_SECONDS)
        now = tcp_bytes_sent()
        if now == before:
            return
        before = now


def disk_bytes() -> tuple[int, int] | None:
    """Returns the bytes this process read from and wrote to block devices; None if unknown.

    Reads served by the page cache do not count.
    """
    try:
        fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    except OSError:
        return None
    return int(fields["read_bytes"]), int(fields["write_bytes"])


def folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


@dataclass
class Traffic:
    """Bytes over stretches of steps, read between steps; None if unknown."""

    over_tcp: bool
    """Whether the ranks communicate over TCP (gloo, MPI); NCCL's traffic is not visible here."""
    sent: int | None = 0
    """Bytes sent over TCP."""
    disk_read: int | None = 0
    disk_written: int | None = 0
    steps: int = 0
    _start: tuple[int | None, tuple[int, int] | None] | None = None

    def _read(self) -> tuple[int | None, tuple[int, int] | None]:
        return tcp_bytes_sent() if self.over_tcp else None, disk_bytes()

    def start(self) -> None:
        self._start = self._read()

    def stop(self, steps: int) -> None:
        """Ends a stretch of this many steps.

        If a counter fell, because a connection was closed, the total becomes unknown.
        """
        if self._start is None:
            return
        if self.over_tcp:
            wait_until_sent()
        (sent, disk), (sent_now, disk_now) = self._start, self._read()
        self.sent = _more(self.sent, sent, sent_now)
        self.disk_read = _more(self.disk_read, disk and disk[0], disk_now and disk_now[0])
        self.disk_written = _more(self.disk_written, disk and disk[1], disk_now and disk_now[1])
        self.steps += steps
        self._start = None


def _more(total: int | None, before: int | None, now: int | None) -> int | None:
    if total is None or before is None or now is None or now < before:
        return None
    return total + now - before
