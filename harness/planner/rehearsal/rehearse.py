"""Rehearsal: how much memory does a training need, by the code that will run?

A strategy's own set-up and steps run as one rank of a world of any size, on tensors without data,
and what these tensors would take is added up.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from harness.planner.rehearsal.depth import DEPTHS, at_depth, with_blocks
from harness.planner.rehearsal.rank import RankPeaks, rehearse_rank
from harness.spec.cell import Cell
from harness.spec.errors import Refused, Unavailable, UsageError
from harness.spec.training import Layout
from harness.strategy.base import Strategy
from harness.strategy.registry import validate
from harness.workloads import Workload, make_workload

SMALL_WORLD = 8
"""Ranks up to which all are rehearsed unless some are chosen."""


@dataclass(frozen=True)
class MemorySplit:
    """Bytes of a rank's tensors at one moment, by kind."""

    parameters: int
    """Also gathered ones, while a module uses them."""
    gradients: int
    """Also those that are not reduced yet."""
    optimizer: int
    activations: int
    """What forward makes."""
    buffers: int
    """Of the model and of the library, and what collectives read and write."""
    temporaries: int
    """Other tensors that backward and the update make and free."""

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


@dataclass(frozen=True)
class RankMemory:
    """The memory that a rehearsed rank's tensors need, in bytes as torch's allocator counts
    them."""

    rank: int
    peak_bytes: int
    """The largest sum of all tensors at any moment of a step."""
    at_peak: MemorySplit
    """What is in memory at that moment."""
    peak_phase: str
    """`forward`, `backward` or `update`."""
    peak_block: str
    """Where in the model, see `Where`: `block -1` is the last one, forward with the head behind
    it."""
    setup_peak_bytes: int
    kept_bytes: int
    """Between two steps."""
    backend_buffer_bytes: int
    """The largest buffer that gloo holds while a collective runs. It is part of the peak where it
    coincides with it; a thread of gloo that frees it late, under load, can add it to the peak."""
    rehearsed_blocks: tuple[int, ...]
    """Blocks of the models that were rehearsed: the cell's own, or those of shallow models from
    which the cell's was extrapolated."""
    seconds: float
    """That the rehearsal took."""


@dataclass(frozen=True)
class Rehearsal:
    """The rehearsed ranks of a cell."""

    cell: Cell
    ranks: tuple[RankMemory, ...]

    @property
    def fullest(self) -> RankMemory:
        return max(self.ranks, key=lambda rank: rank.peak_bytes)


def rehearse(cell: Cell, ranks: Sequence[int] = (), every_block: bool = False) -> Rehearsal:
    """Rehearses a cell.

    `ranks`: those to rehearse; by default all of a world of up to SMALL_WORLD, and the first rank
    of each pipeline stage of a larger one. `every_block`: never extrapolate from shallow models.
    Raises UsageError for what cannot be rehearsed, Refused and Unavailable as `validate` does.
    """
    workload = make_workload(cell.workload)
    strategy, layout = validate(cell, workload)
    _check(cell, strategy, layout)
    for rank in ranks:
        if not 0 <= rank < layout.processes:
            raise UsageError(
                f"rank {rank} of {cell.name}: it has the ranks 0 to {layout.processes - 1}"
            )
    chosen = list(dict.fromkeys(ranks)) or default_ranks(layout)
    return Rehearsal(
        cell, tuple(_memory(cell, strategy, layout, workload, rank, every_block) for rank in chosen)
    )


def default_ranks(layout: Layout) -> list[int]:
    """All ranks of a small world, of a larger one the first of each pipeline stage."""
    if layout.processes <= SMALL_WORLD:
        return list(range(layout.processes))
    return list(range(0, layout.pipeline * layout.tensor, layout.tensor))


def _check(cell: Cell, strategy: Strategy, layout: Layout) -> None:
    """Raises Refused for cells whose memory is not that of one CPU rank's tensors."""
    if cell.device != "cpu":
        raise Refused("a rehearsal runs torch's CPU kernels; set the cell's device to cpu")
    alone = not strategy.process_group and layout.processes > 1
    if layout.devices_per_process > 1 or layout.servers or alone:
        raise Refused(
            f"{cell.strategy} exchanges tensors without torch.distributed, so that other ranks"
            " would have to be there to answer; measure it instead"
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
                f"{cell.name} cannot be rehearsed: with {cell.sequence_length} tokens in a sample a"
                f" tensor has more bytes than 64 bits count ({first_line}); give a smaller batch or"
                " shorter samples"
            ) from error
        raise UsageError(
            f"{cell.name} cannot be rehearsed: its code needs more than shapes"
            f" ({type(error).__name__}: {first_line}); measure it instead"
        ) from error
    where, split = peaks.peak()
    _, at_setup = peaks.peak(setup=True)
    at_peak = MemorySplit(**split)
    return RankMemory(
        rank=rank,
        peak_bytes=at_peak.total,
        at_peak=at_peak,
        peak_phase=where.phase,
        peak_block=where.block,
        setup_peak_bytes=sum(at_setup.values()),
        kept_bytes=peaks.kept,
        backend_buffer_bytes=peaks.largest_buffer,
        rehearsed_blocks=peaks.depths or (peaks.blocks,),
        seconds=time.perf_counter() - began,
    )


def _from_shallow(
    cell: Cell, strategy: Strategy, layout: Layout, workload: Workload, rank: int
) -> RankPeaks | None:
    """The peaks extrapolated from shallow models; None where they cannot be, or need not be.

    A pipeline's rank has a part of the blocks only, and a rank to which whole parameters are dealt
    out has others at each depth: these are rehearsed as they are.
    """
    if layout.pipeline > 1 or workload.blocks <= sum(DEPTHS):
        return None
    peaks: list[RankPeaks] = []
    for depth in DEPTHS:
        shallow = with_blocks(workload, depth)
        if shallow is None:
            return None
        peaks.append(rehearse_rank(cell, strategy, layout, shallow, rank))
        if peaks[-1].dealt_out:
            return None
    return at_depth(peaks, workload.blocks)
