"""What must be equal for two throughputs to say which strategy is faster."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

SETTING = (
    "workload",
    "data",
    "sequence_length",
    "device",
    "devices",
    "nodes",
    "links",
    "precision",
    "global_batch",
    "optimizer",
    "threads_per_device",
)
"""Columns of a trial: what is trained, and on what."""
SCALED = ("devices", "nodes", "links", "global_batch")
"""Those of them that scaling changes.

The batch is then compared as it is, or for each device (weak scaling).
"""
SERIES = ("strategy", "options", "micro_batches", "launcher")
"""Columns of a trial: which strategy trains it, and how.

A curve follows one of them over the number of devices.
"""


def setting(row: Mapping[Any, Any], without: Collection[str] = ()) -> tuple[str, ...]:
    """The setting of a trial's or cell's row, but for these columns.

    Equal settings are equal tuples.
    """
    return tuple(str(row.get(name)) for name in SETTING if name not in without)


def series(row: Mapping[Any, Any]) -> tuple[str, ...]:
    """Which strategy a trial's or cell's row is of, with its options."""
    return tuple(str(row.get(name)) for name in SERIES)


def batch(row: Mapping[Any, Any]) -> int:
    """Samples a step that stay the same over the numbers of devices: all of them (strong scaling),
    or each device's (weak)."""
    return int(
        row["global_batch"] // row["devices"] if row["regime"] == "weak" else row["global_batch"]
    )
