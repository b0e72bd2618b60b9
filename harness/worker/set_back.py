"""When a rank's state is set back to an earlier step, whose next steps are then trained and judged
once more: nobody but the harness knows when, and all ranks agree."""

from __future__ import annotations

import random

from harness.strategy.job import TrainState
from harness.worker.checkpoint import Checkpoint
from harness.worker.spec import TrialSpec

REPLAYED_STEPS = 3
"""Last steps of the parity segment that are trained again: their losses and the parameters after
them are those of the reference, or it is another training by now."""
FIRST_WITHIN = 8
"""Most steps from the segment's end to the first time."""
LEAST_BETWEEN, MOST_BETWEEN = 8, 24
"""Steps from the end of a replay to the next time: rounding has not let correct trainings drift
apart by then (docs/explanation/parity.md)."""


class SetBacks:
    """The times at which one rank's state is set back.

    Steps are counted in two ways: the number of a step counts all that were taken, and its training
    step says which step of the training it is, whose batch is trained on.
    """

    def __init__(self, seed: int, parity_steps: int, cycle: int) -> None:
        """`seed`: the same on all ranks. `parity_steps`: length of the parity segment, at least 2.
        `cycle`: steps after which the strategy's work repeats."""
        self.cycle = cycle
        self.random = random.Random(seed)
        self.from_step = max(parity_steps - REPLAYED_STEPS, 1)
        """The training step before which the state is set aside."""
        self.count = 0
        """How often it was set back."""
        self._checkpoint: Checkpoint | None = None
        self._kept_at = 0
        self._at: int | None = None
        """Number of the step before which it is set back next; None: not yet chosen."""

    @classmethod
    def of(cls, spec: TrialSpec, cycle: int) -> SetBacks | None:
        """Those of a trial; None where its state is never set back."""
        seed = spec.set_back_seed
        return None if seed is None else cls(seed, spec.cell.parity_steps, cycle)

    def keeps(self, training_step: int) -> bool:
        """Whether the state is to be set aside before this step."""
        return self._checkpoint is None and training_step == self.from_step

    def keep(self, train_state: TrainState, number: int) -> None:
        """Sets the state aside, before the step of this number."""
        self._checkpoint, self._kept_at = Checkpoint(train_state), number

    def due(self, number: int, steps_left: int) -> bool:
        """Whether the state is set back before the step of this number.

        `steps_left`: that are still to be timed.
        """
        if self._at is None:
            most = max(0, min(FIRST_WITHIN, steps_left - REPLAYED_STEPS))
            between = (LEAST_BETWEEN, MOST_BETWEEN) if self.count else (0, most)
            self._at = number + self.random.randint(*between)
        return number >= self._at and (number - self._kept_at) % self.cycle == 0

    def set_back(self, train_state: TrainState) -> None:
        """Puts the state back to what was set aside."""
        assert self._checkpoint is not None
        self._checkpoint.restore(train_state)
        self.count += 1
        self._at = None
