from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harness.analysis.cell_result import CellResult
from harness.analysis.setting import System, grouped
from harness.record.trial import TrialRecord
from harness.record.trial_status import NO_RESULT, NOT_LAUNCHED
from harness.spec.text import plural
from reports import blocks as ui
from reports.blocks import BREAK, data, joined, phrase, prose, small, strong
from reports.columns import (
    ReportColumn,
    baseline_columns,
    device_columns,
    figure,
    mebibytes,
    milliseconds,
    over_baseline,
    raw_throughput_columns,
    throughput_column,
    word,
)
from reports.groups import Group, RankedCell, RankedGroup, fairly_timed
from reports.names import STATUS, cell_name, disturbance_legend, flags
from reports.run_report import NOT_REACHED, RunReport
from reports.speed_sections import batch_column
from reports.text import DASH, deviation, exact, number, percent, scaled

WORDS = {**STATUS, "diverged": "diverged", NOT_REACHED: NOT_REACHED}
_LEFT_OUT = (*NOT_LAUNCHED, NOT_REACHED)
_PARITY = ("exact", "within tolerance", "diverged as expected", "diverged", "unknown")
_FILTERS = {
    "workload": "Workload",
    "devices": "Devices",
    "precision": "Precision",
    "status": "Status",
}


def cells_blocks(report: RunReport) -> ui.Blocks:
    ranked = [cell for group in report.groups for cell in group.rows]
    seen = {cell.cell_id for cell in ranked}
    cells = [*ranked, *(cell for cell in report.cells if cell.cell_id not in seen)]
    if not cells:
        return []
    columns = _columns(report.cells)
    rows = [_row(cell, columns) for cell in cells]
    heads = [ui.ColumnHead(column.title, column.unit, column.tip, "") for column in columns]
    filters = [
        (name, title, sorted({row.attributes[f"data-{name}"] for row in rows}, key=_by_size))
        for name, title in _FILTERS.items()
    ]
    meaning = disturbance_legend(cells)
    disturbed = f" ¶: {meaning}; the last column says how many." if meaning else ""
    heads.append(ui.ColumnHead("Flags", kind=""))
    table = ui.Table("all", "All cells", "Strategy", heads, rows, "sortable full", filters)
    return [ui.Paragraph(prose("cells", disturbed=disturbed), "small"), table]


def _by_size(text: str) -> tuple[int, str]:
    return int(text) if text.isdecimal() else 0, text


def _row(cell: CellResult, columns: Sequence[ReportColumn[CellResult]]) -> ui.Row:
    attributes = {f"data-{name}": str(cell.column(name)) for name in _FILTERS}
    attributes["id"] = f"cell-{cell.cell_id}"
    attributes["class"] = "" if cell.ranked else "unranked"
    return ui.Row(
        cell_name(cell), [*(column.make(cell) for column in columns), _flags(cell)], attributes
    )


def _flags(cell: CellResult) -> ui.Td:
    chips = [phrase(strong(flag.word), " ", data(flag.meaning)) for flag in flags(cell)]
    return ui.Td(joined(chips, BREAK), kind="flags")


def _columns(cells: Sequence[CellResult]) -> list[ReportColumn[CellResult]]:
    place = "among cells that differ only in strategy; ≈ tied with the one above"
    columns: list[ReportColumn[CellResult]] = [
        word("Workload", "workload"),
        *device_columns(cells),
        word("Precision", "precision"),
        batch_column(),
        ReportColumn("Place", _place, "", place),
        throughput_column(cells),
        *raw_throughput_columns(cells),
        *baseline_columns(cells),
        milliseconds("Step p50", "step_seconds_p50", "median over the steps"),
        milliseconds("Step p95", "step_seconds_p95", "95th percentile over the steps"),
        mebibytes("Peak memory", "peak_memory_bytes", "fullest device, largest of the trials"),
        figure(
            "Imbalance",
            "memory_imbalance",
            unit="max / mean",
            tip="largest over mean peak of the ranks",
        ),
        ReportColumn(
            "Efficiency",
            _efficiency,
            "own / plain",
            "throughput per device over one device's: with this strategy, and the plain process",
        ),
        ReportColumn(
            "Parity", parity_td, "or status", "whether it trained the same as the reference"
        ),
        figure(
            "Loss deviation",
            "parity_max_loss_deviation",
            deviation,
            "relative",
            "largest of any step",
        ),
        figure(
            "Update deviation",
            "parity_max_update_deviation",
            deviation,
            "relative",
            "largest of any tensor",
        ),
        figure(
            "Set-up", "setup_seconds", unit="s", tip="process group, model, wrapping; slowest rank"
        ),
    ]
    return columns + [column for path, column in _gpu_columns() if _any(cells, path)]


def _any(cells: Sequence[CellResult], path: str) -> bool:
    return any(cell.column(path) is not None for cell in cells)


def _gpu_columns() -> list[tuple[str, ReportColumn[CellResult]]]:
    peak = "as MFU, but over the rate that this card reached in a matrix product"
    compiling = "by torch.compile, before the timed steps; slowest rank"
    return [
        ("mfu", figure("MFU", "mfu", _hundredths, "%", "model FLOPs utilisation")),
        (
            "matmul_utilization",
            figure("Of measured peak", "matmul_utilization", _hundredths, "%", peak),
        ),
        ("compile_seconds", figure("Compiling", "compile_seconds", number, "s", compiling)),
    ]


def _hundredths(share: float | None) -> str:
    return scaled(share, 100)


def _efficiency(cell: CellResult) -> ui.Td:
    own, single = cell.relative.efficiency_own, cell.relative.efficiency_single
    return ui.Td(
        [
            ui.Span(percent(own), field="efficiency_own", value=exact(own)),
            " / ",
            ui.Span(percent(single), field="efficiency_single", value=exact(single)),
        ]
    )


def _place(cell: CellResult) -> ui.Td:
    if not isinstance(cell, RankedCell):
        return ui.Td(ui.Span(DASH, field="place"))
    place = ui.Span(str(cell.place), field="place", value=str(cell.place))
    if not cell.same_as_above:
        return ui.Td(place)
    above = cell.place - 1
    tip = f"tied with place {above}: either may be the fastest"
    return ui.Td([place, f" ≈ {above}"], tip=tip)


def parity_td(cell: CellResult) -> ui.Td:
    if cell.status not in ("ok", "diverged"):
        return ui.Td(data(STATUS[cell.status]), kind="bad")
    kinds = {"exact": "good", "within tolerance": "good", "diverged": "bad"}
    verdict = cell.parity.verdict or DASH
    return ui.Td(data(verdict), kinds.get(verdict, "word"), tip=cell.parity.reason or "")


@dataclass(frozen=True)
class Reason:
    what: str
    reason: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Missing:
    system: str
    launched: int
    total: int
    kind: str
    """`absent`: impossible on this host; `none`: nothing ran for another reason; `part`: some
    ran."""
    reasons: tuple[Reason, ...]


@dataclass(frozen=True)
class Best:
    row: RankedCell
    value: str
    setting: str


@dataclass(frozen=True)
class SystemOverview:
    name: str
    ok: int
    total: int
    best: Best | None
    parity: str
    kind: str
    """good, part, bad or absent."""
    status: str
    details: tuple[str, ...] = ()


def not_run(systems_: Iterable[System]) -> list[Missing]:
    kinds = ("absent", "none", "part")
    missing = [row for system in systems_ if (row := _missing(system))]
    return sorted(missing, key=lambda system: kinds.index(system.kind))


def _missing(system: System) -> Missing | None:
    names: dict[tuple[str, str], list[str]] = {}
    for cell in system.cells:
        if cell.status in _LEFT_OUT:
            names.setdefault((WORDS[cell.status], cell.reason), []).append(cell.cell.name)
    if not names:
        return None
    launched = len(system.cells) - system.count(*_LEFT_OUT)
    kind = "absent" if system.absent else "part" if launched else "none"
    reasons = tuple(Reason(what, why, tuple(cells)) for (what, why), cells in names.items())
    return Missing(system.name, launched, len(system.cells), kind, reasons)


def overview(
    systems_: Sequence[System], groups: Sequence[RankedGroup], leading: RankedGroup | None
) -> list[SystemOverview]:
    if all(not cell.cell.system for system in systems_ for cell in system.cells):
        return []
    return [_system_line(system, groups, leading) for system in systems_]


def _system_line(
    system: System, groups: Sequence[RankedGroup], leading: RankedGroup | None
) -> SystemOverview:
    total = len(system.cells)
    not_ok = [cell for cell in system.cells if cell.status != "ok" and not cell.expected]
    ok = total - len(not_ok)
    broken = len(not_ok) - system.count(*_LEFT_OUT, "interrupted")
    counts = Counter(WORDS[cell.status] for cell in not_ok)
    if system.absent:
        kind, status = "absent", "not on this host"
    elif broken:
        kind, status = "bad", "something failed"
    elif not not_ok:
        kind, status = "good", "all ran"
    else:
        kind, status = "part", "ran in part" if ok else "did not run"
    details = tuple(f"{count} {what}" for what, count in counts.items())
    best, parity = _best_of(system, groups, leading), _system_parity(system)
    return SystemOverview(system.name, ok, total, best, parity, kind, status, details)


def _system_parity(system: System) -> str:
    seen = Counter(
        f"{cell.parity.verdict}{' as expected' if cell.expected else ''}" for cell in system.cells
    )
    return ", ".join(f"{seen[word]} {word}" for word in _PARITY if seen[word])


def _best_of(
    system: System, groups: Sequence[RankedGroup], leading: RankedGroup | None
) -> Best | None:
    own = {cell.cell_id for cell in system.cells}
    for group in ([leading] if leading else []) + list(groups):
        cells = tuple(cell for cell in group.rows if cell.cell_id in own)
        if not cells:
            continue
        best = fairly_timed(Group(cells))[0]
        rate = group.rate(best)
        half = rate.half_width
        interval = "" if half is None else f" ± {number(half, 2)}"
        value = f"{number(rate.value)}{interval} {group.unit}"
        return Best(best, value, "" if group is leading else group.full_title)
    return None


def systems_blocks(report: RunReport) -> ui.Blocks:
    lines = overview(report.systems, report.groups, report.leading)
    if not lines:
        return []
    absent = [missing.system for missing in not_run(report.systems) if missing.kind == "absent"]
    blocks: ui.Blocks = []
    if absent:
        names = joined([data(name) for name in absent])
        blocks.append(ui.Paragraph(prose("not on this host", names=names), "caution"))
    columns = ui.heads(
        "Status: word",
        "Cells (ok / all)",
        "Best throughput (± 95 % interval): prose",
        "Over baseline (95 % interval)",
        "Parity: prose",
    )
    rows = [_system_row(line) for line in lines]
    label = "Systems of this run"
    table = ui.Table("", label, "System", columns, rows, "verdicts systems")
    return [*blocks, table, ui.Paragraph(prose("systems"), "small")]


def _system_row(line: SystemOverview) -> ui.Row:
    status: list[ui.Inline] = [ui.Span(line.status, f"chip {line.kind}")]
    if line.kind != "good" and line.details:
        status += [BREAK, small(", ".join(line.details))]
    best: list[ui.Inline] = [DASH]
    if line.best:
        best = [*cell_name(line.best.row), BREAK, line.best.value]
        best += [BREAK, data(line.best.setting, "small")] if line.best.setting else []
    return ui.Row(
        data(line.name),
        [
            ui.Td(status, "word"),
            ui.Td(f"{line.ok} / {line.total}"),
            ui.Td(best, "prose"),
            over_baseline(line.best.row) if line.best else ui.Td(DASH),
            ui.Td(line.parity or DASH, "prose"),
        ],
    )


@dataclass(frozen=True)
class Failure:
    row: CellResult
    what: str
    trials: str
    log: str
    stacks: str


def failures(cells: Iterable[CellResult], trials: Sequence[TrialRecord]) -> list[Failure]:
    found = [_failure(cell, trials) for cell in cells if cell.status in NO_RESULT]
    return sorted(found, key=lambda f: (f.row.expected, NO_RESULT.index(f.row.status)))


def _failure(cell: CellResult, trials: Sequence[TrialRecord]) -> Failure:
    own = [trial for trial in trials if trial.cell_id == cell.cell_id]
    bad = [trial for trial in own if trial.status == cell.status]
    last = max(bad, key=lambda trial: (trial.trial, trial.attempt))
    count = f"{len(bad)} of {plural(len(own), 'trial')}"
    return Failure(cell, STATUS[cell.status], count, last.log_tail, last.stacks)


_KINDS = (
    (
        "absent",
        "Not on this host",
        "No cell of these systems could run here. Each reason says what would change it.",
    ),
    ("none", "Nothing ran", "No cell of these systems was launched."),
    ("part", "Ran in part", "Other cells of these systems ran."),
)


def failures_blocks(report: RunReport) -> ui.Blocks:
    found = failures(report.cells, report.trials)
    alike = grouped(found, lambda one: (one.what, one.row.expected, one.row.reason))
    blocks = list(map(_failure_box, alike.values()))
    missing = not_run(report.systems)
    for kind, title, text in _KINDS:
        boxes = [_missing_box(system) for system in missing if system.kind == kind]
        blocks.append(ui.Part(title, [ui.Box("missing", boxes)], text))
    return blocks


def _failure_box(alike: Sequence[Failure]) -> ui.Block:
    failure, *others = alike
    row = failure.row
    what = f"{failure.what}{', as expected' if row.expected else ''}"
    chip = ui.Span(what, f"strong chip{'' if row.expected else ' bad'}")
    reason = row.reason or "no reason was recorded"
    blocks: ui.Blocks = [
        ui.Heading([chip, " ", data(row.cell.name)]),
        ui.Paragraph([data(reason), " ", small(f"({failure.trials})")]),
    ]
    names = [data(other.row.cell.name) for other in others]
    same = ui.Details(f"{plural(len(others), 'other cell')} with this reason", [ui.Bullets(names)])
    logs = (("End of the log", failure.log), ("Stacks of the ranks", failure.stacks))
    folded = [ui.Details(title, [ui.Pre(text)]) for title, text in logs if text]
    return ui.Box("failure", [*blocks, same, ui.Only("page", folded)])


def _missing_box(missing: Missing) -> ui.Block:
    count = str(missing.launched or "none")
    ran = f"{count} of {missing.total} cell{'' if missing.total == 1 else 's'} ran"
    chip = ui.Span(ran, f"chip{' bad' if missing.kind == 'absent' else ''}")
    blocks: ui.Blocks = [ui.Heading([data(missing.system), " ", chip], 4)]
    for reason in missing.reasons:
        names = joined([data(name, "small") for name in reason.names], "; ")
        words = [strong(f"{reason.what}:"), " ", data(reason.reason), BREAK, *names]
        blocks.append(ui.Paragraph(words))
    return ui.Box(missing.kind, blocks)
