"""Finds a training's memory by running its code on fake tensors."""

from __future__ import annotations

import functools
import hashlib
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from pydantic import TypeAdapter

import harness
from harness.cell.cell import Cell
from harness.cell.durable import read_cached, write_cached
from harness.cell.errors import Refused, Unavailable, UsageError
from harness.cell.training import Layout
from harness.host.environment import version_of
from harness.planner.rehearsal.ledger import KINDS, Kind, Ledger, Phase, StepRegion
from harness.planner.rehearsal.world import fake_batch, fake_rank
from harness.seam.base import Strategy
from harness.seam.job import Job, Recompute
from harness.seam.registry import validate
from harness.workloads import Workload, make_workload
from harness.workloads.recompute import recompute_blocks
from harness.workloads.workload import cache_file

if TYPE_CHECKING:
    from torch import nn

DEPTHS = (3, 4, 5)
"""Block counts of the shallow models; the third shows whether memory grows evenly."""
_UNEVEN = 1e-4
"""Allowed difference in growth between blocks, as a share of the peak."""
SMALL_WORLD = 8
"""Maximum number of ranks that are all rehearsed by default."""


@dataclass
class RehearsedJob(Job):
    ledger: Ledger | None = None

    def model(self, recompute: Recompute = recompute_blocks) -> nn.Module:
        built = super().model(recompute)
        if self.ledger is not None:
            self.ledger.note_model(built, self.workload.block_path)
        return built


class RelativeRegion(NamedTuple):
    """A `StepRegion` with its block counted from the nearer end, so that it exists at any depth."""

    step: int
    phase: Phase
    model: int
    block: str
    """Position in the phase: `before the first block` (embedding forward, head backward), or `block
    0`, `block -1`, ...; negative numbers count from the last."""


@dataclass(frozen=True)
class RankPeaks:
    """Peak bytes of a rank's tensors."""

    rank: int
    blocks: int
    places: dict[RelativeRegion, dict[Kind, int]]
    resident: int
    largest_buffer: int = 0
    owns_some_parameters: bool = False
    """Whether its optimizer holds only some of the trained parameters, which depend on the number
    of blocks."""
    depths: tuple[int, ...] = ()
    """Block counts of the shallow models that the peaks are extrapolated from; empty if nothing was
    extrapolated."""

    def peak(self, setup: bool = False) -> tuple[RelativeRegion, dict[Kind, int]]:
        asked = {w: split for w, split in self.places.items() if (w.step < 0) == setup}
        where = max(asked, key=lambda where: sum(asked[where].values()))
        return where, asked[where]


def rehearse_rank(
    cell: Cell, strategy: Strategy, layout: Layout, workload: Workload, rank: int
) -> RankPeaks:
    """Rehearses one rank: set-up, settling steps and one cycle (see Strategy.cycle).

    Raises torch's exception for an operator without fake tensors.
    """
    ledger = Ledger()
    with tempfile.TemporaryDirectory() as scratch:
        device = torch.device("cpu")
        job = RehearsedJob(cell, workload, layout, device, rank, Path(scratch), ledger=ledger)
        with fake_rank(strategy, job), ledger.recording():
            step = strategy.setup(job)
            assert job.train_state is not None
            ledger.mark_states(job.train_state)
            for index in range(strategy.settling_steps + strategy.cycle):
                ledger.begin_step(index)
                step(fake_batch(job, index))
                ledger.mark_states(job.train_state)
            resident = ledger.total
    places: dict[RelativeRegion, dict[Kind, int]] = {}
    for region, peak in ledger.peaks.items():
        for where in _from_ends(region, workload.blocks):
            split = peak.split()
            if sum(split.values()) > sum(places.get(where, {}).values()):
                places[where] = split
    state = job.train_state
    updated = sum(len(group["params"]) for o in state.optimizers for group in o.param_groups)
    owns_some = updated < sum(p.requires_grad for p in state.model.parameters())
    return RankPeaks(rank, workload.blocks, places, resident, ledger.largest_buffer, owns_some)


def _from_ends(region: StepRegion, blocks: int) -> Iterator[RelativeRegion]:
    """Yields a region with its block counted from the nearer end of the model, or from both ends if
    it is near both."""
    step, phase, model, block = region
    if block < 0:
        yield RelativeRegion(step, phase, model, "before the first block")
        return
    if block < 2 or blocks == 0:
        yield RelativeRegion(step, phase, model, f"block {block}")
    if block >= blocks - 2:
        yield RelativeRegion(step, phase, model, f"block {block - blocks}")
    elif block >= 2:
        yield RelativeRegion(step, phase, model, "a block between")


def at_depth(shallow: Sequence[RankPeaks], blocks: int) -> RankPeaks | None:
    """Extrapolates a rank's peaks at DEPTHS to `blocks` blocks; None if they grow unevenly. A
    region's peak is linear in the number of blocks. Memory changes evenly from the second block to
    the last but one, so no block in between has a higher peak."""
    last, before, first = shallow[2], shallow[1], shallow[0]
    steps = blocks - DEPTHS[2]
    splits: dict[RelativeRegion, dict[Kind, int]] = {}
    uneven: dict[RelativeRegion, int] = {}
    for where in last.places.keys() & before.places.keys() & first.places.keys():
        a, b, c = (peaks.places[where] for peaks in (first, before, last))
        splits[where] = {kind: c[kind] + steps * (c[kind] - b[kind]) for kind in KINDS}
        total_a, total_b, total_c = (sum(split.values()) for split in (a, b, c))
        uneven[where] = abs(total_c - 2 * total_b + total_a)
    peak = max(sum(split.values()) for split in splits.values())
    for where, difference in uneven.items():
        if difference > _UNEVEN * peak and sum(splits[where].values()) > 0.9 * peak:
            return None
    resident = last.resident + steps * (last.resident - before.resident)
    return RankPeaks(last.rank, blocks, splits, resident, last.largest_buffer, depths=DEPTHS)


@dataclass(frozen=True)
class RankMemory:
    """A rehearsed rank's tensors, in bytes as torch's allocator counts them."""

    rank: int
    peak_bytes: int
    at_peak: dict[Kind, int]
    peak_phase: str
    """`forward`, `backward` or `update`."""
    peak_block: str
    """Position of the peak in the model (see `RelativeRegion`); `block -1` is the last block, in
    forward with the head."""
    setup_peak_bytes: int
    kept_bytes: int
    backend_buffer_bytes: int
    """Size of gloo's largest buffer during a collective."""
    rehearsed_blocks: tuple[int, ...]
    """Block counts of the rehearsed models: the cell's own count, or those of shallower models."""
    seconds: float


@dataclass(frozen=True)
class Rehearsal:
    cell: Cell
    ranks: tuple[RankMemory, ...]

    @property
    def fullest(self) -> RankMemory:
        return max(self.ranks, key=lambda rank: rank.peak_bytes)


def rehearse(cell: Cell, ranks: Sequence[int] = (), every_block: bool = False) -> Rehearsal:
    """Rehearses a cell, or returns the cached answer of the same code.

    `ranks`: by default every rank of a world of up to SMALL_WORLD, else the first rank of each
    pipeline stage. `every_block` rules out extrapolation. Raises UsageError if the cell cannot be
    rehearsed, or what `validate` raises.
    """
    workload = make_workload(cell.workload)
    strategy, layout = validate(cell, workload)
    _check(cell, strategy, layout)
    for rank in ranks:
        if not 0 <= rank < layout.processes:
            raise UsageError(
                f"rank {rank} of {cell.name} does not exist; ranks are 0 to {layout.processes - 1}"
            )
    chosen = list(dict.fromkeys(ranks)) or default_ranks(layout)
    file = _cache_file(cell, strategy, workload, f"{chosen} {every_block}")
    if file is not None and (text := read_cached(file)) is not None:
        return Rehearsal(cell, TypeAdapter(tuple[RankMemory, ...]).validate_json(text))
    memory = tuple(_memory(cell, strategy, layout, workload, rank, every_block) for rank in chosen)
    if file is not None:
        write_cached(file, json.dumps([asdict(rank) for rank in memory]))
    return Rehearsal(cell, memory)


def _cache_file(cell: Cell, strategy: Strategy, workload: Workload, asked: str) -> Path | None:
    """Returns where an answer is cached; None if the cell runs the user's code."""
    if workload.family is None or not type(strategy).__module__.startswith("harness."):
        return None
    libraries = [str(version_of(package)) for package in strategy.requires]
    return cache_file("rehearsals", workload, f"{cell.id} {asked} {libraries} {_code_version()}")


@functools.cache
def _code_version() -> str:
    digest = hashlib.blake2s(digest_size=8)
    for file in sorted(Path(harness.__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def default_ranks(layout: Layout) -> list[int]:
    if layout.processes <= SMALL_WORLD:
        return list(range(layout.processes))
    return list(range(0, layout.pipeline * layout.tensor, layout.tensor))


def _check(cell: Cell, strategy: Strategy, layout: Layout) -> None:
    if cell.device != "cpu":
        raise Refused("a rehearsal runs torch's CPU kernels; set the cell's device to cpu")
    alone = not strategy.capabilities.process_group and layout.processes > 1
    if layout.devices_per_process > 1 or layout.servers or alone or strategy.own_launcher:
        raise Refused(
            f"{cell.strategy} exchanges tensors without torch.distributed, so other ranks would"
            " have to answer; measure it instead"
        )


def _memory(
    cell: Cell, strategy: Strategy, layout: Layout, workload: Workload, rank: int, every_block: bool
) -> RankMemory:
    began = time.perf_counter()
    try:
        peaks = None if every_block else _from_shallow(cell, strategy, layout, workload, rank)
        peaks = peaks or rehearse_rank(cell, strategy, layout, workload, rank)
    except (UsageError, Refused, Unavailable):
        raise
    except Exception as error:
        first_line = str(error).strip().partition("\n")[0]
        if "overflow" in first_line.lower():
            raise UsageError(
                f"{cell.name} cannot be rehearsed: with {cell.sequence_length} tokens in a sample,"
                f" the bytes of a tensor overflow 64 bits ({first_line}); give a smaller batch or"
                " shorter samples"
            ) from error
        raise UsageError(
            f"{cell.name} cannot be rehearsed: its code needs values, not only shapes"
            f" ({type(error).__name__}: {first_line}); measure it instead"
        ) from error
    where, split = peaks.peak()
    _, at_setup = peaks.peak(setup=True)
    return RankMemory(
        rank=rank,
        peak_bytes=sum(split.values()),
        at_peak=split,
        peak_phase=where.phase,
        peak_block=where.block,
        setup_peak_bytes=sum(at_setup.values()),
        kept_bytes=peaks.resident,
        backend_buffer_bytes=peaks.largest_buffer,
        rehearsed_blocks=peaks.depths or (peaks.blocks,),
        seconds=time.perf_counter() - began,
    )


def _from_shallow(
    cell: Cell, strategy: Strategy, layout: Layout, workload: Workload, rank: int
) -> RankPeaks | None:
    """Extrapolates from shallow models, if that is possible and saves work. With pipelines, or
    optimizers of some parameters, ranks' shares depend on depth."""
    if layout.pipeline > 1 or workload.blocks <= sum(DEPTHS):
        return None
    peaks: list[RankPeaks] = []
    for depth in DEPTHS:
        shallow = workload.with_blocks(depth)
        if shallow is None:
            return None
        peaks.append(rehearse_rank(cell, strategy, layout, shallow, rank))
        if peaks[-1].owns_some_parameters:
            return None
    return at_depth(peaks, workload.blocks)
