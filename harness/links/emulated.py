"""Emulated nodes from the head's side: whether this host can have them, their start and end, and
their links."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness.host.cores import allowed_cores
from harness.host.environment import gpus
from harness.host.process import die_with_parent
from harness.links.switch import LOG, TOOLS
from harness.nodes.coordinator import Nodes
from harness.nodes.node import Node

START_SECONDS = 60.0
MEASUREMENTS = 2
"""Of which the best counts: what else keeps the machine busy makes a link slower, never faster."""


class NoLinks(Exception):
    """The links cannot be had: a sentence that says why, and what to do."""


class _Process:
    """The switch's process and what is said to it."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "harness.links.switch"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a stop from the keyboard is the head's to hear
            preexec_fn=die_with_parent,
        )

    def ask(self, **what: Any) -> str:
        """Its answer; raises NoLinks."""
        assert self.process.stdin
        assert self.process.stdout
        try:
            self.process.stdin.write(json.dumps(what) + "\n")
            self.process.stdin.flush()
        except OSError:
            pass  # what it said before it went is still to be read
        line = self.process.stdout.readline()
        told = json.loads(line) if line.endswith("\n") else {"error": "its process is gone"}
        if "error" in told:
            raise NoLinks(f"emulated links: {told['error']}")
        return str(told["answer"])

    def end(self) -> None:
        """Kills it; all below it die with it."""
        self.process.kill()
        self.process.communicate()


@functools.cache
def lacking() -> str:
    """Why this host cannot have emulated links, and what to do; empty where it can.

    Tries it once.
    """
    if sys.platform != "linux":
        return "emulated links are network namespaces, which only Linux has"
    if missing := {tool: package for tool, package in TOOLS.items() if not shutil.which(tool)}:
        return (
            f"emulated links need {', '.join(missing)}: apt-get install"
            f" {' '.join(sorted(set(missing.values())))}"
        )
    process = _Process()
    try:
        process.ask()
    except NoLinks as why:
        return (
            f"{why}; run as root, or allow user namespaces (sysctl user.max_user_namespaces,"
            " kernel.unprivileged_userns_clone)"
        )
    finally:
        process.end()
    return ""


class EmulatedNodes:
    """Nodes that are namespaces of this machine, started when they are first needed."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._switch: _Process | None = None
        self._nodes: Nodes | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._link = ""
        self._measured: dict[str, dict[str, Any]] = {}

    @property
    def pid(self) -> int | None:
        """Of the process above them all."""
        return self._switch.process.pid if self._switch else None

    def ready(self) -> Nodes:
        """The nodes, all of them there: started anew where one was lost; raises NoLinks where they
        do not come."""
        if self._nodes and len(self._nodes.ready(self.count, 0.0)) == self.count:
            return self._nodes
        self.close()
        self._folder = tempfile.TemporaryDirectory(prefix="parallelism-bench-")
        meeting = Path(self._folder.name) / "meeting"
        self._switch = _Process()
        self._switch.ask(
            nodes=[{"cores": c, "gpus": g} for c, g in shares(self.count)], meeting=str(meeting)
        )
        self._nodes = nodes = Nodes(
            self.count, meeting, socket_file=meeting.with_name("head")
        )  # only now: a node's link is up
        if len(nodes.ready(self.count, START_SECONDS)) < self.count:
            said = meeting.with_name(LOG).read_text("utf-8", "replace").strip().splitlines()
            raise NoLinks(
                f"emulated links: {nodes.lacking(self.count)}"
                + (f"; the agents' log ends: {said[-1]}" if said else "")
            )
        return nodes

    def use(self, link: str) -> dict[str, Any]:
        """Makes the nodes' links such; returns the record's columns about them.

        A link is measured when it is first used.
        """
        nodes = self.ready()
        assert self._switch
        if link != self._link:
            self._link = ""
            how = self._switch.ask(link=link)
            if link not in self._measured:
                first, second = nodes.ready(2, 0.0)
                found = [measured(first, second) for _ in range(MEASUREMENTS)]
                self._measured[link] = {
                    "link_bits_per_second": max(rate for rate, _ in found),
                    "link_latency_seconds": min(latency for _, latency in found),
                    "link_emulation": how,
                }
            self._link = link
        return self._measured[link]

    def forget(self) -> None:
        """The next use measures again."""
        self._measured.clear()
        self._link = ""

    def close(self) -> None:
        """Everything goes."""
        if self._nodes:
            self._nodes.close()
        if self._switch:
            self._switch.end()
        if self._folder:
            self._folder.cleanup()
        self._nodes = self._switch = self._folder = None
        self._link = ""


def measured(first: Node, second: Node) -> tuple[float, float]:
    """Bits per second and one-way latency between two nodes (see harness/nodes/probe.py); raises
    NoLinks where an agent goes."""
    try:
        first.line.send("listen")
        _, port = first.line.receive()
        second.line.send("measure", (first.facts["address"], port))
        _, latency = second.line.receive()
        _, rate = first.line.receive()
    except (EOFError, OSError):
        raise NoLinks("emulated links: an agent went while its link was measured") from None
    if not (latency and rate):
        raise NoLinks(f"emulated links: {second.name} does not reach {first.name}")
    return rate, latency


def shares(count: int) -> list[tuple[list[int], str | None]]:
    """Cores of each node, its own while there are enough, and its GPUs as CUDA_VISIBLE_DEVICES has
    them; None: there are none."""
    cores, cards = allowed_cores(), _cards()
    each = max(1, len(cores) // count)
    found = []
    for number in range(count):
        own = sorted({cores[(number * each + i) % len(cores)] for i in range(each)})
        here = len(cards) // count
        found.append((own, ",".join(cards[number * here : (number + 1) * here]) if cards else None))
    return found


def _cards() -> list[str]:
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(number) for number in range(len(gpus()))]
