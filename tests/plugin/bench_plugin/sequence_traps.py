"""Strategies that split sequences over ranks, each with one fix taken out."""

from __future__ import annotations

from typing import Literal

from harness.strategies import _sequence
from harness.strategies.ulysses import Ulysses
from harness.strategies.ulysses_zero import UlyssesZero
from harness.strategy import Job, Layout, TrainStep


class UnscaledUlysses(UlyssesZero):
    """DeepSpeed's form whose loss is not divided by the number of ranks that share a sequence."""

    def gradient_factor(self, layout: Layout) -> int:
        return 1


class UlyssesTraps(Ulysses):
    """The form by hand without one of the fixes, `none` for all of them."""

    without: Literal["none", "positions", "averaged_gradients"] = "none"
    """Which."""

    def setup(self, job: Job) -> TrainStep:
        import torch

        if self.without == "positions":  # as the model counts, left to itself
            _sequence.SequencePart.positions = lambda part, job: torch.arange(
                job.cell.sequence_length // part.parts
            )[None]
        if self.without == "averaged_gradients":
            _sequence.average_gradients = lambda parameters: None
        return super().setup(job)
