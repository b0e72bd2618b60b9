"""Identity of a trial's record within a run, and its file name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TrialKey:
    cell_id: str
    trial: int
    attempt: int = 1

    @property
    def stem(self) -> str:
        return f"{self.cell_id}-t{self.trial}-a{self.attempt}"
