"""How a trial, and so a cell, can end: the words of the column `status`."""

from __future__ import annotations

WORST_FIRST = (
    "failed",
    "timeout",
    "out_of_memory",
    "diverged",
    "interrupted",
    "unavailable",
    "refused",
    "skipped",
    "ok",
)
"""A cell's status is the worst of its trials'."""
NOT_LAUNCHED = ("unavailable", "refused", "skipped")
"""Without what this host lacks; impossible anywhere; left out because a smaller one of the same run
had no memory."""
NO_RESULT = tuple(status for status in WORST_FIRST if status not in (*NOT_LAUNCHED, "ok"))
"""Launched, and without a figure that may be ranked."""
NOT_AGAIN = ("out_of_memory", "timeout", "skipped")
"""What a cell did once it would do again: its other trials are not launched."""
