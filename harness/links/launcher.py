"""Runs cells with emulated links on emulated nodes, others as usual."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from harness.launch.launcher import LauncherProtocol
from harness.launch.options import LaunchOptions
from harness.launch.outcome import Outcome
from harness.links.emulated import EmulatedNodes, NoLinks
from harness.nodes.coordinator import NodesLauncher
from harness.spec.cell import Cell
from harness.workloads import DataSource

if TYPE_CHECKING:
    from typing_extensions import Unpack

MakesLauncher = Callable[[Sequence[str]], LauncherProtocol]
"""Factory of launchers, from the packages that ranks need."""


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
        """A cell whose links cannot be emulated is `unavailable`."""
        if not cell.links:
            return self.inner.run(cell, data, processes, on_progress=on_progress, **more)
        try:
            # Measured before the agents import packages, which keeps cores busy.
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
    """Yields the launcher factory for these cells, with emulated nodes if any needs them."""
    count = max((cell.nodes for cell in cells if cell.links), default=0)
    if not count:
        yield launcher
        return
    emulated = EmulatedNodes(count)
    try:
        yield functools.partial(LinksLauncher, emulated, launcher)
    finally:
        emulated.close()
