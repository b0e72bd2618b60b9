"""Long trainings: an untimed training of a nano model, once per strategy and run.

A nano model takes LONG_STEPS steps in seconds. Ranks sketch their parameters after random steps,
which a strategy cannot foresee, and which are compared with the reference's.
"""

from __future__ import annotations

import random

from harness.cell.cell import Cell
from harness.cell.errors import Refused, Unavailable
from harness.seam.registry import validate
from harness.workloads import make_workload

LONG_STEPS = 200
LONG_SECONDS = 4.0
"""Expected duration."""
SEGMENT = 20
SKETCHED = 4
"""Number of steps after which parameters are compared, each drawn from an equal part of the steps
after the segment."""
LEAST_BATCH = 8
SAME = (
    *("strategy", "options", "defaults", "strategy_digest", "devices", "device", "launcher"),
    *("micro_batches", "recompute", "time_limit_seconds"),
)
"""Fields that a cell's long training shares with it."""


def long_cell(cell: Cell) -> Cell | None:
    """Returns the cell of the long training, in fp32 if the strategy can. None for cells on one
    device or several nodes, compiled ones, and those that no nano model suits."""
    if cell.devices == 1 or cell.nodes > 1 or cell.compile != "none":
        return None
    family, pieces = make_workload(cell.workload).family, cell.devices * cell.micro_batches
    smallest = f"{family.name}-{next(iter(family.sizes))}" if family else "llama-nano"
    for precision in dict.fromkeys(("fp32", cell.precision)):
        for workload in map(make_workload, dict.fromkeys(("llama-nano", smallest))):
            nano = Cell(
                **{name: getattr(cell, name) for name in SAME},
                workload=workload.name,
                data="images" if workload.kind == "image" else "stdlib",
                sequence_length=32,
                precision=precision,
                global_batch=-(-LEAST_BATCH // pieces) * pieces,
                warmup_steps=SEGMENT,
                timed_steps=LONG_STEPS - SEGMENT,
                parity_steps=SEGMENT,
            )
            try:
                validate(nano, workload)
            except (Refused, Unavailable):
                continue
            return nano
    return None


def steps_to_sketch(seed: str) -> tuple[int, ...]:
    """Returns numbers of steps after the segment, drawn at random."""
    chosen, part = random.Random(seed), (LONG_STEPS - SEGMENT) // SKETCHED
    return tuple(SEGMENT + part * at + chosen.randint(1, part) for at in range(SKETCHED))
