"""GPU activity during a step, and utilisation."""

from __future__ import annotations

from collections.abc import Sequence

from harness.analysis.cell_result import CellResult
from harness.analysis.utilization import PARTS
from reports.grid import Column, Grid, Td, device_columns, numeral, some_grid, word
from reports.groups import by_setting
from reports.profile import ProfiledCell
from reports.text import number, percent, scaled

TERA = 1e12


def utilization(cell: CellResult) -> str:
    """Returns MFU and utilisation of the card's measured rate; empty if both are unknown."""
    shares = []
    if cell.work.mfu is not None:
        of = f"the data sheet's {_teraflops(cell.work.peak_flops_per_second)}"
        shares.append(f"MFU {percent(cell.work.mfu)} of {of}")
    if cell.work.matmul_utilization is not None:
        of = f"the {_teraflops(cell.work.matmul_flops_per_second)}"
        share = percent(cell.work.matmul_utilization)
        shares.append(f"{share} of {of} that this card reached in a matrix product")
    return ", ".join(shares)


def _teraflops(rate: float | None) -> str:
    return f"{scaled(rate, 1 / TERA)} TFLOP/s"


def table(cells: Sequence[ProfiledCell]) -> Grid[ProfiledCell] | None:
    """Returns each part's share of a step on GPUs; None without any."""
    known = [cell for cell in cells if cell.gpu]
    rows = [cell for group in by_setting(known) for cell in group.rows]
    names = [name for name in PARTS if any(c.gpu and name in c.gpu.seconds for c in rows)]
    columns: list[Column[ProfiledCell]] = [
        Column("Workload", "", "", word("workload")),
        *device_columns(rows),
        Column("Step", "ms", "without what the profiler adds", _step),
        *map(_part, names),
    ]
    return some_grid("gpu-table", "What the GPUs do in a step", rows, columns)


def _step(cell: ProfiledCell) -> Td:
    milliseconds = cell.gpu.step_seconds * 1e3 if cell.gpu else None
    return numeral(number(milliseconds), "gpu_step_ms", milliseconds)


def _part(name: str) -> Column[ProfiledCell]:
    def make(cell: ProfiledCell) -> Td:
        share = cell.gpu.shares.get(name) if cell.gpu else None
        return numeral(scaled(share, 100), f"gpu_{name}_percent", share and share * 100)

    return Column(PARTS[name].capitalize(), "%", "", make)
