"""Something that would falsify a measurement on this host."""

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
