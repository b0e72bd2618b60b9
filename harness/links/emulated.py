from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from harness.cell.cell import Cell
from harness.host.cores import allowed_cores
from harness.host.environment import gpus
from harness.host.folders import remove_abandoned, scratch_folder
from harness.host.process import die_with_parent
from harness.launch.launcher import LauncherProtocol, LaunchOptions
from harness.launch.outcome import Outcome
from harness.links.switch import LOG, TOOLS, NodeShare, Request
from harness.nodes.agent import Node
from harness.nodes.coordinator import Nodes, NodesLauncher
from harness.workloads import DataSource

if TYPE_CHECKING:
    from typing_extensions import Unpack


START_SECONDS = 120.0
MEASUREMENTS = 2
"""Number of measurements per link; the best one counts, since other work only slows a link."""


class NoLinks(Exception):
    """Links cannot be emulated here; the message has the reason and a remedy."""


class _Process:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "harness.links.switch"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # Keep Ctrl-C from the switch; this process ends it.
            start_new_session=True,
            preexec_fn=die_with_parent,
        )

    def ask(self, request: Request) -> str:
        assert self.process.stdin
        assert self.process.stdout
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except OSError:
            pass  # the process has ended, and may have written the reason before
        line = self.process.stdout.readline()
        answer = json.loads(line) if line.endswith("\n") else {"error": "its process is gone"}
        if "error" in answer:
            raise NoLinks(f"emulated links: {answer['error']}")
        return str(answer["answer"])

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@functools.cache
def unsupported_reason() -> str:
    """Returns why links cannot be emulated, with a remedy; empty if they can. Tries it only
    once."""
    if sys.platform != "linux":
        return "emulated links are network namespaces, which only Linux has"
    if missing := {tool: package for tool, package in TOOLS.items() if not shutil.which(tool)}:
        return (
            f"emulated links need {', '.join(missing)}: apt-get install"
            f" {' '.join(sorted(set(missing.values())))}"
        )
    process = _Process()
    try:
        process.ask({})
    except NoLinks as error:
        return (
            f"{error}; run as root, or allow user namespaces (sysctl user.max_user_namespaces,"
            " kernel.unprivileged_userns_clone)"
        )
    finally:
        process.end()
    return ""


class EmulatedNodes:
    """Network namespaces as nodes, started on first use."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._switch: _Process | None = None
        self._nodes: Nodes | None = None
        self._files: contextlib.ExitStack | None = None
        self._link = ""
        self._columns: dict[str, dict[str, object]] = {}

    @property
    def pid(self) -> int | None:
        """Returns the id of the switch's process, the parent of all node processes, once
        started."""
        return self._switch.process.pid if self._switch else None

    def ready(self) -> Nodes:
        """Returns connected nodes, restarted if a node was lost. Raises NoLinks after
        START_SECONDS."""
        if self._nodes and len(self._nodes.ready(self.count, 0.0)) == self.count:
            return self._nodes
        self.close()
        remove_abandoned()
        self._files = contextlib.ExitStack()
        rendezvous_file = self._files.enter_context(scratch_folder()) / "rendezvous"
        self._switch = _Process()
        parts: list[NodeShare] = [
            {"cores": cores, "gpus": gpus} for cores, gpus in shares(self.count)
        ]
        self._switch.ask({"nodes": parts, "rendezvous_file": str(rendezvous_file)})
        # Listen only now: the nodes' interfaces are up.
        self._nodes = nodes = Nodes(
            self.count, rendezvous_file, socket_file=rendezvous_file.with_name("socket")
        )
        if len(nodes.ready(self.count, START_SECONDS)) < self.count:
            log = rendezvous_file.with_name(LOG).read_text("utf-8", "replace").strip().splitlines()
            raise NoLinks(
                f"emulated links: {nodes.shortfall(self.count)}"
                + (f"; the agents' log ends: {log[-1]}" if log else "")
            )
        return nodes

    def use(self, link: str) -> dict[str, object]:
        """Sets rate and delay; returns the record columns, measured on first use. Raises
        NoLinks."""
        nodes = self.ready()
        assert self._switch
        if link != self._link:
            self._link = ""
            emulation = self._switch.ask({"link": link})
            if link not in self._columns:
                first, second = nodes.ready(2, 0.0)
                measurements = [measured(first, second) for _ in range(MEASUREMENTS)]
                self._columns[link] = {
                    "link_bits_per_second": max(rate for rate, _ in measurements),
                    "link_latency_seconds": min(latency for _, latency in measurements),
                    "link_emulation": emulation,
                }
            self._link = link
        return self._columns[link]

    def close(self) -> None:
        if self._nodes:
            self._nodes.close()
        if self._switch:
            self._switch.end()
        if self._files:
            self._files.close()
        self._nodes = self._switch = self._files = None
        self._link = ""


def measured(first: Node, second: Node) -> tuple[float, float]:
    """Returns bits per second and one-way latency in seconds. Raises NoLinks if nodes cannot
    connect, or an agent ends."""
    try:
        first.line.send("listen")
        _, port = first.line.receive()
        second.line.send("measure", (first.facts["address"], port))
        _, latency = second.line.receive()
        _, rate = first.line.receive()
    except (EOFError, OSError):
        raise NoLinks("emulated links: an agent exited while its link was being measured") from None
    if not (latency and rate):
        raise NoLinks(f"emulated links: {second.name} does not reach {first.name}")
    return rate, latency


def shares(count: int) -> list[tuple[list[int], str | None]]:
    """Returns each node's cores, shared if too few, and CUDA_VISIBLE_DEVICES (None without
    GPUs)."""
    cores, cards = allowed_cores(), _cards()
    cores_each, cards_each = max(1, len(cores) // count), len(cards) // count
    parts: list[tuple[list[int], str | None]] = []
    for node in range(count):
        share = {cores[(node * cores_each + i) % len(cores)] for i in range(cores_each)}
        gpus_here = ",".join(cards[node * cards_each : (node + 1) * cards_each])
        parts.append((sorted(share), gpus_here if cards else None))
    return parts


def _cards() -> list[str]:
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    return names.split(",") if names else [str(number) for number in range(len(gpus()))]


MakesLauncher = Callable[[Sequence[str]], LauncherProtocol]


class LinksLauncher:
    def __init__(
        self, emulated: EmulatedNodes, inner: MakesLauncher, packages: Sequence[str]
    ) -> None:
        self.emulated, self.packages = emulated, list(packages)
        self.inner = inner(packages)

    def ignore_pid(self, pid: int) -> None:
        self.inner.ignore_pid(pid)

    def run(
        self,
        cell: Cell,
        data: DataSource,
        processes: int,
        *,
        on_progress: Callable[[int, float], None] | None = None,
        **more: Unpack[LaunchOptions],
    ) -> Outcome:
        """Returns outcome `unavailable` if the cell's links cannot be emulated."""
        if not cell.links:
            return self.inner.run(cell, data, processes, on_progress=on_progress, **more)
        try:
            # Measure before the agents import packages, which keeps cores busy.
            columns = self.emulated.use(cell.links)
            over = NodesLauncher(self.emulated.ready(), self.packages)
        except KeyboardInterrupt:
            self.emulated.close()  # an answer may have been read in part
            return Outcome("interrupted", "stopped by the user", time.time(), 0.0)
        except NoLinks as error:
            self.emulated.close()
            return Outcome("unavailable", str(error), time.time(), 0.0)
        finally:
            if self.emulated.pid:
                self.ignore_pid(self.emulated.pid)
        outcome = over.run(cell, data, processes, on_progress=on_progress, **more)
        return replace(outcome, link=columns)


@contextlib.contextmanager
def over_links(cells: Sequence[Cell], launcher: MakesLauncher) -> Iterator[MakesLauncher]:
    """Yields the launcher factory, with emulated nodes if a cell needs them."""
    count = max((cell.nodes for cell in cells if cell.links), default=0)
    if not count:
        yield launcher
        return
    emulated = EmulatedNodes(count)
    try:
        yield functools.partial(LinksLauncher, emulated, launcher)
    finally:
        emulated.close()
