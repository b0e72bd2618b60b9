"""Summaries of the recorded facts of a cell's nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def distinct_cores(nodes: Sequence[Mapping[str, Any]]) -> int:
    """Returns the cores of all nodes; nodes on one machine count shared cores once."""
    return len({(node["machine"], core) for node in nodes for core in node["cores"]})


def shared_machine(nodes: Sequence[Mapping[str, Any]], emulation: str | None = None) -> str | None:
    """Returns a note on nodes that share a machine; None if none do.

    `emulation`: how the links between them are emulated.
    """
    machines = {node["machine"] for node in nodes}
    if len(machines) == len(nodes):
        return None
    between = (
        f"emulated links between them ({emulation})" if emulation else "no network between them"
    )
    return (
        f"{len(nodes)} nodes on {len(machines)} machine{'' if len(machines) == 1 else 's'}:"
        f" {between}"
    )
