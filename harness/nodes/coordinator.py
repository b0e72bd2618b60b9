from __future__ import annotations

import contextlib
import dataclasses
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING

from harness.cell.cell import Cell
from harness.cell.errors import UsageError
from harness.host.process import machine_id
from harness.launch.launcher import Launcher, TrialOptions
from harness.launch.outcome import Outcome
from harness.nodes.agent import Node, measured_link
from harness.nodes.multi_node_trial import Trial
from harness.nodes.protocol import secure
from harness.nodes.rendezvous import Rendezvous, addresses_of, addresses_of_host, new_key
from harness.worker.spec import TrialSpec
from harness.workloads import DataSource

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Nodes:
    """The agents of a run. Agents that were lost may rejoin under their number."""

    max_unauthenticated = 64
    """Maximum number of unauthenticated connections at once; agents that are refused try again."""

    def __init__(
        self,
        count: int,
        where: Path | Rendezvous,
        interface: str | None = None,
        socket_file: Path | None = None,
    ) -> None:
        """Listens on one address, and writes it and a new key to the file `where` if it is a path.
        `interface`: network interface that reaches all nodes; by default that of the host name or
        of the default route. `socket_file`: Unix socket that bypasses emulated links."""
        self.count = count
        self.rendezvous_file = where if isinstance(where, Path) else None
        self.connected: dict[int, Node] = {}
        self._packages: list[str] | None = None
        self._lost: dict[int, str] = {}
        self._replaced: list[Node] = []
        """Superseded nodes, closed once no trial can be waiting for them."""
        self._waited = False
        self._change = threading.Condition()
        self._unauthenticated = threading.BoundedSemaphore(self.max_unauthenticated)
        if socket_file:
            addresses, port = [str(socket_file)], 0
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(addresses[0])
            self._listener.listen()
        else:
            given = where if isinstance(where, Rendezvous) else None
            if given and given.addresses:
                addresses = addresses_of_host(given.addresses[0], interface)[:1]
            else:
                addresses = addresses_of(interface)[:1]
            port = given.port if given else 0
            try:
                self._listener = socket.create_server((addresses[0], port))
            except OSError as error:
                raise UsageError(
                    f"cannot listen on {addresses[0]}:{port}: {error.strerror or error}"
                ) from None
            port = self._listener.getsockname()[1]
        if isinstance(where, Rendezvous):
            rendezvous = where
        else:
            rendezvous = Rendezvous(machine_id(), tuple(addresses), port, new_key())
            rendezvous.write(where)
        threading.Thread(target=self._accept, args=(rendezvous.secret,), daemon=True).start()

    def _accept(self, secret: bytes) -> None:
        while True:
            try:
                raw, _ = self._listener.accept()
            except OSError:
                return  # closed
            if not self._unauthenticated.acquire(blocking=False):
                raw.close()
                continue
            threading.Thread(target=self._handshake, args=(raw, secret), daemon=True).start()

    def _handshake(self, raw: socket.socket, secret: bytes) -> None:
        try:
            line = secure(raw, secret, coordinator=True)
            word, facts = line.receive()
        except (OSError, EOFError):
            raw.close()
            return  # not one of our agents
        finally:
            self._unauthenticated.release()
        if word != "hello":
            line.close()
            return
        node = Node(line, facts)
        with self._change:
            self._lost.pop(node.number, None)
            if before := self.connected.get(node.number):
                before.line.shut_down()
                self._replaced.append(before)
                if before.name != node.name:
                    self._lost[node.number] = (
                        f"{before.name} and {node.name} both joined as node {node.number}; number"
                        " the agents differently"
                    )
            self.connected[node.number] = node
            self._waited = False
            if self._packages is not None:
                with contextlib.suppress(OSError):
                    line.send("warm", self._packages)
            self._change.notify_all()

    def warm(self, packages: Sequence[str]) -> None:
        """Makes every agent, including agents that join later, import these packages."""
        with self._change:
            if self._packages is None:
                self._packages = list(packages)
                for node in self.connected.values():
                    with contextlib.suppress(OSError):
                        node.line.send("warm", self._packages)

    def ready(self, count: int, seconds: float) -> list[Node]:
        """Waits for `count` nodes. Returns fewer if some do not come. After a failed wait, it waits
        only 1 s."""
        deadline = time.monotonic() + (1.0 if self._waited else seconds)
        with self._change:
            while True:
                self._drop_gone()
                if len(self.connected) >= count:
                    return [self.connected[number] for number in sorted(self.connected)][:count]
                left = deadline - time.monotonic()
                if left <= 0:
                    self._waited = True
                    return [self.connected[number] for number in sorted(self.connected)]
                self._change.wait(left)

    def _drop_gone(self) -> None:
        while self._replaced:
            self._replaced.pop().line.close()
        lines = {node.line.connection: node for node in self.connected.values()}
        for connection in wait(list(lines), 0):
            node = lines[connection]  # type: ignore[index]
            self.lose(node, "its agent exited between two trials")

    def lose(self, node: Node, why: str) -> None:
        with self._change:
            node.line.close()
            if self.connected.get(node.number) is node:
                del self.connected[node.number]
                self._lost[node.number] = f"{node.name}: {why}"

    def shortfall(self, count: int) -> str:
        lost = "; ".join(self._lost.values()) or "the agents of the other nodes did not connect"
        return (
            f"needs {count} nodes, {len(self.connected)} of {self.count}"
            f" {'is' if len(self.connected) == 1 else 'are'} there ({lost})"
        )

    def check(self) -> None:
        """Raises UsageError if nodes cannot reach each other."""
        nodes = [self.connected[number] for number in sorted(self.connected)]
        loopback = [node.name for node in nodes if node.facts["address"].startswith("127.")]
        machines = {node.facts["machine"] for node in nodes}
        if loopback and len(machines) > 1:
            raise UsageError(
                f"node {loopback[0]} reaches the coordinator over loopback, others do not; name the"
                " network interface of the nodes"
            )

    def measure(self) -> None:
        """Adds the coordinator's TCP link to each node's facts."""
        for node in list(self.connected.values()):
            try:
                node.facts |= measured_link(node.line)
            except (EOFError, OSError):
                self.lose(node, "its agent is gone")

    def close(self) -> None:
        for how in (self._listener.shutdown, None):
            with contextlib.suppress(OSError):
                how(socket.SHUT_RDWR) if how else self._listener.close()
        with self._change:
            for node in self.connected.values():
                with contextlib.suppress(OSError):
                    node.line.send("quit")
                node.line.close()
            self.connected.clear()
            while self._replaced:
                self._replaced.pop().line.close()
        if self.rendezvous_file:
            self.rendezvous_file.unlink(missing_ok=True)


class NodesLauncher:
    """Runs single-node cells as usual, and cells of several nodes over the agents."""

    wait_seconds = 30.0
    """Seconds a trial waits for nodes, which may be restarting."""

    def __init__(
        self,
        nodes: Nodes,
        packages: Sequence[str],
        local: Callable[[Sequence[str]], Launcher] = Launcher,
    ) -> None:
        self.nodes, self.packages, self._make = nodes, list(packages), local
        self._local: Launcher | None = None
        nodes.warm(packages)

    @property
    def local(self) -> Launcher:
        if self._local is None:
            self._local = self._make(self.packages)
        return self._local

    def ignore_pid(self, pid: int) -> None:
        self.local.ignore_pid(pid)

    def run(
        self,
        cell: Cell,
        data: DataSource,
        processes: int,
        *,
        command: Callable[[Path], list[str] | None] = lambda scratch: None,
        on_progress: Callable[[int, float], None] | None = None,
        **more: Unpack[TrialOptions],
    ) -> Outcome:
        """Returns the outcome `unavailable` if nodes are missing."""
        if cell.nodes == 1:
            return self.local.run(
                cell, data, processes, command=command, on_progress=on_progress, **more
            )
        try:
            nodes = self.nodes.ready(cell.nodes, self.wait_seconds)
        except KeyboardInterrupt:
            return Outcome("interrupted", "stopped by the user", time.time(), 0.0)
        if len(nodes) < cell.nodes:
            return Outcome("unavailable", self.nodes.shortfall(cell.nodes), time.time(), 0.0)
        spec = TrialSpec(cell, data, processes, token=secrets.token_hex(8), **more)
        specs = [
            dataclasses.replace(spec, node=index, node_name=node.name)
            for index, node in enumerate(nodes)
        ]
        return Trial(self.nodes.lose, nodes, specs, on_progress).run()
