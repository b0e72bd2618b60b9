"""What would falsify a measurement on this host, and the command that mends it."""

from __future__ import annotations

from bench.checks.trouble import Trouble


def troubles() -> list[Trouble]:
    """All that was found, the GPUs' first."""
    from bench.checks.gpus import gpu_troubles
    from bench.checks.host import host_troubles

    return [*gpu_troubles(), *host_troubles()]
