"""Rewinds of a rank's state to an earlier step, from which steps are replayed and checked again.

Only the harness knows when; all ranks agree.
"""

from __future__ import annotations

import random

from harness.strategy.job import TrainState
from harness.worker.checkpoint import Checkpoint
from harness.worker.spec import TrialSpec

REPLAYED_STEPS = 3
"""Last steps of the parity segment that are replayed.

Their losses, and the parameters after them, must match the reference; otherwise the training has
changed.
"""
FIRST_WITHIN = 8
"""Most steps between the parity segment's end and the first rewind."""
LEAST_BETWEEN, MOST_BETWEEN = 8, 24
"""Steps between a replay's end and the next rewind, too few for rounding to separate correct
trainings (docs/explanation/parity.md)."""


class Rewinds:
    """Rewind schedule of one rank.

    A step's number counts all steps taken; its training step is its place in the training, whose
    batch it uses.
    """

    def __init__(self, seed: int, parity_steps: int, cycle: int) -> None:
        """`seed`: equal on all ranks. `parity_steps`: length of the parity segment, at least 2.
        `cycle`: steps after which the strategy's work repeats."""
        self.cycle = cycle
        self.random = random.Random(seed)
        self.from_step = max(parity_steps - REPLAYED_STEPS, 1)
        """Training step before which the state is saved."""
        self.count = 0
        self._checkpoint: Checkpoint | None = None
        self._kept_at = 0
        self._at: int | None = None
        """Number of the step before the next rewind; None if not yet chosen."""

    @classmethod
    def of(cls, spec: TrialSpec, cycle: int) -> Rewinds | None:
        """Returns a trial's schedule; None without rewinds."""
        seed = spec.rewind_seed
        return None if seed is None else cls(seed, spec.cell.parity_steps, cycle)

    def keeps(self, training_step: int) -> bool:
        return self._checkpoint is None and training_step == self.from_step

    def keep(self, train_state: TrainState, number: int) -> None:
        self._checkpoint, self._kept_at = Checkpoint(train_state), number

    def due(self, number: int, steps_left: int) -> bool:
        """Returns whether to rewind before the step of this number.

        `steps_left`: steps still to be timed.
        """
        if self._at is None:
            most = max(0, min(FIRST_WITHIN, steps_left - REPLAYED_STEPS))
            between = (LEAST_BETWEEN, MOST_BETWEEN) if self.count else (0, most)
            self._at = number + self.random.randint(*between)
        return number >= self._at and (number - self._kept_at) % self.cycle == 0

    def rewind(self, train_state: TrainState) -> None:
        assert self._checkpoint is not None
        self._checkpoint.restore(train_state)
        self.count += 1
        self._at = None
