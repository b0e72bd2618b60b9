"""One rank rehearsed: its set-up and steps on tensors without data, and the peak of each part."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from harness.planner.rehearsal.ledger import Kind, Ledger, Phase, Place
from harness.planner.rehearsal.world import fake_batch, fake_rank
from harness.spec.cell import Cell
from harness.spec.training import Layout
from harness.strategy.base import Strategy
from harness.strategy.job import Job, Recompute, TrainState
from harness.workloads import Workload
from harness.workloads.recompute import recompute_blocks

if TYPE_CHECKING:
    from torch import nn

FIRST_STEPS = 1
"""Steps before those that repeat: the optimizer's state comes into being in the first."""


@dataclass
class RehearsedJob(Job):
    """A job whose models show a ledger which of their modules are blocks."""

    ledger: Ledger | None = None

    def model(self, recompute: Recompute = recompute_blocks) -> nn.Module:
        built = super().model(recompute)
        if self.ledger is not None:
            self.ledger.note_model(built, self.workload.block_path)
        return built


class Where(NamedTuple):
    """A place of a training (see `Place`), its block counted from the nearer end of the model, so
    that models of other depths have it too."""

    step: int
    phase: Phase
    model: int
    block: str
    """`before the first block` that the phase comes to (forward the embedding, backward the head),
    `block 0`, `block -1`, ...: negative numbers count from the last."""


@dataclass(frozen=True)
class RankPeaks:
    """The peaks of a rank in bytes of its tensors."""

    rank: int
    blocks: int
    """Of the model; 0 where its blocks are not known."""
    places: dict[Where, dict[Kind, int]]
    """What is in memory at the peak of each part of the set-up and of each step."""
    kept: int
    """Bytes in memory between steps."""
    largest_buffer: int = 0
    """Bytes of the largest of the backend's own buffers."""
    dealt_out: bool = False
    """Whether its optimizer has only some of the parameters that its model trains: with another
    number of blocks it would have others."""
    depths: tuple[int, ...] = ()
    """Blocks of the models from which this was extrapolated; empty: the whole model was
    rehearsed."""

    def peak(self, setup: bool = False) -> tuple[Where, dict[Kind, int]]:
        """The largest of the peaks of the steps, or of the set-up."""
        asked = {w: split for w, split in self.places.items() if (w.step < 0) == setup}
        where = max(asked, key=lambda where: sum(asked[where].values()))
        return where, asked[where]


def rehearse_rank(
    cell: Cell, strategy: Strategy, layout: Layout, workload: Workload, rank: int
) -> RankPeaks:
    """Rehearses set-up, the first step and one cycle of the others (see Strategy.cycle) of one rank
    of the cell, with this workload as its model.

    Raises what torch raises where an operator does not run on tensors without data.
    """
    ledger = Ledger()
    with tempfile.TemporaryDirectory() as scratch:
        device = torch.device("cpu")
        job = RehearsedJob(cell, workload, layout, device, rank, Path(scratch), ledger=ledger)
        with fake_rank(strategy, job), ledger.recording():
            step = strategy.setup(job)
            assert job.train_state is not None
            ledger.mark_states(job.train_state)
            for index in range(FIRST_STEPS + strategy.cycle):
                ledger.begin_step(index)
                step(fake_batch(job, index))
                ledger.mark_states(job.train_state)
            kept = ledger.total
    places: dict[Where, dict[Kind, int]] = {}
    for place, peak in ledger.peaks.items():
        for where in _from_ends(place, workload.blocks):
            split = peak.split()
            if sum(split.values()) > sum(places.get(where, {}).values()):
                places[where] = split
    dealt_out = _is_dealt_out(job.train_state)
    return RankPeaks(rank, workload.blocks, places, kept, ledger.largest_buffer, dealt_out)


def _is_dealt_out(train_state: TrainState) -> bool:
    updated = sum(len(group["params"]) for o in train_state.optimizers for group in o.param_groups)
    return updated < sum(p.requires_grad for p in train_state.model.parameters())


def _from_ends(place: Place, blocks: int) -> Iterator[Where]:
    """The place, by its block's distance from the first and from the last block: one of the first
    two, of the last two, or both in a model of three blocks."""
    step, phase, model, block = place
    if block < 0:
        yield Where(step, phase, model, "before the first block")
        return
    if block < 2 or blocks == 0:
        yield Where(step, phase, model, f"block {block}")
    if block >= blocks - 2:
        yield Where(step, phase, model, f"block {block - blocks}")
    elif block >= 2:
        yield Where(step, phase, model, "a block between")
