from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from harness.planner.fitting import LEVEL, Floats, Ints, fit
from harness.planner.local.cpu_prediction import (
    CellColumns,
    CellFacts,
    CpuMemoryConstants,
    CpuTimeConstants,
    Observation,
    peak_bytes,
    step_seconds,
)
from harness.spec.cell import BASELINE
from harness.spec.errors import UsageError

FEWEST = 5
VARIANT_SPREAD, FAMILY_SPREAD = 0.1, 0.4
"""Prior standard deviations of the log effects of a strategy's options and of its library."""
WORKLOAD_SPREAD = 0.05
"""Prior standard deviation of the log error shared by a workload's cells."""
ORDINARY_ERROR = 0.1
"""Typical log error of a cell; much larger ones hardly count."""
UNKNOWN_SPREAD = 0.25
"""Assumed half-width of log 80 % intervals with too few workloads measured."""
FEWEST_ERRORS = 8


@dataclass(frozen=True)
class LibraryEffects:
    """Log effects of libraries on measured variants, and, by family, on others."""

    variants: dict[tuple[str, str, bool], float]
    families: dict[tuple[str, str, bool], float]
    workloads: dict[str, float]
    """Error shared by each workload's cells."""

    def missed(self, cells: Sequence[CellFacts]) -> Floats:
        """Returns each cell's workload factor (shape [cells]); 1 if unmeasured."""
        return np.exp([self.workloads.get(cell.workload, 0.0) for cell in cells])

    def of(self, cells: Sequence[CellFacts]) -> Floats:
        """Returns the effect of each cell's library (shape [cells]), if necessary that in fp32,
        else 0."""
        return np.array([self._of(cell) for cell in cells], float)

    def _of(self, cell: CellFacts) -> float:
        engine, _, several = cell.family
        for effect in (
            self.variants.get(cell.variant),
            self.families.get(cell.family),
            self.families.get((engine, "fp32", several)),
        ):
            if effect is not None:
                return effect
        return 0.0


@dataclass(frozen=True)
class CpuSpreads:
    """Half-widths of log 80 % intervals."""

    variant: float
    """Half-width if the strategy with these options was measured on another workload."""
    unknown: float
    """Half-width otherwise."""
    relative: float
    """Half-width for the ratio of two cells of a setting, where shared errors cancel."""

    def of(self, cells: Sequence[CellFacts], effects: LibraryEffects) -> Floats:
        known = np.array([cell.variant in effects.variants for cell in cells])
        return np.where(known, self.variant, self.unknown)


@dataclass(frozen=True)
class CpuCalibration:
    time: CpuTimeConstants
    memory: CpuMemoryConstants
    time_effects: LibraryEffects
    memory_effects: LibraryEffects
    time_spread: CpuSpreads
    memory_spread: CpuSpreads
    cells: int
    workloads: tuple[str, ...]

    def seconds(self, cells: Sequence[CellFacts]) -> Floats:
        step = step_seconds(CellColumns(cells), self.time, self.time_effects.of(cells))
        return step.total * self.time_effects.missed(cells)

    def peak_bytes(self, cells: Sequence[CellFacts]) -> Floats:
        peaks = peak_bytes(CellColumns(cells), self.memory, self.memory_effects.of(cells))
        return peaks * self.memory_effects.missed(cells)


def calibrate_cells(measured: Sequence[Observation]) -> CpuCalibration:
    """Fits all but spreads; raises UsageError with too few cells."""
    if len(measured) < FEWEST:
        raise UsageError(
            f"{len(measured)} measured cells on CPU cores are too few to predict others; measure at"
            f" least {FEWEST}"
        )
    facts = [cell.facts for cell in measured]
    columns, groups = CellColumns(facts), _Groups(facts)
    time, values = fit(
        CpuTimeConstants,
        lambda c, effects: (
            step_seconds(columns, c, groups.added(effects)).total * groups.missed(effects)
        ),
        np.array([cell.seconds for cell in measured]),
        groups.numbers,
        groups.spreads(1.0),
        ORDINARY_ERROR,
    )
    time_effects = groups.effects(values)
    known = [cell for cell in measured if cell.peak_bytes]
    facts = [cell.facts for cell in known]
    of_memory, groups = CellColumns(facts), _Groups(facts)
    memory, values = fit(
        CpuMemoryConstants,
        lambda c, effects: peak_bytes(of_memory, c, groups.added(effects)) * groups.missed(effects),
        np.array([cell.peak_bytes for cell in known], float),
        groups.numbers,
        groups.spreads(0.5),
        ORDINARY_ERROR,
    )
    unknown = CpuSpreads(UNKNOWN_SPREAD, 2 * UNKNOWN_SPREAD, UNKNOWN_SPREAD)
    return CpuCalibration(
        time,
        memory,
        time_effects,
        groups.effects(values),
        unknown,
        unknown,
        len(measured),
        tuple(sorted({cell.facts.workload for cell in measured})),
    )


class _Groups:
    def __init__(self, cells: Sequence[CellFacts]) -> None:
        self._variants = list(dict.fromkeys(cell.variant for cell in cells))
        self._families = list(dict.fromkeys(cell.family for cell in cells))
        self._workloads = workloads = list(dict.fromkeys(cell.workload for cell in cells))
        variants, families = self._variants, self._families
        self._counts = [len(variants), len(families), len(workloads)]
        positions = [
            (
                variants.index(cell.variant),
                len(variants) + families.index(cell.family),
                len(variants) + len(families) + workloads.index(cell.workload),
            )
            for cell in cells
        ]
        self.numbers: Ints = np.array(positions)
        """Positions by cell (shape [cells, 3])."""
        self._with_library = np.array([cell.engine != BASELINE for cell in cells], float)
        self._family_of = {cell.variant: cell.family for cell in cells}

    def spreads(self, share: float) -> Floats:
        each = (share * VARIANT_SPREAD, share * FAMILY_SPREAD, WORKLOAD_SPREAD)
        return np.repeat(each, self._counts)

    def added(self, effects: Floats) -> Floats:
        variants, families, _ = self.numbers.T
        result: Floats = self._with_library * (effects[variants] + effects[families])
        return result

    def missed(self, effects: Floats) -> Floats:
        result: Floats = np.exp(effects[self.numbers[:, 2]])
        return result

    def effects(self, values: Floats) -> LibraryEffects:
        variants, families = self._variants, self._families
        of_family = dict(zip(families, values[len(variants) :].tolist(), strict=False))
        of_variant = zip(variants, values.tolist(), strict=False)
        return LibraryEffects(
            {variant: value + of_family[self._family_of[variant]] for variant, value in of_variant},
            of_family,
            dict(zip(self._workloads, values[sum(self._counts[:2]) :].tolist(), strict=True)),
        )


@dataclass(frozen=True)
class HeldOutCell:
    part: str
    observation: Observation
    seconds: float
    peak_bytes: float
    known: bool
    """Whether other parts contain its variant."""


def leave_out(
    measured: Sequence[Observation], part_of: Callable[[CellFacts], str] | None = None
) -> list[HeldOutCell]:
    """Predicts each part's cells from all others; skips parts with too few.

    `part_of` returns a cell's part, or "" for none; by default its workload without suffixes.
    """
    name = part_of or base_of
    result: list[HeldOutCell] = []
    for part in dict.fromkeys(name(cell.facts) for cell in measured):
        others = [cell for cell in measured if name(cell.facts) != part]
        held_out = [cell for cell in measured if name(cell.facts) == part]
        if not part or len(others) < FEWEST:
            continue
        calibration = calibrate_cells(others)
        facts = [cell.facts for cell in held_out]
        seconds, peaks = calibration.seconds(facts), calibration.peak_bytes(facts)
        for cell, of_time, of_memory in zip(
            held_out, seconds.tolist(), peaks.tolist(), strict=True
        ):
            known = cell.facts.variant in calibration.time_effects.variants
            result.append(HeldOutCell(part, cell, of_time, of_memory, known))
    return result


def base_of(facts: CellFacts) -> str:
    return facts.workload.split("+")[0]


def with_spreads(calibration: CpuCalibration, held: Sequence[HeldOutCell]) -> CpuCalibration:
    peaks = [row for row in held if row.observation.peak_bytes]
    return replace(
        calibration,
        time_spread=_spread(held, [np.log(row.seconds / row.observation.seconds) for row in held]),
        memory_spread=_spread(
            peaks, [np.log(row.peak_bytes / (row.observation.peak_bytes or 1.0)) for row in peaks]
        ),
    )


def _spread(rows: Sequence[HeldOutCell], errors: Sequence[float]) -> CpuSpreads:
    known = [abs(error) for row, error in zip(rows, errors, strict=True) if row.known]
    unknown = [abs(error) for row, error in zip(rows, errors, strict=True) if not row.known]
    settings: dict[str, list[float]] = {}
    for row, error in zip(rows, errors, strict=True):
        if row.known:
            settings.setdefault(row.observation.facts.setting, []).append(error)
    # The median of few errors absorbs part of their spread: one degree of freedom.
    apart = [
        abs(error - float(np.median(of_one))) * (len(of_one) / (len(of_one) - 1)) ** 0.5
        for of_one in settings.values()
        if len(of_one) > 1
        for error in of_one
    ]
    variant = _width(known, UNKNOWN_SPREAD)
    return CpuSpreads(
        variant,
        max(variant, _width(unknown, 2 * UNKNOWN_SPREAD)),
        min(variant, _width(apart, UNKNOWN_SPREAD)),
    )


def _width(errors: Sequence[float], otherwise: float) -> float:
    return float(np.quantile(errors, LEVEL)) if len(errors) >= FEWEST_ERRORS else otherwise


@dataclass(frozen=True)
class CpuScores:
    """Errors of one part's predictions, as shares; None if none can be scored."""

    part: str
    cells: int
    median_time_error: float | None
    median_memory_error: float | None
    known: int
    known_median_time_error: float | None
    known_median_memory_error: float | None


@dataclass(frozen=True)
class FirstChoice:
    """A setting's predicted and measured fastest cells."""

    setting: str
    compared: int
    """Exact cells in the setting."""
    chosen: str
    best: str
    slower: float
    """Share by which the chosen cell's measured step is longer."""
    significant: bool


def score(rows: Sequence[HeldOutCell]) -> list[CpuScores]:
    """Scores each part, and all together if there are several."""
    parts = list(dict.fromkeys(row.part for row in rows))
    scores = [_score(part, [row for row in rows if row.part == part]) for part in parts]
    return [*scores, _score("all", rows)] if len(parts) > 1 else scores


def _score(part: str, rows: Sequence[HeldOutCell]) -> CpuScores:
    known = [row for row in rows if row.known]
    return CpuScores(
        part,
        len(rows),
        _median([row.seconds / row.observation.seconds for row in rows]),
        _median(_of_memory(rows)),
        len(known),
        _median([row.seconds / row.observation.seconds for row in known]),
        _median(_of_memory(known)),
    )


def _of_memory(rows: Sequence[HeldOutCell]) -> list[float]:
    return [row.peak_bytes / peak for row in rows if (peak := row.observation.peak_bytes)]


def _median(ratios: Sequence[float]) -> float | None:
    return float(np.median([abs(ratio - 1) for ratio in ratios])) if ratios else None


def first_choices(
    rows: Sequence[HeldOutCell],
    may_be_fastest: Callable[[Sequence[Observation]], Sequence[Observation]],
) -> list[FirstChoice]:
    """Compares the fastest cells, predicted and measured, of each setting with several.

    `may_be_fastest` returns cells tied with the measured fastest.
    """
    result = []
    for setting in dict.fromkeys(row.observation.facts.setting for row in rows):
        real = [
            row
            for row in rows
            if row.observation.facts.setting == setting
            and row.observation.facts.exact
            and not row.observation.facts.stand_in
            and row.observation.facts.ranks <= row.observation.facts.cores
        ]
        if len(real) < 2:
            continue
        chosen = min(real, key=lambda row: row.seconds).observation
        best = min(real, key=lambda row: row.observation.seconds).observation
        result.append(
            FirstChoice(
                setting,
                len(real),
                chosen.facts.label,
                best.facts.label,
                chosen.seconds / best.seconds - 1,
                not any(chosen is cell for cell in may_be_fastest([r.observation for r in real])),
            )
        )
    return result
