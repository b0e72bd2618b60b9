"""Runs cells with links over emulated nodes, all others as ever."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from harness.launch.launcher import LauncherProtocol
from harness.launch.outcome import Outcome
from harness.links.emulated import EmulatedNodes, NoLinks
from harness.nodes.coordinator import NodesLauncher
from harness.spec.cell import Cell
from harness.workloads import DataSource

MakesLauncher = Callable[[Sequence[str]], LauncherProtocol]
"""What a runner is given: packages -> launcher."""


class LinksLauncher:
    """Takes the place of Launcher behind the runner."""

    def __init__(
        self, emulated: EmulatedNodes, inner: MakesLauncher, packages: Sequence[str]
    ) -> None:
        self.emulated, self.packages = emulated, list(packages)
        self.inner = inner(packages)

    def ignore_pid(self, pid: int) -> None:
        self.inner.ignore_pid(pid)

    def run(self, cell: Cell, data: DataSource, processes: int, **more: Any) -> Outcome:
        """As Launcher.run. Where the links cannot be had the cell is `unavailable`."""
        if not cell.links:
            return self.inner.run(cell, data, processes, **more)
        try:
            columns = self.emulated.use(
                cell.links
            )  # measured before the agents import what ranks need, which keeps cores busy
            over = NodesLauncher(self.emulated.ready(), self.packages)
        except KeyboardInterrupt:
            self.emulated.close()  # half an answer may have been read
            return Outcome("interrupted", "stopped by the user", time.time(), 0.0)
        except NoLinks as why:
            self.emulated.close()
            return Outcome("unavailable", str(why), time.time(), 0.0)
        finally:
            if self.emulated.pid:
                self.ignore_pid(self.emulated.pid)
        return replace(over.run(cell, data, processes, **more), link=columns)


@contextlib.contextmanager
def over_links(cells: Sequence[Cell], launcher: MakesLauncher) -> Iterator[MakesLauncher]:
    """The launcher of a run with these cells: where some have links, one that has emulated nodes
    for them until the end."""
    count = max((cell.nodes for cell in cells if cell.links), default=0)
    if not count:
        yield launcher
        return
    emulated = EmulatedNodes(count)
    try:
        yield functools.partial(LinksLauncher, emulated, launcher)
    finally:
        emulated.close()
