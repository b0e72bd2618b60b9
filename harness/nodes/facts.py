"""A node's facts: hardware, address, place in the network."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from harness.host.cores import allowed_cores
from harness.host.environment import cpu_model, gpus, numa_nodes
from harness.host.gpu_facts import gpu_topology
from harness.host.memory import memory_bytes
from harness.nodes.rendezvous import machine_id

_SYS = Path("/sys")


def link_speed(interface: str | None, sys: Path = _SYS) -> int | None:
    """Returns the nominal bits per second; None if unknown (loopback, virtual links)."""
    try:
        megabits = int((sys / "class/net" / str(interface) / "speed").read_text())
    except (OSError, ValueError):
        return None
    return megabits * 10**6 if megabits > 0 else None


def node_facts(number: int, name: str, interface: str | None, address: str) -> dict[str, object]:
    """Returns the facts recorded with a node's trials."""
    return {
        "number": number,
        "name": name,
        "host": platform.node(),
        "machine": machine_id(),
        "address": address,
        "interface": interface,
        "link_bits_per_second": link_speed(interface),
        "switches": os.environ.get("SLURM_TOPOLOGY_ADDR"),
        "cpu_model": cpu_model(),
        "cores": allowed_cores(),
        "numa": numa_nodes(),
        "memory_bytes": memory_bytes(),
        "gpus": [name for name, _ in gpus()],
        "gpu_topology": gpu_topology(),
    }
