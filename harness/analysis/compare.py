"""Comparison of two runs, folders, or cells of one run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from harness.analysis.compared_cell import KINDS, ComparedCell, Kind
from harness.analysis.ranking import compare
from harness.analysis.run_comparison import RUNS_METHOD, RunComparison
from harness.analysis.selection import MeasuredCell, RunSelection, joined
from harness.analysis.stats import Comparison, compare_rounds, compare_runs, within_a_run
from harness.record.status import NOT_LAUNCHED
from harness.spec.errors import UsageError


def compare_sides(first: RunSelection, second: RunSelection) -> RunComparison:
    """Compares B (second) with A (first), cell by cell.

    Raises UsageError if they have no cell in common.
    """
    cells = joined([*first.cells, *second.cells])
    before, after = _by_id(cells[: len(first.cells)]), _by_id(cells[len(first.cells) :])
    if not before.keys() & after.keys():
        raise UsageError(
            f"{first.name} and {second.name} have no cell in common, so there is nothing to compare"
        )
    lines = [
        line
        for cell_id in dict.fromkeys((*before, *after))
        for line in _lines(before.get(cell_id, []), after.get(cell_id, []))
    ]
    versions = {
        name: [" or ".join(side.software.get(name, ("none",))) for side in (first, second)]
        for name in dict.fromkeys((*first.software, *second.software))
    }
    differences = tuple(
        f"{name} {was} → {now}" for name, (was, now) in versions.items() if was != now
    )
    return RunComparison(first.name, second.name, _ordered(lines), RUNS_METHOD, differences)


def _by_id(cells: Iterable[MeasuredCell]) -> dict[str, list[MeasuredCell]]:
    by_id: dict[str, list[MeasuredCell]] = {}
    for cell in cells:
        by_id.setdefault(cell.cell_id, []).append(cell)
    return by_id


def compare_cells(
    run: str, pairs: Iterable[tuple[MeasuredCell, MeasuredCell]], names: tuple[str, str]
) -> RunComparison:
    """Compares cells of one run within its rounds."""
    lines = []
    for first, second in pairs:
        line = _line(first, second)
        if not (first.ok and second.ok):
            reason = "; ".join(
                f"{cell.label} {_why(cell)}" for cell in (first, second) if not cell.ok
            )
            line = ComparedCell("not compared", "", first, second, reason)
        name = f"{second.cell_name} against {first.label}"
        lines.append(dataclasses.replace(line, cell_name=name))
    firsts = [line.first.result for line in lines if line.first]
    test = within_a_run(
        any(c.speed.turns for c in firsts), any(c.speed.log_throughput for c in firsts)
    )
    return RunComparison(f"{names[0]} of {run}", f"{names[1]} of {run}", _ordered(lines), test)


def _ordered(lines: Iterable[ComparedCell]) -> tuple[ComparedCell, ...]:
    """Returns regressions first, then by kind, the largest loss first."""

    def order(line: ComparedCell) -> tuple[bool, int, float]:
        ratio = line.throughput.ratio if line.throughput else 0.0
        return not line.regression, KINDS.index(line.kind), ratio

    return tuple(sorted(lines, key=order))


def _why(cell: MeasuredCell) -> str:
    return f"{cell.result.outcome}: {cell.result.outcome_reason}"


def _lines(before: Sequence[MeasuredCell], after: Sequence[MeasuredCell]) -> list[ComparedCell]:
    """Returns a cell's lines, one for each hardware that both sides share."""
    if not after:
        was = before[-1]
        if was.ok:
            return [ComparedCell("missing", was.cell_name, was, None, "not in B")]
        reason = f"{was.result.outcome} in A, not in B"
        return [ComparedCell("not compared", was.cell_name, was, None, reason)]
    now = after[-1]
    if not before:
        reason = "not in A" if now.ok else f"not in A; {_why(now)}"
        return [ComparedCell("added", now.cell_name, None, now, reason)]
    pairs = [(a, b) for b in after for a in before if a.comparable(b)]
    if not pairs:
        was = before[-1]
        reason = was.hardware.difference(now.hardware, now.result.cell.device)
        return [ComparedCell("not compared", now.cell_name, was, now, reason)]
    return [_line(a, b) for a, b in pairs]


def _line(was: MeasuredCell, now: MeasuredCell) -> ComparedCell:
    """Compares one cell on equal hardware: parity and failures first, then speed."""
    if was.ok and now.ok:
        speed = compare(now.result, was.result)
        if speed is None:
            return ComparedCell("not compared", now.cell_name, was, now, "no round in common")
        return ComparedCell(speed.verdict, now.cell_name, was, now, "", speed, _memory(was, now))
    kind, reason = _change(was, now)
    return ComparedCell(kind, now.cell_name, was, now, reason)


def _memory(was: MeasuredCell, now: MeasuredCell) -> Comparison | None:
    """Returns peak memory of B over A; None if unknown or measured differently."""
    if was.result.memory.memory_method != now.result.memory.memory_method:
        return None
    before, after = was.result.memory.peak_by_round, now.result.memory.peak_by_round
    if was.run_id == now.run_id:
        return compare_rounds(after, before)
    return compare_runs([*after.values()], [*before.values()])


def _change(was: MeasuredCell, now: MeasuredCell) -> tuple[Kind, str]:
    """Returns kind and reason if a side is not ok."""
    before, after = was.result.outcome, now.result.outcome
    if now.ok:
        return "mended", f"was {_why(was)}"
    if before == after:
        return "not compared", f"{after} in both: {now.result.outcome_reason}"
    if after == "diverged":
        return "newly diverged", _why(now)
    if after == "unverified" and was.ok:
        return "no longer verified", now.result.outcome_reason
    if after in NOT_LAUNCHED and before not in NOT_LAUNCHED:
        return "newly unavailable", _why(now)
    failing = after not in ("unverified", *NOT_LAUNCHED)
    if failing and before in ("ok", "unverified", *NOT_LAUNCHED):
        return "newly failing", _why(now)
    return "not compared", f"was {before}, now {_why(now)}"
