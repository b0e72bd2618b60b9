"""Sequence-parallel strategies, each without one fix."""

from __future__ import annotations

from typing import Literal

from harness.seam import Job, Layout, TrainStep
from harness.strategies import _sequence
from harness.strategies.ulysses import Ulysses
from harness.strategies.ulysses_zero import UlyssesZero


class UnscaledUlysses(UlyssesZero):
    """DeepSpeed's Ulysses without dividing the loss by the ranks that share a sequence."""

    def gradient_factor(self, layout: Layout) -> int:
        return 1


class UlyssesTraps(Ulysses):
    """Hand-written Ulysses without one of the strategy's fixes."""

    without: Literal["none", "positions", "averaged_gradients"] = "none"
    """The omitted fix; `none` omits no fix."""

    def setup(self, job: Job) -> TrainStep:
        import torch

        if self.without == "positions":  # the model's default positions
            _sequence.SequencePart.positions = lambda part, job: torch.arange(
                job.cell.sequence_length // part.parts
            )[None]
        if self.without == "averaged_gradients":
            _sequence.average_gradients = lambda parameters: None
        return super().setup(job)
