"""python -m harness.links.switch: a process in a network namespace of its own, a bridge in it, and
the nodes' agents as its children.

Each agent is in a network namespace of its own too, with its own host name. None of them has a name
in the system, and each process dies with its parent: when they are gone, however they went, the
kernel removes namespaces, interfaces and shaping. Told what to do by lines of JSON on its standard
input, answers each with a line; its end is the end of that input.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import math
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.host.process import die_with_parent
from harness.spec.link import Link

INTERFACE = "link0"
"""Of each node; a name that no machine has, because /sys goes on showing the machine's own
interfaces."""
TOOLS = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux"}
LOG, HOSTS = "agents.log", "hosts"
_NEW_MOUNTS, _NEW_HOST_NAME, _NEW_USER, _NEW_NETWORK = (
    0x00020000,
    0x04000000,
    0x10000000,
    0x40000000,
)  # linux/sched.h
_BIND, _RECURSIVE, _PRIVATE = 0x1000, 0x4000, 0x40000  # linux/mount.h
_QUEUE = "50ms"


_LIBC = ctypes.CDLL(None, use_errno=True)


def _checked(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def unshare(flags: int) -> None:
    """This process, which must have one thread, gets namespaces of its own; raises OSError where it
    may not."""
    _checked(_LIBC.unshare(flags))


def own_hosts(file: Path) -> None:
    """This file stands in place of /etc/hosts, for this process and those below: libraries look
    their own host's name up."""
    unshare(_NEW_MOUNTS)
    _checked(_LIBC.mount(b"none", b"/", None, _RECURSIVE | _PRIVATE, None))
    _checked(_LIBC.mount(os.fsencode(file), b"/etc/hosts", None, _BIND, None))


def own_network() -> None:
    """A network namespace of its own; who has no right to one gets it in a user namespace, as root
    of nothing else."""
    user, group = os.getuid(), os.getgid()
    try:
        unshare(_NEW_NETWORK)
    except PermissionError:
        unshare(_NEW_USER | _NEW_NETWORK)
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"0 {user} 1"),
            ("gid_map", f"0 {group} 1"),
        ):
            Path(f"/proc/self/{name}").write_text(text)
    die_with_parent()  # another user's identity may have made the kernel forget it


def run(command: Sequence[str], lines: Sequence[str] = (), inside: int | None = None) -> None:
    """A tool with these lines as its input, in the network namespace of a process; raises
    RuntimeError with what it said."""
    enter = ["nsenter", f"--target={inside}", "--net"] if inside else []
    done = subprocess.run(
        [*enter, *command], input="\n".join(lines), capture_output=True, text=True
    )
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise RuntimeError(f"{' '.join([*command, *lines[:1]])}: {said[0]}")


def ip(*lines: str, inside: int | None = None) -> None:
    run(["ip", "-batch", "-"], lines, inside)


def burst_bytes(bits_per_second: float) -> int:
    """What may pass at once: 64 KiB at 100 Mbit/s, twice that for ten times the rate.

    Less makes the kernel's timer the limit.
    """
    return int(2**16 * max(1.0, 2 ** math.log10(bits_per_second / 1e8)))


class Switch:
    """The bridge, a port for each node, and what shapes them."""

    def __init__(self, nodes: Sequence[int]) -> None:
        """`nodes`: a process in each node's namespace."""
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
        """Whether the kernel can delay."""
        try:
            run(["tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"])
        except RuntimeError:
            return False
        run(["tc", "qdisc", "del", "dev", "lo", "root"])
        return True

    def shape(self, link: Link) -> str:
        """Every node's link from now on, at both of its ends; returns how it is done."""
        delay = f"{link.delay_seconds * 1e6:.0f}us" if link.delay_seconds else ""
        for port, node in zip(self.ports, self.nodes, strict=True):
            self._device(INTERFACE, node, link.bits_per_second)
            self._device(port, None, link.bits_per_second, delay if self.netem else "")
        self._relay(link.delay_seconds if not self.netem else 0.0)
        how = ["network namespaces"] + ["tbf"] * bool(link.bits_per_second)
        return ", ".join(how + ["netem" if self.netem else "user-space relay"] * bool(delay))

    def _device(self, name: str, inside: int | None, rate: float | None, delay: str = "") -> None:
        """What leaves an interface: at most so fast, and so much later (netem outside, tbf inside
        it, as tc-netem(8) has it)."""
        if (name, inside) in self.shaped:
            run(["tc", "qdisc", "del", "dev", name, "root"], inside=inside)
            self.shaped.remove((name, inside))
        place = ["root"]
        if delay:
            run(
                [
                    "tc",
                    "qdisc",
                    "add",
                    "dev",
                    name,
                    "root",
                    "handle",
                    "1:",
                    "netem",
                    "delay",
                    delay,
                    "limit",
                    "100000",
                ],
                inside=inside,
            )
            self.shaped.add((name, inside))
            place = ["parent", "1:1"]
        if rate:
            limits = ["rate", f"{rate:.0f}bit", "burst", str(burst_bytes(rate)), "latency", _QUEUE]
            run(["tc", "qdisc", "add", "dev", name, *place, "tbf", *limits], inside=inside)
            self.shaped.add((name, inside))

    def _relay(self, seconds: float) -> None:
        """Between the ports: the bridge, or a process that delays."""
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
    number: int, cores: Sequence[int], gpus: str | None, meeting: str
) -> subprocess.Popen[bytes]:
    """The agent of a node, in its own namespaces when this returns; it waits for the file
    `meeting`, and has its log beside it."""

    def before() -> None:
        die_with_parent()
        unshare(_NEW_NETWORK | _NEW_HOST_NAME)
        socket.sethostname(f"node{number}")
        own_hosts(Path(meeting).with_name(HOSTS))
        os.sched_setaffinity(0, cores)

    words = [meeting, "--node", str(number), "--name", f"node{number}", "--interface", INTERFACE]
    with open(Path(meeting).with_name(LOG), "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "harness.agent", *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **({} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus})},
            preexec_fn=before,
        )


def obey(told: dict[str, Any], switch: Switch | None) -> tuple[Switch | None, str]:
    """Does what one line says; returns the switch and the answer."""
    if "nodes" in told:
        names = [
            "127.0.0.1 localhost",
            *(f"{address(number)} node{number}" for number in range(len(told["nodes"]))),
        ]
        Path(told["meeting"]).with_name(HOSTS).write_text("\n".join(names) + "\n")
        started = [
            start_node(number, node["cores"], node["gpus"], told["meeting"])
            for number, node in enumerate(told["nodes"])
        ]
        return Switch([process.pid for process in started]), ""
    if switch is None:  # asked whether all this may be done here
        switch = Switch([])
        ip("link add p0 type veth peer name p1", "link set p0 master br0 up")
        run(
            [
                "tc",
                "qdisc",
                "add",
                "dev",
                "p0",
                "root",
                "tbf",
                "rate",
                "1gbit",
                "burst",
                "131072",
                "latency",
                _QUEUE,
            ]
        )
        return switch, ""
    return switch, switch.shape(Link.of(told["link"]))


def main() -> None:
    switch: Switch | None = None
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        try:
            own_network()
        except OSError as error:
            print(
                json.dumps(
                    {
                        "error": (
                            "the system does not let this user make network namespaces"
                            f" ({error.strerror})"
                        )
                    }
                ),
                flush=True,
            )
            return
        for line in sys.stdin:
            try:
                switch, answer = obey(json.loads(line), switch)
                print(json.dumps({"answer": answer}), flush=True)
            except (OSError, RuntimeError, ValueError) as error:
                print(json.dumps({"error": str(error)}), flush=True)


if __name__ == "__main__":
    main()
