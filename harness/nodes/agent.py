from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import os
import platform
import queue
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.cell.errors import UsageError
from harness.host.cores import allowed_cores, memory_bytes
from harness.host.environment import cpu_model, gpus, numa_nodes
from harness.host.gc_tuning import collect_seldom
from harness.host.gpu_inventory import gpu_topology
from harness.host.process import machine_id
from harness.host.user_code import first_line
from harness.launch.launcher import Launcher
from harness.launch.outcome import RankOutputs
from harness.nodes.protocol import (
    Message,
    NodeConnection,
    OwnFiles,
    in_own_cache,
    reach_coordinator,
)
from harness.nodes.rendezvous import KEY, KEY_FILE, addresses_of, interface_of, parse_rendezvous
from harness.worker.rank_answer import FailureAnswer, RankAnswer
from harness.worker.spec import TrialSpec

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

NODE_VARIABLES = (
    "SLURM_NODEID",
    "SKYPILOT_NODE_RANK",
    "JOB_COMPLETION_INDEX",
    "OMPI_COMM_WORLD_RANK",
)
"""Environment variables in which launchers give a node's number."""


class Agent:
    """Keeps a warm fork server, runs the node's ranks, and exits with the coordinator."""

    def __init__(self, line: NodeConnection, address: str, interface: str | None) -> None:
        self.line, self.address, self.interface = line, address, interface
        self.launcher: Launcher | None = None
        self.store: TCPStore | None = None
        self.stop: threading.Event | None = None
        self.orders: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.files = OwnFiles()

    def serve(self) -> None:
        threading.Thread(target=self._listen, daemon=True).start()
        while True:
            word, what = self.orders.get()
            if word == "quit":
                return
            if word == "warm":
                self.launcher = Launcher(what, alone=False)
            elif word == "meet":
                from harness.host.tcp_store import open_store

                self.store = open_store(self.address)
                self.line.send("met", self.store.port)
            elif word == "ping":
                self.line.send("pong")
            elif word == "listen":
                port = listen_for_measurement(
                    self.address, lambda rate: self.line.send("received", rate)
                )
                self.line.send("listening", port)
            elif word == "measure":
                self.line.send("measured", measure_latency(*what))
            elif word == "files":
                self.files.complete(what, self._chunk)
                self.line.send("kept")
            elif word == "run":
                self._run(what)

    def _listen(self) -> None:
        """Receives messages while ranks run; exits without a coordinator."""
        while True:
            try:
                word, what = self.line.receive()
            except (EOFError, OSError):
                word, what = "gone", None
            if word in ("stop", "gone", "quit") and self.stop:
                self.stop.set()
            if word == "gone":
                print(
                    "agent: the coordinator has exited, or another agent joined with this number",
                    file=sys.stderr,
                    flush=True,
                )
                os._exit(1)  # the kernel takes the fork server and the ranks along
            if word == "run":
                self.stop = threading.Event()
            if word != "stop":
                self.orders.put((word, what))
            if word == "quit":
                return

    def _run(self, spec: TrialSpec) -> None:
        received_at = time.time()
        self.launcher = self.launcher or Launcher(alone=False)
        if self.files.problem:
            reason = f"{spec.node_name}: {self.files.problem}"
            cause = FailureAnswer("failed", reason, failed_at=received_at, consequence=False)
            first = spec.ranks[0]
            left = RankOutputs(answers={first: RankAnswer(first, failure=cause)})
        else:
            spec = dataclasses.replace(in_own_cache(spec), interface=self.interface)
            left, _ = self.launcher.run_ranks(
                spec,
                store=self.store if spec.node == 0 else None,
                stop=self.stop,
                on_progress=self._progress if spec.node == 0 else None,
            )
        self.line.send("left", (received_at, left))

    def _chunk(self, file: int, offset: int) -> str:
        self.line.send("want", (file, offset))
        word, chunk = self.orders.get()
        if word != "chunk":
            raise EOFError(f"{word!r} instead of a chunk of a file")
        return str(chunk)

    def _progress(self, step: int, seconds: float) -> None:
        with contextlib.suppress(OSError):
            self.line.send("step", (step, seconds))


def main() -> None:
    """python -m harness.agent RENDEZVOUS [--node N] [--name NAME] [--interface IF].

    Variables of srun, SkyPilot, mpirun or an indexed Kubernetes Job replace the options.
    """
    parser = argparse.ArgumentParser(
        prog="python -m harness.agent", description="A node of a run over several nodes."
    )
    parser.add_argument(
        "rendezvous",
        help=(
            "File in which the coordinator publishes its address, or its HOST:PORT with the"
            f" run's key in {KEY} or in a file named by {KEY_FILE}. The coordinator may start"
            " later."
        ),
    )
    parser.add_argument(
        "--node",
        type=int,
        default=next((int(os.environ[name]) for name in NODE_VARIABLES if name in os.environ), 0),
        help="Number of this node, from 0.",
    )
    parser.add_argument(
        "--name",
        default=os.environ.get("SLURMD_NODENAME") or platform.node(),
        help="Name of this node.",
    )
    parser.add_argument(
        "--interface",
        default="",
        help="Network interface that reaches all nodes; default: the one to the coordinator.",
    )
    parser.add_argument(
        "--timeout", type=float, default=120.0, help="Seconds to wait for the coordinator."
    )
    given = parser.parse_args()
    collect_seldom()
    try:
        where = parse_rendezvous(given.rendezvous)
        # Before connecting, since both take seconds and a coordinator waits ten for the facts.
        importlib.import_module("torch.distributed")
        facts = node_facts(given.node, given.name)
        line = reach_coordinator(where, given.timeout)
        address = addresses_of(given.interface)[0] if given.interface else line.address
        interface = given.interface or interface_of(address)
        link = {"interface": interface, "link_bits_per_second": link_speed(interface)}
        line.send("hello", {**facts, "address": address, **link})
        Agent(line, address, interface).serve()
    except UsageError as mistake:
        print(f"agent: {mistake}", file=sys.stderr)
        sys.exit(2)
    except (KeyboardInterrupt, OSError, EOFError) as error:
        # Flushed, as `_exit` does not.
        print(f"agent: stopped: {first_line(error)}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


_SYS = Path("/sys")


def link_speed(interface: str | None, sys: Path = _SYS) -> int | None:
    """Returns an interface's nominal bits per second; None if unknown (loopback, virtual links)."""
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
"""Start and end of the measured part of a stream, in seconds: after a shaped link's burst and TCP's
slow start."""
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
    """Measures the median round trip of empty messages, and the best rate of large messages less
    that round trip."""

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
