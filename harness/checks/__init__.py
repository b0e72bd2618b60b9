"""What would falsify a measurement on this host, and the command that mends it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Trouble:
    """Something about this host that makes its figures wrong, or other than they look."""

    subject: str
    """`GPU 0`, `CPU`, `disk`."""
    what: str
    why: str
    mend: str
    """A command, or what to do where there is none."""


def troubles() -> list[Trouble]:
    """All that was found, the GPUs' first."""
    from harness.checks.gpus import gpu_troubles
    from harness.checks.host import host_troubles

    return [*gpu_troubles(), *host_troubles()]
