"""python -m harness.links.relay SECONDS PORT...: a switch that delays every frame, for kernels
without netem.

Packet sockets replace the kernel's bridge, and pass large frames with the virtio header that says
how to segment them. Imports little, to start quickly.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence

# linux/if_packet.h, linux/if_ether.h, asm-generic/socket.h, linux/prctl.h
_SOL_PACKET, _PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING, _ETH_P_ALL = 263, 15, 23, 3
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE, _PR_SET_TIMERSLACK = 32, 33, 29
_HEADER = 10
"""Size of struct virtio_net_hdr in bytes (linux/virtio_net.h)."""
_LARGEST = 2**17
_BUFFER_BYTES = 2**26
_AT_ONCE = 16


def open_port(name: str) -> socket.socket:
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    port.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    port.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    for force, option in ((_SO_RCVBUFFORCE, socket.SO_RCVBUF), (_SO_SNDBUFFORCE, socket.SO_SNDBUF)):
        try:
            port.setsockopt(socket.SOL_SOCKET, force, _BUFFER_BYTES)
        except PermissionError:  # in a user namespace, only as much as any user may
            port.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
    port.setblocking(False)
    port.bind((name, _ETH_P_ALL))
    return port


def relay(ports: Sequence[socket.socket], seconds: float) -> None:
    """Forwards frames forever, `seconds` after arrival, to the port where the destination was last
    a source, or if it was never one, to all other ports."""
    waiting: deque[tuple[float, bytes, socket.socket]] = deque()  # due time, frame, source port
    port_of: dict[bytes, socket.socket] = {}
    while True:
        left = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for port in select.select(ports, [], [], left)[0]:
            with contextlib.suppress(OSError):  # no more frames, or the interface goes down
                for _ in range(_AT_ONCE):
                    frame = port.recv(_LARGEST)
                    waiting.append((time.monotonic() + seconds, frame, port))
                    port_of[frame[_HEADER + 6 : _HEADER + 12]] = port
        while waiting and waiting[0][0] <= time.monotonic():
            _, frame, source = waiting.popleft()
            target = port_of.get(frame[_HEADER : _HEADER + 6])
            for port in [target] if target else [port for port in ports if port is not source]:
                with contextlib.suppress(OSError):  # a full queue drops the frame, as a switch does
                    port.send(frame)


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    with contextlib.suppress(OSError):  # real-time priority, since ranks keep all cores busy
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    ports = [open_port(name) for name in sys.argv[2:]]
    print("up", flush=True)
    relay(ports, float(sys.argv[1]))


if __name__ == "__main__":
    main()
