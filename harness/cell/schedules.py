"""Schedules of pipelines, and the bubble that each has in theory."""

from __future__ import annotations

from typing import Literal

from harness.cell.cell import Cell

Schedule = Literal[
    "gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev"
]
V_SHAPED = ("zbv", "dualpipev")
"""Schedules with one stage per rank on each arm of a V; the first rank has both ends."""
FORWARDS_FIRST = ("gpipe", "looped_bfs")
"""Schedules that run all forwards before the first backward."""
WEIGHTS_APART = ("interleaved_zero_bubble", *V_SHAPED)
"""Schedules that compute weight gradients in separate passes."""


def stages_of_rank(schedule: str, asked: int) -> int:
    """Returns the number of stages on each rank. `asked`: number for schedules that let one
    choose."""
    if schedule in ("gpipe", "1f1b"):
        return 1
    return 2 if schedule in V_SHAPED else asked


def schedule_of(cell: Cell) -> str:
    """Returns a cell's schedule; 1F1B if its strategy has no such option."""
    return str({**cell.defaults, **cell.options}.get("schedule", "1f1b"))


def bubble_theory(cell: Cell, ranks: int) -> float | None:
    """Returns the share of time that stages wait if all take equally long: (p - 1) / (w + p - 1).

    p is `ranks`, and w the work of a rank in units of the slot that it loses to its neighbour. For
    m micro-batches, w is m (GPipe, arXiv 1811.06965, section 2.3). With v stages per rank it is m v
    (arXiv 2104.04473, section 2.2). If weight gradients fill the slots it is 3 m v: forward, input
    gradient and weight gradient take equally long (arXiv 2401.10241, section 2.1). Returns None for
    a V with fewer than 2 p micro-batches, whose arms do not overlap fully.
    """
    schedule, micro_batches = schedule_of(cell), cell.micro_batches
    if schedule in V_SHAPED and micro_batches < 2 * ranks:
        return None
    asked = {**cell.defaults, **cell.options}.get("stages_per_rank", 2)
    passes = micro_batches * stages_of_rank(schedule, asked)
    passes *= 3 if schedule in WEIGHTS_APART else 1
    return (ranks - 1) / (passes + ranks - 1)
