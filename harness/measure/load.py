"""CPU load of the machine apart from the training."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

WINDOW_SECONDS = 0.03
"""Three ticks of the kernel's clock per core: enough to see a busy core, with little delay."""


FRESH_SECONDS = 0.2
"""Time for which a trial's closing share serves as the next one's opening share; longer than
writing a record takes."""


def cpu_seconds(stat: Path = Path("/proc/stat")) -> tuple[float, float] | None:
    """Returns the busy and idle seconds of all cores together since boot; None if unknown.

    Time that the hypervisor gave to others counts as busy.
    """
    try:
        user, nice, system, idle, iowait, irq, softirq, steal = (
            int(x) for x in stat.read_text().split("\n", 1)[0].split()[1:9]
        )
    except (OSError, ValueError):
        return None
    tick = os.sysconf("SC_CLK_TCK")
    return (user + nice + system + irq + softirq + steal) / tick, (idle + iowait) / tick


def idle_share(
    sleep: Callable[[float], None] = time.sleep,
    read: Callable[[], tuple[float, float] | None] = cpu_seconds,
) -> float | None:
    """Returns the cores' idle share during the next WINDOW_SECONDS; None if unknown."""
    before = read()
    sleep(WINDOW_SECONDS)
    after = read()
    if before is None or after is None:
        return None
    busy, idle = after[0] - before[0], after[1] - before[1]
    return idle / (busy + idle) if busy + idle > 0 else None


@dataclass
class Idle:
    """Idle shares before and after each trial, reused if the next one begins at once."""

    look: Callable[[], float | None] = idle_share
    now: Callable[[], float] = time.monotonic
    _last: tuple[float, float | None] | None = None

    def before(self) -> float | None:
        if self._last is None or self.now() - self._last[0] > FRESH_SECONDS:
            return self.after()
        return self._last[1]

    def after(self) -> float | None:
        share = self.look()
        self._last = self.now(), share
        return share


@dataclass
class Load:
    """CPU time of this rank and the machine over stretches of steps; read between steps."""

    seconds: float = 0.0
    """Total length of the stretches."""
    own: float = 0.0
    """CPU seconds of this rank."""
    busy: float | None = 0.0
    """CPU seconds of all processes; None if unknown."""
    _start: tuple[float, float, float | None] | None = None

    def _read(self) -> tuple[float, float, float | None]:
        all_cores = cpu_seconds()
        return time.perf_counter(), time.process_time(), all_cores and all_cores[0]

    def start(self) -> None:
        self._start = self._read()

    def stop(self) -> None:
        if self._start is None:
            return
        (began, own, busy), (ended, own_now, busy_now) = self._start, self._read()
        self.seconds += ended - began
        self.own += own_now - own
        self.busy = (
            None
            if self.busy is None or busy is None or busy_now is None
            else self.busy + busy_now - busy
        )
        self._start = None


def foreign_load(ranks: Sequence[Load]) -> float | None:
    """Returns the mean number of cores that other processes kept busy during the timed steps.

    None if unknown. `ranks`: all ranks of one machine.
    """
    if not ranks or ranks[0].busy is None or not ranks[0].seconds:
        return None
    return max(0.0, (ranks[0].busy - sum(rank.own for rank in ranks)) / ranks[0].seconds)
