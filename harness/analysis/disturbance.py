"""Detection of disturbed trials."""

from __future__ import annotations

from typing import Literal

from harness.host.gpu_record import GpuRecord

DISTURBED_CORES = 0.25
"""Foreign load in cores above which a trial is marked. The kernel counts in ticks of 10 ms, which
short trials see as up to 0.2 cores."""


QUIET = 0.8
"""Share of idle cores around a trial below which it is marked."""


Cause = Literal["busy", "shared", "throttled"]


CAUSES: dict[Cause, str] = {
    "busy": "something else used the machine beside",
    "shared": "another process was on its GPUs beside",
    "throttled": "heat, hardware or a lowered power limit held its GPUs back in",
}
"""Description of each cause, to be followed by a number of trials."""


def disturbances(
    foreign_cores: float | None,
    idle_before: float | None,
    idle_after: float | None,
    gpus: GpuRecord | None = None,
) -> tuple[Cause, ...]:
    """Returns the causes that disturbed a trial; unknown values are ignored."""
    idle = [share for share in (idle_before, idle_after) if share is not None]
    busy = (foreign_cores or 0.0) > DISTURBED_CORES or min(idle, default=1.0) < QUIET
    causes: set[Cause] = {finding.cause for finding in gpus.findings()} if gpus else set()
    if busy:
        causes.add("busy")
    return tuple(cause for cause in CAUSES if cause in causes)


def disturbed(
    foreign_cores: float | None,
    idle_before: float | None,
    idle_after: float | None,
    gpus: GpuRecord | None = None,
) -> bool:
    return bool(disturbances(foreign_cores, idle_before, idle_after, gpus))
