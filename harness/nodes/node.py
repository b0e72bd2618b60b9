from __future__ import annotations

import contextlib
import os
import platform
import socket
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.host.cores import allowed_cores
from harness.host.environment import cpu_model, gpus, numa_nodes
from harness.host.gpu_inventory import gpu_topology
from harness.host.memory_limits import memory_bytes
from harness.host.process import machine_id
from harness.nodes.protocol import NodeConnection

_SYS = Path("/sys")


def link_speed(interface: str | None, sys: Path = _SYS) -> int | None:
    """Returns the nominal bits per second; None if unknown (loopback, virtual links)."""
    try:
        megabits = int((sys / "class/net" / str(interface) / "speed").read_text())
    except (OSError, ValueError):
        return None
    return megabits * 10**6 if megabits > 0 else None


def node_facts(number: int, name: str) -> dict[str, object]:
    """Returns facts that need no connection; with GPUs, this takes seconds."""
    return {
        "number": number,
        "name": name,
        "host": platform.node(),
        "machine": machine_id(),
        "switches": os.environ.get("SLURM_TOPOLOGY_ADDR"),
        "cpu_model": cpu_model(),
        "cores": allowed_cores(),
        "numa": numa_nodes(),
        "memory_bytes": memory_bytes(),
        "gpus": [name for name, _ in gpus()],
        "gpu_topology": gpu_topology(),
    }


PINGS = 100
SETTLE_SECONDS, STREAM_SECONDS = 0.3, 1.2
"""Start and end of a stream's measured part, after a shaped link's burst and TCP's start."""
_TIMEOUT_SECONDS = 20.0
_CHUNK = 2**18


def listen_for_measurement(address: str, done: Callable[[float], object]) -> int:
    """Serves one measurement in a thread; returns the port. `done` gets bits per second."""
    listener = socket.create_server((address, 0))
    port: int = listener.getsockname()[1]

    def serve() -> None:
        rate = 0.0
        with contextlib.suppress(OSError), listener:
            listener.settimeout(_TIMEOUT_SECONDS)
            connection, _ = listener.accept()
            with connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.settimeout(_TIMEOUT_SECONDS)
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


def measure_latency(address: str, port: int, now: Callable[[], float] = time.perf_counter) -> float:
    """Returns the one-way latency in seconds; then sends until the listener stops."""
    with socket.create_connection((address, port), timeout=_TIMEOUT_SECONDS) as connection:
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


@dataclass
class Node:
    line: NodeConnection
    facts: dict[str, Any]

    @property
    def number(self) -> int:
        return int(self.facts["number"])

    @property
    def name(self) -> str:
        return str(self.facts["name"])


EMPTY_MESSAGES, MESSAGE_BYTES, MESSAGES = 20, 2**24, 3


def measured_link(line: NodeConnection) -> dict[str, float]:
    """Measures the median round trip of empty messages, and the best rate of large ones without
    it."""

    def took(payload: int) -> float:
        begin = time.perf_counter()
        line.send("ping", padding=payload)
        line.receive()
        return time.perf_counter() - begin

    round_trip = statistics.median(took(0) for _ in range(EMPTY_MESSAGES))
    seconds = min(took(MESSAGE_BYTES) for _ in range(MESSAGES))
    return {
        "round_trip_seconds": round_trip,
        "bits_per_second_from_head": 8 * MESSAGE_BYTES / max(seconds - round_trip, 1e-9),
    }
