"""Measures a link between two agents: TCP rate, and half a round trip."""

from __future__ import annotations

import contextlib
import socket
import statistics
import threading
import time
from collections.abc import Callable

PINGS = 100
SETTLE_SECONDS, STREAM_SECONDS = 0.3, 1.2
"""The stream is measured between these seconds. Before, a shaped link passes a burst and TCP finds
its rate."""
_PATIENCE_SECONDS = 20.0
_CHUNK = 2**18


def listen(address: str, done: Callable[[float], object]) -> int:
    """Serves one measurement in a thread; returns the port.

    `done` gets the payload's bits per second.
    """
    listener = socket.create_server((address, 0))
    port: int = listener.getsockname()[1]

    def serve() -> None:
        rate = 0.0
        with contextlib.suppress(OSError), listener:
            listener.settimeout(_PATIENCE_SECONDS)
            connection, _ = listener.accept()
            with connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.settimeout(_PATIENCE_SECONDS)
                while connection.recv(1) == b"p":
                    connection.sendall(b"p")
                rate = _received(connection)
        done(rate)

    threading.Thread(target=serve, daemon=True).start()
    return port


def _received(connection: socket.socket, now: Callable[[], float] = time.perf_counter) -> float:
    buffer = bytearray(_CHUNK)
    begin, first, count = now(), 0.0, 0
    while True:
        size = connection.recv_into(buffer)
        at = now() - begin
        if not size:
            raise ConnectionError
        if first:
            count += size
        elif at >= SETTLE_SECONDS:
            first = at
        if count and at >= STREAM_SECONDS:
            return 8 * count / (at - first)


def measure(address: str, port: int, now: Callable[[], float] = time.perf_counter) -> float:
    """Returns the one-way latency in seconds, then sends until the listener stops."""
    with socket.create_connection((address, port), timeout=_PATIENCE_SECONDS) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def round_trip() -> float:
            begin = now()
            connection.sendall(b"p")
            connection.recv(1)
            return now() - begin

        trips = [round_trip() for _ in range(PINGS)]
        connection.sendall(b"s")
        payload = bytes(_CHUNK)
        with contextlib.suppress(OSError):
            while True:
                connection.sendall(payload)
    return statistics.median(trips) / 2
