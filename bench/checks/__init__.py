"""Checks for conditions on this host that skew results, each with a fix."""

from __future__ import annotations

from bench.checks.trouble import Trouble


def troubles() -> list[Trouble]:
    """Returns all troubles found, GPU ones first."""
    from bench.checks.gpus import gpu_troubles
    from bench.checks.host import host_troubles

    return [*gpu_troubles(), *host_troubles()]
