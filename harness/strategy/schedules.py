from __future__ import annotations

from typing import Literal

from harness.spec.errors import Refused

Schedule = Literal[
    "gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev"
]
V_SHAPED = ("zbv", "dualpipev")
"""Schedules with one stage per rank on each arm of a V; the first rank has both ends."""
FORWARDS_FIRST = ("gpipe", "looped_bfs")
"""Schedules that run all forwards before the first backward."""
WEIGHTS_APART = ("interleaved_zero_bubble", *V_SHAPED)
"""Schedules that compute weight gradients in separate passes."""


def blocks_of_stage(blocks: int, stage: int, stages: int) -> range:
    return range(blocks * stage // stages, blocks * (stage + 1) // stages)


def check_micro_batches(schedule: str, ranks: int, micro_batches: int) -> None:
    """Raises Refused if torch's schedule does not accept this many micro-batches."""
    if schedule == "1f1b" and micro_batches < ranks:
        raise Refused(
            f"schedule 1f1b needs a micro-batch for each of its {ranks} stages, but the cell has"
            f" {micro_batches}"
        )
    if schedule == "dualpipev" and micro_batches < 2 * ranks:
        raise Refused(
            f"schedule dualpipev needs a micro-batch for each of its {2 * ranks} stages, two per"
            f" rank, but the cell has {micro_batches}"
        )
    rounds = max(1, micro_batches // ranks)
    if schedule.startswith("interleaved") and micro_batches % rounds:
        raise Refused(
            f"schedule {schedule} runs {micro_batches} micro-batches on {ranks} ranks in {rounds}"
            f" rounds, into which they do not divide; use a multiple of {ranks}"
        )


def in_flight(schedule: str, rank: int, ranks: int, stages: int, micro_batches: int) -> int:
    """Returns how many forwards of its stages a rank has run but not taken back, at most.

    1F1B warms up with one forward per further rank; the interleaved schedule (arXiv 2104.04473,
    section 2.2) with two, and a round of one micro-batch per rank for each further stage. V-shaped
    schedules keep as much as 1F1B, and DualPipeV a pair more (arXiv 2401.10241, 2412.19437).
    """
    every = stages * micro_batches
    if schedule in FORWARDS_FIRST:
        return every
    if schedule in V_SHAPED:
        return min(every, 2 * ranks + (schedule == "dualpipev"))
    if stages == 1 and schedule == "1f1b":
        return min(every, ranks - rank)
    of_round = micro_batches // max(1, micro_batches // ranks)
    return min(every, (stages - 1) * of_round + 2 * (ranks - 1 - rank) + 1)
