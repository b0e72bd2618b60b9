from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Generic, TypeAlias, TypeVar

from harness.analysis.cell_result import CellResult
from reports import blocks as ui
from reports.blocks import plain_text
from reports.names import cell_name, unit
from reports.text import DASH, exact, listed, number, percent, plain, scaled, signed, size

AnyRow = TypeVar("AnyRow")
AnyRow_contra = TypeVar("AnyRow_contra", contravariant=True)


@dataclass(frozen=True)
class ReportColumn(Generic[AnyRow_contra]):
    title: str
    make: Callable[[AnyRow_contra], ui.Td]
    unit: str = ""
    tip: str = ""


AnyColumn: TypeAlias = ReportColumn[Any]


def text_cell(text: str) -> ui.Td:
    return ui.Td(ui.Span(text or DASH, "data"), kind="word")


def numeral(text: str, field: str, value: float | None) -> ui.Td:
    return ui.Td(ui.Span(text, field=field, value=exact(value)))


def figure(
    title: str,
    path: str,
    text: Callable[[float | None], str] = number,
    unit: str = "",
    tip: str = "",
) -> AnyColumn:
    """Returns a column of numbers at an attribute path; see `read`."""
    field = path.rpartition(".")[2]

    def make(row: object) -> ui.Td:
        value = read(row, path)
        return numeral(text(value), field, value)

    return ReportColumn(title, make, unit, tip)


def read(row: object, path: str) -> Any:
    """Returns a result's column, or the value at an attribute path such as `gpu.step_seconds`."""
    return row.column(path) if isinstance(row, CellResult) else attrgetter(path)(row)


def milliseconds(title: str, path: str, tip: str = "") -> AnyColumn:
    return figure(title, path, in_milliseconds, "ms", tip)


def in_milliseconds(seconds: float | None) -> str:
    return scaled(seconds, 1e3)


def size_column(title: str, path: str, tip: str = "", unit: str = "") -> AnyColumn:
    """Returns a column of bytes, each in the largest unit that it fills."""
    return figure(title, path, size, unit, tip)


def word(title: str, path: str) -> AnyColumn:
    return ReportColumn(title, lambda row: text_cell(read(row, path) or ""))


def computed(
    title: str,
    field: str,
    value: Callable[[AnyRow], float | None],
    text: Callable[[float | None], str] = number,
    unit: str = "",
    tip: str = "",
) -> ReportColumn[AnyRow]:
    return ReportColumn(title, lambda row: numeral(text(value(row)), field, value(row)), unit, tip)


def interval(cell: CellResult, column: str, with_unit: bool = False) -> ui.Td:
    rate = cell.throughput(column)
    if rate is None:
        return numeral(DASH, column, None)
    parts = [ui.Span(number(rate.value), field=column, value=exact(rate.value))]
    if with_unit:
        parts.append(ui.Span(f" {unit(column)}"))
    if rate.low is not None and rate.high is not None:
        low = ui.Span(number(rate.low), field=f"{column}_low", value=exact(rate.low))
        high = ui.Span(number(rate.high), field=f"{column}_high", value=exact(rate.high))
        parts += [ui.Span(" ["), low, ui.Span(", "), high, ui.Span("]")]
    return ui.Td(parts)


def with_interval(field: str) -> Callable[[CellResult], ui.Td]:
    """Returns a formatter of fractions: `85% (80 to 91)`."""

    def make(cell: CellResult) -> ui.Td:
        value, low, high = (cell.column(f"{field}{end}") for end in ("", "_low", "_high"))
        share = ui.Span(percent(value), field=field, value=exact(value))
        if low is None or high is None:
            return ui.Td(share)
        return ui.Td([share, f" ({low * 100:.0f} to {high * 100:.0f})"])

    return make


def step_seconds(cell: CellResult) -> float | None:
    """Returns the step time that belongs to the throughput, adjusted like it."""
    rate = cell.speed.samples_per_second
    return cell.cell.global_batch / rate if rate else None


def step_time_column() -> ReportColumn[CellResult]:
    tip = "global batch over throughput, so adjusted like it"
    return computed("Step time", "step_seconds", step_seconds, in_milliseconds, "ms", tip)


def baseline_columns(cells: Sequence[CellResult]) -> list[ReportColumn[CellResult]]:
    """Returns a column of throughput relative to the baseline; no column without a baseline."""
    labels = {cell.cell.label for cell in cells if cell.relative.baseline == cell.cell_id}
    if not labels:
        return []
    tip = f"throughput over that of {listed(sorted(labels))} in the same setting, as in the"
    tip += " verdict; the 95% intervals hold for a setting's cells together"
    return [ReportColumn("Over baseline", over_baseline, "95%", tip)]


def over_baseline(cell: CellResult) -> ui.Td:
    """Returns the gain as `+8.6% (+7.2 to +10.0)`."""
    gain = cell.relative
    if gain.baseline == cell.cell_id:
        return numeral("baseline", "over_baseline", gain.over_baseline)
    return gained(gain.over_baseline, gain.over_baseline_low, gain.over_baseline_high)


def gained(ratio: float | None, lowest: float | None, highest: float | None) -> ui.Td:
    """Returns a throughput ratio and its interval as gains."""
    value, low, high = (None if end is None else end - 1 for end in (ratio, lowest, highest))
    share = ui.Span(signed(value), field="over_baseline", value=exact(ratio))
    if low is None or high is None:
        return ui.Td(share)
    return ui.Td([share, f" ({signed(low).removesuffix('%')} to {signed(high).removesuffix('%')})"])


def batch_column() -> ReportColumn[CellResult]:
    def make(cell: CellResult) -> ui.Td:
        value = cell.cell.global_batch
        size = ui.Span(plain(value), field="global_batch", value=exact(value))
        return ui.Td([size, " weak"] if cell.cell.regime == "weak" else size)

    return ReportColumn("Batch", make, "samples", "global batch")


def device_columns(cells: Sequence[CellResult]) -> list[ReportColumn[CellResult]]:
    columns: list[ReportColumn[CellResult]] = [figure("Devices", "devices", plain)]
    if any(cell.cell.nodes > 1 for cell in cells):
        columns.append(figure("Nodes", "nodes", plain, tip="that the devices are on"))
    return columns


def throughput_column(cells: Sequence[CellResult]) -> ReportColumn[CellResult]:
    kinds = {throughput_of(cell) for cell in cells if cell.speed.samples_per_second is not None}
    same = kinds.pop() if len(kinds) == 1 else ""
    return ReportColumn(
        "Throughput",
        lambda cell: interval(cell, same or throughput_of(cell), with_unit=not same),
        unit(same) if same else "",
        "with its 95% interval over trials",
    )


def raw_throughput_columns(cells: Sequence[CellResult]) -> list[ReportColumn[CellResult]]:
    """Returns a column of unadjusted throughput; empty without a control."""
    if not is_adjusted(cells):
        return []
    tokens = all(
        cell.speed.tokens_per_second is not None for cell in cells if cell.speed.samples_per_second
    )
    name = "tokens_per_second" if tokens else "samples_per_second"
    tip = "median over trials, without the control's correction"
    return [figure("Throughput, unadjusted", f"raw_{name}", unit=unit(name), tip=tip)]


def is_adjusted(cells: Iterable[CellResult]) -> bool:
    """Whether the control adjusts throughputs, so that times as measured do not belong to them."""
    speeds = [speed for cell in cells if (speed := cell.speed.log_throughput)]
    return any(speed.control is not None and speed.adjusted for speed in speeds)


def per_gpu_column(cells: Sequence[CellResult]) -> ReportColumn[CellResult]:
    """Returns a column of throughput over the number of devices."""
    tokens = all(throughput_of(cell) == "tokens_per_second" for cell in cells)
    name = "tokens_per_second" if tokens else "samples_per_second"

    def make(cell: CellResult) -> ui.Td:
        rate, devices = cell.throughput(name), cell.cell.devices
        if rate is None:
            return ui.Td(DASH)
        value = rate.value / devices
        share = ui.Span(number(value), field=f"{name}_per_device", value=exact(value))
        if rate.low is None or rate.high is None:
            return ui.Td(share)
        return ui.Td([share, f" [{number(rate.low / devices)}, {number(rate.high / devices)}]"])

    title = "Tokens/s per GPU" if tokens else "Samples/s per GPU"
    return ReportColumn(title, make, "95% interval")


def mfu_column() -> AnyColumn:
    return figure("MFU", "mfu", hundredths, "%", "model FLOPs utilisation")


def hundredths(share: float | None) -> str:
    return scaled(share, 100)


def throughput_of(cell: CellResult) -> str:
    return "samples_per_second" if cell.speed.tokens_per_second is None else "tokens_per_second"


def cell_table(
    name: str,
    label: str,
    cells: Sequence[CellResult],
    columns: Sequence[ReportColumn[CellResult]],
    first: str = "Strategy",
    head: Callable[[CellResult], ui.Text] = cell_name,
) -> ui.Table:
    rows = [
        ui.Row(head(cell), [column.make(cell) for column in columns], {"data-cell": cell.cell_id})
        for cell in cells
    ]
    return table_of(name, label, first, columns, rows)


def table_of(
    name: str,
    label: str,
    first: str,
    columns: Sequence[ReportColumn[AnyRow]],
    rows: Sequence[ui.Row],
) -> ui.Table:
    nonempty = [
        index
        for index in range(len(columns))
        if any(plain_text(row.cells[index].text) not in (DASH, "") for row in rows)
    ]
    heads = []
    for index in nonempty:
        column, kind = columns[index], rows[0].cells[index].kind
        heads.append(ui.ColumnHead(column.title, column.unit, column.tip, kind))
    cut = [ui.Row(row.head, [row.cells[i] for i in nonempty], row.attributes) for row in rows]
    return ui.Table(name, label, first, heads, cut)
