"""A node as the coordinator sees it, and its link."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from harness.nodes.protocol import NodeConnection


@dataclass
class Node:
    line: NodeConnection
    facts: dict[str, Any]

    @property
    def number(self) -> int:
        return int(self.facts["number"])

    @property
    def name(self) -> str:
        return str(self.facts["name"])


PINGS, MESSAGE_BYTES, MESSAGES = 20, 2**24, 3


def measured_link(
    line: NodeConnection, now: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Measures the median round trip of an empty message, and the rate of a large one without it,
    best of three."""

    def took(payload: int) -> float:
        begin = now()
        line.send("ping", padding=payload)
        line.receive()
        return now() - begin

    round_trip = statistics.median(took(0) for _ in range(PINGS))
    seconds = min(took(MESSAGE_BYTES) for _ in range(MESSAGES))
    return {
        "round_trip_seconds": round_trip,
        "bits_per_second_from_head": 8 * MESSAGE_BYTES / max(seconds - round_trip, 1e-9),
    }
