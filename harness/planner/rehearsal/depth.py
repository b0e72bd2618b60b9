"""The peaks of a deep model from those of three shallow ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from harness.planner.rehearsal.ledger import KINDS, Kind
from harness.planner.rehearsal.rank import RankPeaks, Where
from harness.workloads import Workload

DEPTHS = (3, 4, 5)
"""Blocks of the shallow models: the first, the second, the last but one and the last block are what
they are in a deep model, and the third depth shows whether memory grows evenly."""
_DEPTH_KEYS = ("num_hidden_layers", "n_layer")
"""Entries of transformers' configs that say how many blocks a model has."""
_UNEVEN = 1e-4
"""Share of the peak by which growth from block to block may differ."""


def with_blocks(workload: Workload, blocks: int) -> Workload | None:
    """The same workload with so many blocks; None where its config is not the suite's own."""
    key = next((key for key in _DEPTH_KEYS if key in workload.config), None)
    if key is None or not workload.block_path or workload.suffixes:
        return None
    return dataclasses.replace(workload, config={**workload.config, key: blocks}, blocks=blocks)


def at_depth(shallow: Sequence[RankPeaks], blocks: int) -> RankPeaks | None:
    """The peaks of a rank of the model with so many blocks, from those at DEPTHS; None where they
    do not grow evenly.

    Every block adds the same bytes to what is in memory at a place: its part of the states, and its
    activations if the place is one where they are in memory. The peak of a place is therefore a
    straight line over the number of blocks, and the peak of the step is the largest of the lines'
    values, whichever place that is in the deep model. Between the second and the last but one block
    memory changes evenly from block to block, so that no block there has a higher peak than both.
    """
    last, before, first = shallow[2], shallow[1], shallow[0]
    steps = blocks - DEPTHS[2]
    splits: dict[Where, dict[Kind, int]] = {}
    uneven: dict[Where, int] = {}
    for where in last.places.keys() & before.places.keys() & first.places.keys():
        a, b, c = (peaks.places[where] for peaks in (first, before, last))
        splits[where] = {kind: c[kind] + steps * (c[kind] - b[kind]) for kind in KINDS}
        total_a, total_b, total_c = (sum(split.values()) for split in (a, b, c))
        uneven[where] = abs(total_c - 2 * total_b + total_a)
    peak = max(sum(split.values()) for split in splits.values())
    for where, difference in uneven.items():
        if difference > _UNEVEN * peak and sum(splits[where].values()) > 0.9 * peak:
            return None
    kept = last.kept + steps * (last.kept - before.kept)
    return RankPeaks(last.rank, blocks, splits, kept, last.largest_buffer, depths=DEPTHS)
