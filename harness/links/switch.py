"""python -m harness.links.switch: a network namespace with a bridge, and the nodes' agents as
children, each with a namespace and host name.

The kernel cleans up, since namespaces are unnamed and processes die with their parent. Answers each
line of JSON on standard input.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from harness.cell.cell import Link
from harness.host.process import (
    NEW_HOST_NAME,
    NEW_NETWORK,
    die_with_parent,
    own_hosts,
    own_network,
    unshare,
)

INTERFACE = "link0"
"""Interface of each node. The machine must not use the name, because the nodes see its /sys."""
TOOLS = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux"}
"""Required commands and their Debian packages."""
LOG, HOSTS = "agents.log", "hosts"
_QUEUE = "50ms"
"""Maximum time that a packet waits at a limited rate before it is dropped."""


class NodeShare(TypedDict):
    cores: list[int]
    gpus: str | None
    """Value of CUDA_VISIBLE_DEVICES. None leaves it as in this process."""


class Request(TypedDict, total=False):
    """Agents to start (`nodes`), which wait for `rendezvous_file`, or the link to set, written as
    in a cell. An empty request checks whether links are permitted."""

    nodes: list[NodeShare]
    rendezvous_file: str
    link: str


def run(command: Sequence[str], lines: Sequence[str] = (), inside: int | None = None) -> None:
    """Runs a command with `lines` as input; raises RuntimeError with its first error line.
    `inside`: process whose network namespace to use."""
    enter = ["nsenter", f"--target={inside}", "--net"] if inside else []
    done = subprocess.run(
        [*enter, *command], input="\n".join(lines), capture_output=True, text=True
    )
    if done.returncode:
        errors = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise RuntimeError(f"{' '.join([*command, *lines[:1]])}: {errors[0]}")


def ip(*lines: str, inside: int | None = None) -> None:
    run(["ip", "-batch", "-"], lines, inside)


def burst_bytes(bits_per_second: float) -> int:
    """Returns the `burst` of tc-tbf(8): 64 KiB up to 100 Mbit/s, twice as much per tenfold rate,
    since less would limit the rate."""
    return int(2**16 * max(1.0, 2 ** math.log10(bits_per_second / 1e8)))


class Switch:
    """The bridge and the links' rates and delays."""

    def __init__(self, nodes: Sequence[int]) -> None:
        """`nodes`: a process id in each node's namespace."""
        self.nodes = list(nodes)
        self.ports = [f"p{number}" for number in range(len(nodes))]
        self.relay: subprocess.Popen[str] | None = None
        self.shaped: set[tuple[str, int | None]] = set()
        ip("link set lo up", "link add br0 type bridge", "link set br0 up")
        for number, (port, node) in enumerate(zip(self.ports, self.nodes, strict=True)):
            ip(
                f"link add {port} type veth peer name {INTERFACE} netns {node}",
                f"link set {port} master br0 up",
            )
            ip(
                "link set lo up",
                f"addr add {address(number)}/24 dev {INTERFACE}",
                f"link set {INTERFACE} up",
                inside=node,
            )

    @functools.cached_property
    def netem(self) -> bool:
        """Returns whether the kernel can delay packets (module sch_netem)."""
        try:
            run(["tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"])
        except RuntimeError:
            return False
        run(["tc", "qdisc", "del", "dev", "lo", "root"])
        return True

    def shape(self, link: Link) -> str:
        """Sets rate and delay at both ends of every link; returns the method as text."""
        delay = f"{link.delay_seconds * 1e6:.0f}us" if link.delay_seconds else ""
        for port, node in zip(self.ports, self.nodes, strict=True):
            self._device(INTERFACE, node, link.bits_per_second)
            self._device(port, None, link.bits_per_second, delay if self.netem else "")
        self._relay(link.delay_seconds if not self.netem else 0.0)
        means = ["network namespaces"] + ["tbf"] * bool(link.bits_per_second)
        return ", ".join(means + ["netem" if self.netem else "user-space relay"] * bool(delay))

    def _device(self, name: str, inside: int | None, rate: float | None, delay: str = "") -> None:
        """Shapes outgoing packets to `rate` bits per second, with tbf as netem's child
        (tc-netem(8))."""
        if (name, inside) in self.shaped:
            run(["tc", "qdisc", "del", "dev", name, "root"], inside=inside)
            self.shaped.remove((name, inside))
        parent = ["root"]
        if delay:
            netem = f"tc qdisc add dev {name} root handle 1: netem delay {delay} limit 100000"
            run(netem.split(), inside=inside)
            self.shaped.add((name, inside))
            parent = ["parent", "1:1"]
        if rate:
            limits = ["rate", f"{rate:.0f}bit", "burst", str(burst_bytes(rate)), "latency", _QUEUE]
            run(["tc", "qdisc", "add", "dev", name, *parent, "tbf", *limits], inside=inside)
            self.shaped.add((name, inside))

    def _relay(self, seconds: float) -> None:
        """Connects the ports by a delaying relay, or by the bridge for 0 seconds."""
        if self.relay:
            self.relay.kill()
            self.relay.wait()
            self.relay = None
            ip(*(f"link set {port} master br0" for port in self.ports))
        if seconds:
            ip(*(f"link set {port} nomaster" for port in self.ports))
            command = [sys.executable, "-m", "harness.links.relay", str(seconds), *self.ports]
            self.relay = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                text=True,
                preexec_fn=die_with_parent,
            )
            assert self.relay.stdout
            if self.relay.stdout.readline() != "up\n":
                raise RuntimeError("the relay that delays packets did not start")


def address(number: int) -> str:
    return f"10.97.0.{number + 1}"


def start_node(
    number: int, cores: Sequence[int], gpus: str | None, rendezvous_file: str
) -> subprocess.Popen[bytes]:
    """Starts a node's agent, which logs next to `rendezvous_file`; its namespaces exist on
    return."""

    def enter_namespaces() -> None:
        die_with_parent()
        unshare(NEW_NETWORK | NEW_HOST_NAME)
        socket.sethostname(f"node{number}")
        own_hosts(Path(rendezvous_file).with_name(HOSTS))
        os.sched_setaffinity(0, cores)

    identity = ["--node", str(number), "--name", f"node{number}", "--interface", INTERFACE]
    options = [rendezvous_file, *identity]
    with open(Path(rendezvous_file).with_name(LOG), "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "harness.agent", *options],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **({} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus})},
            preexec_fn=enter_namespaces,
        )


def serve(request: Request, switch: Switch | None) -> tuple[Switch, str]:
    if "nodes" in request:
        names = [
            "127.0.0.1 localhost",
            *(f"{address(number)} node{number}" for number in range(len(request["nodes"]))),
        ]
        Path(request["rendezvous_file"]).with_name(HOSTS).write_text("\n".join(names) + "\n")
        started = [
            start_node(number, node["cores"], node["gpus"], request["rendezvous_file"])
            for number, node in enumerate(request["nodes"])
        ]
        return Switch([process.pid for process in started]), ""
    if switch is None or "link" not in request:
        switch = Switch([])
        ip("link add p0 type veth peer name p1", "link set p0 master br0 up")
        run(f"tc qdisc add dev p0 root tbf rate 1gbit burst 131072 latency {_QUEUE}".split())
        return switch, ""
    return switch, switch.shape(Link.of(request["link"]))


def main() -> None:
    switch: Switch | None = None
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        try:
            own_network()
        except OSError as error:
            reason = "the system does not let this user make network namespaces"
            print(json.dumps({"error": f"{reason} ({error.strerror})"}), flush=True)
            return
        for line in sys.stdin:
            try:
                switch, answer = serve(json.loads(line), switch)
                print(json.dumps({"answer": answer}), flush=True)
            except (OSError, RuntimeError, ValueError) as error:
                print(json.dumps({"error": str(error)}), flush=True)


if __name__ == "__main__":
    main()
