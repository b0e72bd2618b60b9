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
"""Statuses from worst to best; a cell has the worst of its trials."""
NOT_LAUNCHED = ("unavailable", "refused", "skipped")
"""Statuses of trials that were not launched: unavailable here, impossible anywhere, or skipped
because a smaller cell ran out of memory."""
NO_RESULT = tuple(status for status in WORST_FIRST if status not in (*NOT_LAUNCHED, "ok"))
"""Statuses of launched trials that cannot be ranked."""
NOT_AGAIN = ("out_of_memory", "timeout", "skipped")
"""Statuses that would recur, so the cell's remaining trials are not launched."""
