"""How good predictions of left-out cells are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from harness.planner.local.cell_facts import Measured
from harness.planner.local.local_calibration import LeftOut


@dataclass(frozen=True)
class CpuScores:
    """Of the predictions of one part, as shares; None where there is nothing to score."""

    part: str
    cells: int
    median_time_error: float | None
    median_memory_error: float | None
    known: int
    """Cells whose strategy, with the same options, was measured in the other parts."""
    known_median_time_error: float | None
    known_median_memory_error: float | None


@dataclass(frozen=True)
class FirstChoice:
    """The cell of a setting that is predicted to be the fastest, beside the measured ones."""

    setting: str
    compared: int
    """Cells of the setting that train the same as one process."""
    chosen: str
    best: str
    """The fastest as measured."""
    slower: float
    """By which share the chosen one's measured step is longer than the best one's."""
    told_apart: bool
    """Whether measurements tell it apart from the fastest."""


def score(rows: Sequence[LeftOut]) -> list[CpuScores]:
    """The scores of each part, and of all together where there are several."""
    parts = list(dict.fromkeys(row.part for row in rows))
    scores = [_score(part, [row for row in rows if row.part == part]) for part in parts]
    return [*scores, _score("all", rows)] if len(parts) > 1 else scores


def _score(part: str, rows: Sequence[LeftOut]) -> CpuScores:
    known = [row for row in rows if row.known]
    return CpuScores(
        part,
        len(rows),
        _median([row.seconds / row.measured.seconds for row in rows]),
        _median(_of_memory(rows)),
        len(known),
        _median([row.seconds / row.measured.seconds for row in known]),
        _median(_of_memory(known)),
    )


def _of_memory(rows: Sequence[LeftOut]) -> list[float]:
    return [row.peak_bytes / peak for row in rows if (peak := row.measured.peak_bytes)]


def _median(ratios: Sequence[float]) -> float | None:
    """The median error of predictions over measurements."""
    return float(np.median([abs(ratio - 1) for ratio in ratios])) if ratios else None


def first_choices(
    rows: Sequence[LeftOut], may_be_fastest: Callable[[Sequence[Measured]], Sequence[Measured]]
) -> list[FirstChoice]:
    """What is predicted to be the fastest in each setting with several cells to choose from.

    `may_be_fastest`: those of some measured cells that measurements cannot tell from their fastest.
    """
    result = []
    for setting in dict.fromkeys(row.measured.facts.setting for row in rows):
        own = [
            row
            for row in rows
            if row.measured.facts.setting == setting
            and row.measured.facts.exact
            and not row.measured.facts.stand_in
            and row.measured.facts.ranks <= row.measured.facts.cores
        ]
        if len(own) < 2:
            continue
        chosen = min(own, key=lambda row: row.seconds).measured
        best = min(own, key=lambda row: row.measured.seconds).measured
        result.append(
            FirstChoice(
                setting,
                len(own),
                chosen.facts.label,
                best.facts.label,
                chosen.seconds / best.seconds - 1,
                not any(chosen is cell for cell in may_be_fastest([r.measured for r in own])),
            )
        )
    return result
