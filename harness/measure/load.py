"""How busy was the machine, beside the training?"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

WINDOW_SECONDS = 0.03
"""Three ticks of the kernel's clock on each core: enough to see a busy core, and hardly any
delay."""


FRESH_SECONDS = 0.2
"""For how long the share measured after a trial also counts as the share before the next one:
longer than writing a record takes.
"""


def cpu_seconds(stat: Path = Path("/proc/stat")) -> tuple[float, float] | None:
    """Seconds since boot that all cores together were busy (including time that a hypervisor gave
    to others) and idle; None where unknown.
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
    """Share of the cores' time that is idle during the next WINDOW_SECONDS; None where unknown."""
    before = read()
    sleep(WINDOW_SECONDS)
    after = read()
    if before is None or after is None:
        return None
    busy, idle = after[0] - before[0], after[1] - before[1]
    return idle / (busy + idle) if busy + idle > 0 else None


@dataclass
class Idle:
    """The idle share before and after each trial; the one after a trial is also the one before the
    next trial where that begins at once."""

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
    """CPU time of this rank and of the whole machine over several stretches of steps, read between
    steps."""

    seconds: float = 0.0
    """Length of the stretches."""
    own: float = 0.0
    """CPU seconds of this rank."""
    busy: float | None = 0.0
    """CPU seconds of all processes together; None: unknown."""
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
    """How many cores, on average, processes other than the ranks kept busy during the timed steps;
    None where unknown. `ranks`: all ranks of one machine."""
    if not ranks or ranks[0].busy is None or not ranks[0].seconds:
        return None
    return max(0.0, (ranks[0].busy - sum(rank.own for rank in ranks)) / ranks[0].seconds)
