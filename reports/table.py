"""The full table of all cells and numbers, and the table of scaling efficiency."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from harness.analysis.cell_result import CellResult
from reports.grid import (
    Column,
    Grid,
    Part,
    Td,
    device_columns,
    figure,
    full_grid,
    mebibytes,
    milliseconds,
    raw_throughput_columns,
    some_grid,
    throughput_column,
    word,
)
from reports.groups import RankedGroup
from reports.names import STATUS
from reports.ranked import RankedCell
from reports.text import DASH, deviation, exact, listed, number, percent, plain, scaled


def full_table(cells: Sequence[CellResult], groups: Sequence[RankedGroup]) -> Grid[CellResult]:
    """Returns ranked cells by group, fastest first, then the others."""
    ranked = [cell for group in groups for cell in group.rows]
    seen = {cell.cell_id for cell in ranked}
    rest = [cell for cell in cells if cell.cell_id not in seen]
    return full_grid("all", "All cells", [*ranked, *rest], _columns(cells))


def _columns(cells: Sequence[CellResult]) -> list[Column[CellResult]]:
    columns = [
        Column("Workload", "", "", word("workload")),
        *device_columns(cells),
        Column("Precision", "", "", word("precision")),
        Column("Batch", "samples", "global batch", _batch),
        Column(
            "Place",
            "",
            "within workload, devices, precision, batch and optimizer; ≈ cannot be told apart from"
            " the one above",
            _place,
        ),
        throughput_column(cells),
        *raw_throughput_columns(cells),
        *_baseline_columns(cells),
        Column("Step p50", "ms", "median over the steps", milliseconds("step_seconds_p50")),
        Column(
            "Step p95", "ms", "95th percentile over the steps", milliseconds("step_seconds_p95")
        ),
        Column(
            "Peak memory",
            "MiB",
            "fullest device, largest of the trials",
            mebibytes("peak_memory_bytes"),
        ),
        Column(
            "Imbalance",
            "max / mean",
            "largest over mean peak of the ranks",
            figure("memory_imbalance", number),
        ),
        Column(
            "Efficiency",
            "own / plain",
            "against itself, and against the plain process, on one device",
            _efficiency,
        ),
        Column("Parity", "or status", "is it the same training as the reference?", _parity),
        Column(
            "Loss deviation",
            "relative",
            "largest of any step",
            figure("parity_max_loss_deviation", deviation),
        ),
        Column(
            "Update deviation",
            "relative",
            "largest of any tensor",
            figure("parity_max_update_deviation", deviation),
        ),
        Column(
            "Set-up",
            "s",
            "process group, model, wrapping; slowest rank",
            figure("setup_seconds", number),
        ),
    ]
    if any(cell.work.mfu is not None for cell in cells):
        mfu = figure("mfu", lambda share: scaled(share, 100))
        columns.append(Column("MFU", "%", "model FLOPs utilisation", mfu))
    if any(cell.work.matmul_utilization is not None for cell in cells):
        share = figure("matmul_utilization", lambda share: scaled(share, 100))
        tip = "the same over what this card reached in a matrix product, instead of its data sheet"
        columns.append(Column("Of measured peak", "%", tip, share))
    if any(cell.times.compile_seconds is not None for cell in cells):
        tip = "by torch.compile, before the timed steps; slowest rank"
        columns.append(Column("Compiling", "s", tip, figure("compile_seconds", number)))
    return columns


def _baseline_columns(cells: Sequence[CellResult]) -> list[Column[CellResult]]:
    """Returns throughput relative to the baseline; empty if no cell has one."""
    labels = {cell.cell.label for cell in cells if cell.relative.baseline == cell.cell_id}
    if not labels:
        return []
    tip = f"throughput over that of {listed(sorted(labels))} in the same setting, 95 % interval"
    return [Column("Over baseline", "95 %", tip, _with_interval("over_baseline"))]


def _with_interval(field: str) -> Callable[[CellResult], Td]:
    """Returns a formatter of a fraction with its interval: `85 % (80 to 91)`."""

    def td(cell: CellResult) -> Td:
        value, low, high = (cell.column(f"{field}{end}") for end in ("", "_low", "_high"))
        share = Part(percent(value), field, exact(value))
        if low is None or high is None:
            return Td((share,), "number")
        return Td((share, Part(f" ({low * 100:.0f} to {high * 100:.0f})")), "number")

    return td


def _efficiency(cell: CellResult) -> Td:
    own, single = cell.relative.efficiency_own, cell.relative.efficiency_single
    parts = (
        Part(percent(own), "efficiency_own", exact(own)),
        Part(" / "),
        Part(percent(single), "efficiency_single", exact(single)),
    )
    return Td(parts)


def _place(cell: CellResult) -> Td:
    if not isinstance(cell, RankedCell):
        return Td((Part(DASH, "place", ""),))
    place = Part(str(cell.place), "place", str(cell.place))
    if not cell.same_as_above:
        return Td((place,))
    above = cell.place - 1
    tip = f"cannot be told apart from the one above, place {above}: no difference seen"
    return Td((place, Part(f" ≈ {above}")), tip=tip)


def _parity(cell: CellResult) -> Td:
    if cell.status not in ("ok", "diverged"):
        return Td((Part(STATUS[cell.status]),), kind="bad")
    kinds = {"exact": "good", "within tolerance": "good", "diverged": "bad"}
    verdict = cell.parity.verdict or DASH
    return Td((Part(verdict),), kinds.get(verdict, "word"), tip=cell.parity.reason or "")


def _batch(cell: CellResult) -> Td:
    size = Part(plain(cell.cell.global_batch), "global_batch", exact(cell.cell.global_batch))
    return Td((size, Part(" weak")) if cell.cell.regime == "weak" else (size,))


def scaled_cells(cells: Sequence[CellResult]) -> list[CellResult]:
    """Returns cells on several devices with a counterpart on one."""
    return [
        cell
        for cell in cells
        if cell.cell.devices > 1
        and (
            cell.relative.efficiency_own is not None or cell.relative.efficiency_single is not None
        )
    ]


def efficiency(cells: Sequence[CellResult]) -> Grid[CellResult] | None:
    """Returns scaling efficiency of multi-device cells, best first."""

    def order(cell: CellResult) -> tuple[str, int, float]:
        own = cell.relative.efficiency_own
        return cell.cell.workload, cell.cell.devices, -(-1.0 if own is None else own)

    shown = sorted(scaled_cells(cells), key=order)
    columns = [
        Column("Workload", "", "", word("workload")),
        *device_columns(shown),
        Column("Scaling", "", "", word("regime")),
        Column("Precision", "", "", word("precision")),
        Column("Batch", "samples", "global batch", _batch),
        Column("Against itself", "on one device, 95 %", "", _with_interval("efficiency_own")),
        Column(
            "Against the plain process",
            "on one device, 95 %",
            "",
            _with_interval("efficiency_single"),
        ),
    ]
    return some_grid("efficiency", "Scaling efficiency", shown, columns)
