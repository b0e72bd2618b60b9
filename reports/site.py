"""Static site of several machines' runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.analysis.cell_result import CellResult
from harness.record.store import Store
from harness.record.trial_status import NOT_LAUNCHED
from harness.spec.errors import DamagedRun, UsageError
from harness.spec.text import plural
from reports import blocks as ui
from reports import overview, write_report, write_whole
from reports.blocks import BREAK, data, phrase, prose, small, strong
from reports.cells_sections import parity_td
from reports.columns import ReportColumn, interval, mebibytes, over_baseline, throughput_of, word
from reports.html_writer import PageHead, PageSection, html_page
from reports.names import device_words, named
from reports.overview import Entry
from reports.run_report import RunReport

FILTERS = {"model": "Model", "machine": "GPU and host", "strategy": "Strategy"}


@dataclass(frozen=True)
class Site:
    index: Path
    runs: tuple[str, ...]
    machines: tuple[str, ...]


def write_site(stores: Sequence[Store], folder: Path, instead: str = "") -> Site:
    """Writes a report per run and the index; returns what it has.

    `instead`: the command that a message about a failure shows.

    Raises UsageError if two different runs share an id, if a run has values that cannot be
    reported, or if a file cannot be written.
    """
    chosen = _distinct(stores)
    shown = [pair for store, new in chosen for pair in _reported(store, new, folder, instead)]
    shown.sort(key=lambda pair: pair[1].run.started_at, reverse=True)
    index = write_whole(page(shown), folder / overview.INDEX, instead)
    machines = dict.fromkeys(_machine(entry) for _, entry in shown)
    return Site(index, tuple(entry.run.run_id for _, entry in shown), tuple(machines))


def _reported(
    store: Store, run_ids: Sequence[str], folder: Path, instead: str
) -> list[tuple[RunReport, Entry]]:
    """Writes these runs' reports and returns them. Others may have recorded any values."""
    try:
        for run_id in run_ids:
            write_report(store.load([run_id], steps=False), folder / f"{run_id}.html", instead)
        pairs = overview.reported(store, folder)
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise DamagedRun(
            f"{str(store.folder)!r} has a run with values that cannot be reported"
            f" ({type(error).__name__})"
        ) from error
    return [pair for pair in pairs if pair[1].run.run_id in run_ids]


def _distinct(stores: Iterable[Store]) -> list[tuple[Store, list[str]]]:
    seen: dict[str, tuple[Store, tuple[object, object]]] = {}
    chosen = []
    for store in stores:
        new = []
        for run_id in store.run_ids():
            row = store.run_row(run_id)
            origin = row["host"], row["started_at"]
            earlier, first = seen.setdefault(run_id, (store, origin))
            if earlier is store:
                new.append(run_id)
            elif first != origin:
                raise UsageError(
                    f"{str(earlier.folder)!r} and {str(store.folder)!r} each have a run {run_id!r},"
                    " but of different machines or times; leave one of them out"
                )
        chosen.append((store, new))
    return chosen


def page(shown: Sequence[tuple[RunReport, Entry]]) -> str:
    by_machine = sorted(shown, key=lambda pair: _machine(pair[1]))
    rows = [row for report, entry in by_machine for row in _rows(report, entry)]
    machines = {_machine(entry) for _, entry in shown}
    facts = [plural(len(shown), "run"), plural(len(machines), "machine"), plural(len(rows), "cell")]
    heads = [ui.ColumnHead(column.title, column.unit, column.tip, "") for column in COLUMNS]
    filters = [
        (name, title, sorted({row.attributes[f"data-{name}"] for row in rows}))
        for name, title in FILTERS.items()
    ]
    table = ui.Table("all", "All cells", "Strategy", heads, rows, "sortable full", filters)
    titles = ("Verdict", "Hardware", "Failures", "Matrix")
    runs = overview.runs_table([entry for _, entry in shown], titles)
    sections = [
        PageSection("runs", "Runs and their advice", [runs]),
        PageSection("cells", "Cells by run", [ui.Paragraph(prose("site"), "small"), table]),
    ]
    head = PageHead("Results of several machines", "What was measured", facts, prose("site footer"))
    return html_page(head, sections)


def _machine(entry: Entry) -> str:
    return f"{entry.hardware}, host {entry.run.host}"


def _throughput(cell: CellResult) -> ui.Td:
    return interval(cell, throughput_of(cell), with_unit=True)


def _name(cell: CellResult, report: str) -> list[ui.Inline]:
    weak = ", weak" if cell.cell.regime == "weak" else ""
    setting = f"{device_words(cell)}, {cell.cell.precision}, batch {cell.cell.global_batch}{weak}"
    name = ui.Span(named(cell), "data", f"{report}#cell-{cell.cell_id}")
    return [name, BREAK, data(setting, "small")]


COLUMNS: tuple[ReportColumn[CellResult], ...] = (
    word("Model", "workload"),
    ReportColumn(
        "Throughput", _throughput, "95 % interval", "of this machine; compare within a run"
    ),
    ReportColumn("Over baseline", over_baseline, "95 % interval", "in the same run and setting"),
    mebibytes("Peak memory", "peak_memory_bytes", "fullest device, largest of the trials"),
    ReportColumn("Parity", parity_td, "or status", "whether it trained the same as the reference"),
)


def _rows(report: RunReport, entry: Entry) -> list[ui.Row]:
    if report.is_search:
        return []
    group = _heading(entry)
    ranked = [cell for one in report.groups for cell in one.rows]
    seen = {cell.cell_id for cell in ranked}
    rest = [cell for cell in report.cells if cell.cell_id not in seen]
    return [
        ui.Row(
            _name(cell, entry.link),
            [column.make(cell) for column in COLUMNS],
            {
                "class": "" if cell.ranked else "unranked",
                "data-model": cell.cell.workload_name,
                "data-machine": _machine(entry),
                "data-strategy": cell.cell.strategy,
            },
            group,
        )
        for cell in (*ranked, *rest)
        if cell.status not in NOT_LAUNCHED
    ]


def _heading(entry: Entry) -> ui.Words:
    run = entry.run
    advice = data(f"{entry.verdict}{', ' if entry.details else ''}{entry.details}")
    return phrase(
        strong(entry.hardware),
        small(f", host {run.host}, {run.started_at:%Y-%m-%d}, PyTorch {run.torch_version}, "),
        ui.Span(f"report of {run.run_id}", "data small", entry.link),
        BREAK,
        advice,
    )
