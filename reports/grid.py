"""Tables of cells, with full-precision values for machines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from harness.analysis.cell_result import CellResult
from reports.cautions import Flag, flags
from reports.names import unit
from reports.text import DASH, MIB, exact, number, plain, scaled

AnyCell = TypeVar("AnyCell", bound=CellResult)
AnyCell_contra = TypeVar("AnyCell_contra", bound=CellResult, contravariant=True)
AnyCell_co = TypeVar("AnyCell_co", bound=CellResult, covariant=True)


@dataclass(frozen=True)
class Part:
    """Piece of a table cell; `field`: the result's field that its number is from."""

    text: str
    field: str = ""
    value: str = ""


@dataclass(frozen=True)
class Td:
    parts: tuple[Part, ...]
    kind: str = "number"
    tip: str = ""


def words(text: str) -> Td:
    """Returns a cell of text; unknown if empty."""
    return Td((Part(text or DASH),), kind="word")


def numeral(text: str, field: str, value: float | None) -> Td:
    """Returns a cell of one number: rounded for readers, and in full."""
    return Td((Part(text, field, exact(value)),))


@dataclass(frozen=True)
class Column(Generic[AnyCell_contra]):
    """A column: its heading, and a function from a result to its table cell."""

    title: str
    unit: str
    tip: str
    make: Callable[[AnyCell_contra], Td]


@dataclass(frozen=True)
class Heading:
    title: str
    unit: str
    tip: str


@dataclass(frozen=True)
class TableRow(Generic[AnyCell_co]):
    row: AnyCell_co
    cells: tuple[Td, ...]
    flags: tuple[Flag, ...]


@dataclass(frozen=True)
class Grid(Generic[AnyCell_co]):
    """A small table of cells, without columns that are all unknown."""

    name: str
    """HTML id, unique in the page."""
    label: str
    """Text for screen readers."""
    columns: tuple[Heading, ...]
    rows: tuple[TableRow[AnyCell_co], ...]


def table_row(cell: AnyCell, columns: Sequence[Column[AnyCell]]) -> TableRow[AnyCell]:
    return TableRow(cell, tuple(column.make(cell) for column in columns), flags(cell))


def headings(columns: Sequence[Column[AnyCell]]) -> tuple[Heading, ...]:
    return tuple(Heading(column.title, column.unit, column.tip) for column in columns)


def full_grid(
    name: str, label: str, cells: Sequence[AnyCell], columns: Sequence[Column[AnyCell]]
) -> Grid[AnyCell]:
    return Grid(name, label, headings(columns), tuple(table_row(cell, columns) for cell in cells))


def grid(
    name: str, label: str, cells: Sequence[AnyCell], columns: Sequence[Column[AnyCell]]
) -> Grid[AnyCell]:
    """Returns a table without columns that are all unknown."""
    every = full_grid(name, label, cells, columns)
    kept = [
        column
        for place, column in enumerate(columns)
        if any(row.cells[place].parts[0].text not in (DASH, "") for row in every.rows)
    ]
    return full_grid(name, label, cells, kept)


def some_grid(
    name: str, label: str, cells: Sequence[AnyCell], columns: Sequence[Column[AnyCell]]
) -> Grid[AnyCell] | None:
    """Returns `grid`, or None without cells."""
    return grid(name, label, cells, columns) if cells else None


def figure(field: str, text: Callable[[float | None], str]) -> Callable[[CellResult], Td]:
    return lambda cell: numeral(text(cell.column(field)), field, cell.column(field))


def milliseconds(field: str) -> Callable[[CellResult], Td]:
    """Returns a formatter of seconds in ms."""
    return figure(field, lambda value: scaled(value, 1e3))


def mebibytes(field: str) -> Callable[[CellResult], Td]:
    """Returns a formatter of bytes in MiB."""
    return figure(field, in_mebibytes)


def in_mebibytes(size: float | None) -> str:
    """Formats bytes in MiB; small sizes do not round to zero."""
    if size is not None and 0 < size < MIB / 1000:
        return "< 0.001"
    return scaled(size, 1 / MIB)


def word(field: str) -> Callable[[CellResult], Td]:
    return lambda cell: words(cell.column(field) or "")


def interval(cell: CellResult, column: str, with_unit: bool = False) -> Td:
    rate = cell.throughput(column)
    if rate is None:
        return numeral(DASH, column, None)
    parts = [Part(number(rate.value), column, exact(rate.value))]
    if with_unit:
        parts.append(Part(f" {unit(column)}"))
    if rate.low is not None:
        parts += [Part(" ["), Part(number(rate.low), f"{column}_low", exact(rate.low)), Part(", ")]
        parts += [Part(number(rate.high), f"{column}_high", exact(rate.high)), Part("]")]
    return Td(tuple(parts))


def device_columns(cells: Sequence[CellResult]) -> list[Column[CellResult]]:
    """Returns the column of devices, and of nodes if a cell has several."""
    columns = [Column("Devices", "", "", figure("devices", plain))]
    if any(cell.cell.nodes > 1 for cell in cells):
        columns.append(Column("Nodes", "", "that the devices are on", figure("nodes", plain)))
    return columns


def throughput_column(cells: Sequence[CellResult]) -> Column[CellResult]:
    """Returns the throughput column; the unit is in the heading if all cells share it."""
    kinds = {_throughput(cell) for cell in cells if cell.speed.samples_per_second is not None}
    same = kinds.pop() if len(kinds) == 1 else ""
    return Column(
        "Throughput",
        unit(same) if same else "",
        "with its 95 % interval over trials",
        lambda cell: interval(cell, same or _throughput(cell), with_unit=not same),
    )


def raw_throughput_columns(cells: Sequence[CellResult]) -> list[Column[CellResult]]:
    """Returns throughput before the control's adjustment; empty without a control."""
    if not any(cell.speed.log_throughput and cell.speed.log_throughput.adjusted for cell in cells):
        return []
    tokens = all(
        cell.speed.tokens_per_second is not None for cell in cells if cell.speed.samples_per_second
    )
    name = "tokens_per_second" if tokens else "samples_per_second"
    what = "median over trials, with nothing taken out by the control between the steps"
    return [Column("Unadjusted", unit(name), what, figure(f"raw_{name}", number))]


def _throughput(cell: CellResult) -> str:
    return "samples_per_second" if cell.speed.tokens_per_second is None else "tokens_per_second"
