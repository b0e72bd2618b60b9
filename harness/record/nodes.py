"""What the recorded facts of the nodes of a cell say together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def distinct_cores(nodes: Sequence[Mapping[str, Any]]) -> int:
    """Cores of all nodes together; those that nodes on one machine share count once."""
    return len({(node["machine"], core) for node in nodes for core in node["cores"]})


def shared_machine(nodes: Sequence[Mapping[str, Any]], emulation: str | None = None) -> str | None:
    """What is to be said of nodes that are not machines of their own; None where each is one.

    `emulation`: how their links are made.
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
