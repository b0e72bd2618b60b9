"""How many bytes did this process send to others, and read from and write to a disk?"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from dataclasses import dataclass
from pathlib import Path

_NOT_SENT, _BYTES_SENT = 144, 200
"""Offsets in bytes in struct tcp_info of linux/tcp.h (Linux 4.19 and newer): of tcpi_notsent_bytes,
a 32-bit number, and of tcpi_bytes_sent and tcpi_bytes_retrans, two 64-bit numbers."""

STILL_SECONDS = 0.002
"""A thread of a library sends within this time what its step has given it."""
MOST_LOOKS = 5
"""Some libraries never stop sending small messages (Horovod's cycles)."""


def tcp_bytes_sent() -> int | None:
    """Payload bytes that this process has given to its open TCP connections; None on older kernels.

    What the kernel still holds counts as sent: where the other process is slow to read, the last
    message of a step would else count in the next one. Retransmissions do not: on a busy machine
    the kernel repeats what was not acknowledged in time, and that is no property of the strategy.
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
    """Waits until a library's threads send nothing more: a step may end before the last of its
    messages was given to the kernel, which it does not wait for."""
    before = tcp_bytes_sent()
    for _ in range(MOST_LOOKS):
        time.sleep(STILL_SECONDS)
        now = tcp_bytes_sent()
        if now == before:
            return
        before = now


def disk_bytes() -> tuple[int, int] | None:
    """Bytes that this process made the kernel read from and write to block devices, without what
    the page cache served; None where unknown."""
    try:
        fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    except OSError:
        return None
    return int(fields["read_bytes"]), int(fields["write_bytes"])


def folder_bytes(folder: Path) -> int:
    """Bytes of the files in a folder and below."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


@dataclass
class Traffic:
    """Bytes over several stretches of steps; None: unknown. The counters are read between steps, so
    that reading them takes no time of a step."""

    over_tcp: bool
    """Whether the ranks communicate over TCP (gloo, MPI); what NCCL sends is not visible here."""
    sent: int | None = 0
    """Over TCP."""
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

        A counter that fell, because a connection was closed, makes its total unknown.
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
