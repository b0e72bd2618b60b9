"""Values of column `status`: how a trial, and so a cell, can end."""

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
"""Statuses by severity; a cell has the worst of its trials."""
NOT_LAUNCHED = ("unavailable", "refused", "skipped")
"""Missing on this host; impossible anywhere; skipped because a smaller cell ran out of memory."""
NO_RESULT = tuple(status for status in WORST_FIRST if status not in (*NOT_LAUNCHED, "ok"))
"""Launched, but without a rankable figure."""
NOT_AGAIN = ("out_of_memory", "timeout", "skipped")
"""Statuses that would recur, so that the cell's other trials are not launched."""
