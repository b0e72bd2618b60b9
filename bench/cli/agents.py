"""Connects a run to the agents on its nodes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.launch.launcher import LauncherProtocol


@dataclass(frozen=True)
class AgentOptions:
    nodes: int
    rendezvous_file: Path | None
    """File in which the agents find the run; None: this host alone."""
    interface: str
    timeout_seconds: float
    """Seconds to wait for the agents; the run then begins without the rest."""


@contextlib.contextmanager
def launchers(
    options: AgentOptions, say: Callable[[str], None]
) -> Iterator[Callable[[Sequence[str]], LauncherProtocol]]:
    """Yields the factory of a run's launchers, over the agents if there are any. Agents connect
    while the run begins; `say` prints a line."""
    from harness.launch.launcher import Launcher
    from harness.nodes.coordinator import Nodes, NodesLauncher

    if options.rendezvous_file is None:
        yield Launcher
        return
    nodes = Nodes(options.nodes, options.rendezvous_file, options.interface or None)
    try:
        present = nodes.ready(options.nodes, options.timeout_seconds)
        nodes.check()
        nodes.measure()
        names = ", ".join(node.name for node in present)
        lacking = "" if len(present) == options.nodes else f"; {nodes.lacking(options.nodes)}"
        say(f"nodes: {names}{lacking}")
        yield functools.partial(NodesLauncher, nodes)
    finally:
        nodes.close()
