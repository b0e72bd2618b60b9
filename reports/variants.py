"""Models next to variants with fewer trained parameters or lower precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.analysis.cell_result import CellResult
from harness.analysis.setting import setting
from reports.grid import Column, Grid, Td, figure, grid, mebibytes, numeral, throughput_column
from reports.groups import Group
from reports.names import marks
from reports.stacks import Stacks, state_stacks
from reports.text import DASH, deviation, number, percent, plain


@dataclass(frozen=True)
class Variants:
    title: str
    stacks: Stacks | None
    grid: Grid[CellResult]


def variants(cells: Sequence[CellResult]) -> list[Variants]:
    """Returns a comparison per strategy and setting with a variant (`base+suffix`), most variants
    first."""
    by_model: dict[tuple[object, ...], list[CellResult]] = {}
    for cell in cells:
        if cell.status == "ok":
            key = (
                _model(cell),
                cell.cell.label,
                cell.cell.regime,
                *setting(cell.cell, without=["workload"]),
            )
            by_model.setdefault(key, []).append(cell)
    kept = [rows for rows in by_model.values() if any(map(_is_variant, rows))]
    kept.sort(key=lambda rows: -len(rows))
    return [_variants(rows, f"variants-{index}") for index, rows in enumerate(kept)]


def _model(cell: CellResult) -> str:
    return cell.cell.workload.partition("+")[0]


def _is_variant(cell: CellResult) -> bool:
    return "+" in cell.cell.workload


def _variants(cells: Sequence[CellResult], name: str) -> Variants:
    def order(cell: CellResult) -> tuple[bool, int, str]:
        return _is_variant(cell), -(cell.work.trained_parameters or 0), cell.cell.workload

    rows = sorted(cells, key=order)
    title = f"{_model(rows[0])} · {rows[0].cell.label} · {Group(tuple(rows)).title}"
    columns = [
        Column("Trained", "parameters", "", figure("trained_parameters", plain)),
        Column("Of all", "", "", _share),
        Column("Parameters", "MiB", "fullest rank, between steps", mebibytes("parameter_bytes")),
        Column("Optimizer", "MiB", "fullest rank, between steps", mebibytes("optimizer_bytes")),
        Column("Library", "MiB", "fullest rank, between steps", mebibytes("library_bytes")),
        Column("Sent", "MiB per step", "by the rank that sends most", _sent),
        Column("Peak memory", "MiB", "fullest device", mebibytes("peak_memory_bytes")),
        throughput_column(rows),
        Column(
            "Distance to fp32",
            "relative",
            "largest loss deviation from the same training in fp32",
            figure("fp32_loss_deviation", deviation),
        ),
    ]
    table = grid(f"{name}-table", f"Variants of a model, {title}", rows, columns)
    known = [cell for cell in rows if cell.states.state_bytes is not None]
    drawn = state_stacks(known, name, title, _label) if len(known) > 1 else None
    return Variants(title, drawn, table)


def _label(cell: CellResult) -> str:
    return f"{cell.cell.workload}{marks(cell)}"


def _share(cell: CellResult) -> Td:
    if cell.work.trained_parameters is None or not cell.work.parameters:
        return numeral(DASH, "trained_share", None)
    share = cell.work.trained_parameters / cell.work.parameters
    text = percent(share) if share >= 0.1 else f"{number(share * 100, 2)} %"
    return numeral(text, "trained_share", share)


def _sent(cell: CellResult) -> Td:
    if cell.cell.devices < 2:
        return numeral(DASH, "", None)
    return mebibytes("sent_bytes_per_step")(cell)
