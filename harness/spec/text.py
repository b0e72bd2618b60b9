from __future__ import annotations


def plural(count: int, word: str) -> str:
    """Formats a count as `1 cell` or `2,000 cells`."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"
