from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Trouble:
    """A condition of this host that skews or misrepresents its results."""

    subject: str
    """Affected part: `GPU 0`, `CPU`, `disk`."""
    what: str
    why: str
    mend: str
    """Command that fixes it, or advice."""
