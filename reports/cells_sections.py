from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from harness.analysis.cell_result import NOT_CHECKED, VERIFIED, CellResult
from harness.analysis.setting import System, grouped
from harness.cell.errors import plural
from harness.record.trial import NO_RESULT, NOT_LAUNCHED, TrialRecord
from reports import blocks as ui
from reports.blocks import BREAK, data, joined, phrase, plain_text, prose, small, strong
from reports.columns import (
    ReportColumn,
    baseline_columns,
    figure,
    hundredths,
    in_milliseconds,
    interval,
    is_adjusted,
    mfu_column,
    milliseconds,
    over_baseline,
    per_gpu_column,
    raw_throughput_columns,
    size_column,
    step_time_column,
    throughput_column,
    throughput_of,
)
from reports.groups import Group
from reports.names import DOT, MAY_BE_FASTEST, STATUS, cell_name, disturbance_legend, flags
from reports.run_report import NOT_REACHED, RunReport
from reports.text import DASH, deviation, exact, number, percent, plain, size

OUTCOMES = {**STATUS, "diverged": "diverged", NOT_REACHED: NOT_REACHED}
_LEFT_OUT = (*NOT_LAUNCHED, NOT_REACHED)
_PARITY = (*VERIFIED, "diverged as expected", "diverged", "unknown", NOT_CHECKED)
_FILTERS = {
    "workload": "Workload",
    "devices": "Devices",
    "precision": "Precision",
    "status": "Status",
}


def cells_blocks(report: RunReport) -> ui.Blocks:
    leading = [report.leading] if report.leading else []
    groups = [*leading, *(group for group in report.groups if group not in leading)]
    ranked = [cell for group in groups for cell in group.rows]
    seen = {cell.cell_id for cell in ranked}
    cells = [*ranked, *(cell for cell in report.cells if cell.cell_id not in seen)]
    if not cells:
        return []
    columns, details = _columns(report.cells), _details(report.cells)
    trials = grouped(report.trials, lambda trial: trial.cell_id)
    rows = [_row(cell, columns, details, trials.get(cell.cell_id, ())) for cell in cells]
    heads = [ui.ColumnHead(column.title, column.unit, column.tip, "") for column in columns]
    filters = [
        (name, title, sorted({row.attributes[f"data-{name}"] for row in rows}, key=_by_size))
        for name, title in _FILTERS.items()
    ]
    meaning = disturbance_legend(cells)
    disturbed = f" ¶: {meaning}; the row’s details say how many." if meaning else ""
    table = ui.Table("all", "All cells", "Strategy", heads, rows, "sortable full", filters)
    return [ui.Paragraph(prose("cells", disturbed=disturbed), "small"), table]


def _by_size(text: str) -> tuple[int, str]:
    return int(text) if text.isdecimal() else 0, text


def _row(
    cell: CellResult,
    columns: Sequence[ReportColumn[CellResult]],
    details: Sequence[ReportColumn[CellResult]],
    trials: Sequence[TrialRecord],
) -> ui.Row:
    attributes = {f"data-{name}": str(cell.column(name)) for name in _FILTERS}
    attributes["id"] = f"cell-{cell.cell_id}"
    attributes["class"] = "" if cell.ranked else "unranked"
    more: list[tuple[str, ui.Text]] = [
        (f"{column.title} ({column.unit})" if column.unit else column.title, text)
        for column in details
        if plain_text(text := column.make(cell).text) not in ("", DASH, NEITHER)
    ]
    more += [(word, data(meaning)) for word, meaning in flags(cell)]
    more += [
        (f"Trial {trial.trial}", _trial(trial)) for trial in sorted(trials, key=lambda t: t.trial)
    ]
    return ui.Row(cell_name(cell), [column.make(cell) for column in columns], attributes, more=more)


def _trial(trial: TrialRecord) -> str:
    if trial.samples_per_second is None:
        return trial.status
    step, peak = in_milliseconds(trial.step_seconds_p50), size(trial.peak_memory_bytes)
    return f"{number(trial.samples_per_second)} samples/s, step p50 {step} ms, peak {peak}"


def _columns(cells: Sequence[CellResult]) -> list[ReportColumn[CellResult]]:
    """Returns the columns that readers look for; a row's details have the others."""
    on_gpus = any(cell.cell.device == "cuda" for cell in cells)
    place = f"among cells that differ only in strategy; {MAY_BE_FASTEST}"
    return [
        ReportColumn("Setting", _setting),
        ReportColumn("Place", _place, "", place),
        per_gpu_column(cells) if on_gpus else throughput_column(cells),
        mfu_column() if on_gpus else step_time_column(),
        *baseline_columns(cells),
        size_column("Peak memory", "peak_memory_bytes", "fullest device, largest of the trials"),
        ReportColumn(
            "Parity", parity_td, "or status", "whether it trained the same as the reference"
        ),
    ]


def _setting(cell: CellResult) -> ui.Td:
    def number_of(field: str) -> ui.Span:
        value = cell.column(field)
        return ui.Span(plain(value), field=field, value=exact(value))

    parts = phrase(data(cell.cell.workload_name), " x", number_of("devices"))
    if cell.cell.nodes > 1:
        parts += [" on ", number_of("nodes"), " nodes"]
    parts += [f" {cell.cell.precision} batch ", number_of("global_batch")]
    return ui.Td([*parts, " weak" if cell.cell.regime == "weak" else ""], "word")


def _details(cells: Sequence[CellResult]) -> list[ReportColumn[CellResult]]:
    raw = ", unadjusted" if is_adjusted(cells) else ""
    uneven = "largest over mean peak of the ranks"
    peak = "as MFU, but over the rate that this card reached in a matrix product"
    return [
        ReportColumn("Throughput", lambda cell: interval(cell, throughput_of(cell), True)),
        ReportColumn("Samples", lambda cell: interval(cell, "samples_per_second", True)),
        *raw_throughput_columns(cells),
        milliseconds(f"Step p50{raw}", "step_seconds_p50"),
        milliseconds(f"Step p95{raw}", "step_seconds_p95"),
        figure("Imbalance of memory", "memory_imbalance", unit="max / mean", tip=uneven),
        ReportColumn("Scaling efficiency", _efficiency, "own / plain"),
        figure("Loss deviation", "parity_max_loss_deviation", deviation, "largest of any step"),
        figure(
            "Update deviation", "parity_max_update_deviation", deviation, "largest of any tensor"
        ),
        figure("Set-up", "setup_seconds", unit="s", tip="process group, model, wrapping"),
        figure("Of measured peak", "matmul_utilization", hundredths, "%", peak),
        figure("Compiling", "compile_seconds", number, "s"),
    ]


NEITHER = f"{DASH} / {DASH}"


def _efficiency(cell: CellResult) -> ui.Td:
    efficiency, single = cell.relative.efficiency_own, cell.relative.efficiency_single
    return ui.Td(
        [
            ui.Span(percent(efficiency), field="efficiency_own", value=exact(efficiency)),
            " / ",
            ui.Span(percent(single), field="efficiency_single", value=exact(single)),
        ]
    )


def _place(cell: CellResult) -> ui.Td:
    place = cell.relative.place
    rank = ui.Span(plain(place), field="place", value=exact(place))
    return ui.Td([rank, f" {DOT}"] if cell.relative.may_be_fastest else rank)


def parity_td(cell: CellResult) -> ui.Td:
    if cell.status not in ("ok", "diverged"):
        return ui.Td(data(STATUS[cell.status]), kind="bad")
    kinds = {"exact": "good", "within tolerance": "good", "diverged": "bad"}
    verdict = cell.parity.verdict or DASH
    return ui.Td(data(verdict), kinds.get(verdict, "word"), tip=cell.parity.reason or "")


def left_out(system: System) -> dict[tuple[str, str], list[str]]:
    """Returns names of the cells that were not launched, by status and reason."""
    names: dict[tuple[str, str], list[str]] = {}
    for cell in system.cells:
        if cell.status in _LEFT_OUT:
            names.setdefault((OUTCOMES[cell.status], cell.reason), []).append(cell.cell.name)
    return names


def not_run(systems_: Iterable[System]) -> dict[str, list[System]]:
    """Returns systems with cells that were not launched, by kind.

    The kinds are `absent` (impossible on this host), `none` (nothing ran for another reason) and
    `part` (some cells ran).
    """
    found: dict[str, list[System]] = {"absent": [], "none": [], "part": []}
    for system in systems_:
        if left_out(system):
            launched = len(system.cells) - system.count(*_LEFT_OUT)
            found["absent" if system.absent else "part" if launched else "none"].append(system)
    return found


def _named_systems(report: RunReport) -> list[System]:
    """Returns the run's systems; empty if its matrix names none."""
    unnamed = all(not cell.cell.system for system in report.systems for cell in system.cells)
    return [] if unnamed else report.systems


def system_status(system: System) -> tuple[str, str, list[str]]:
    """Returns the kind of chip (good, part, bad or absent), its text, and what did not run."""
    not_ok = [cell for cell in system.cells if cell.status != "ok" and not cell.expected]
    broken = len(not_ok) - system.count(*_LEFT_OUT, "interrupted")
    counts = Counter(OUTCOMES[cell.status] for cell in not_ok)
    details = [f"{count} {what}" for what, count in counts.items()]
    if system.absent:
        return "absent", "not on this host", details
    if broken:
        return "bad", "something failed", details
    if not not_ok:
        return "good", "all ran", details
    return "part", "ran in part" if _succeeded(system) else "did not run", details


def _succeeded(system: System) -> int:
    return sum(cell.status == "ok" or cell.expected for cell in system.cells)


def _system_parity(system: System) -> str:
    seen = Counter(
        f"{cell.parity.verdict}{' as expected' if cell.expected else ''}" for cell in system.cells
    )
    return ", ".join(f"{seen[word]} {word}" for word in _PARITY if seen[word])


def best_of(system: System, report: RunReport) -> tuple[Group, CellResult] | None:
    """Returns the system's fastest fairly timed cell, of the leading group if it has one there."""
    ids = {cell.cell_id for cell in system.cells}
    for group in ([report.leading] if report.leading else []) + list(report.groups):
        if cells := [cell for cell in group.rows if cell.cell_id in ids]:
            return group, cells[0]
    return None


def systems_blocks(report: RunReport) -> ui.Blocks:
    systems_ = _named_systems(report)
    if not systems_:
        return []
    blocks: ui.Blocks = []
    if absent := not_run(systems_)["absent"]:
        names = joined([data(system.name) for system in absent])
        blocks.append(ui.Paragraph(prose("not on this host", names=names), "caution"))
    columns = ui.heads(
        "Status: word",
        "Cells (ok / all)",
        "Best throughput (95% interval): prose",
        "Over baseline (95% interval)",
        "Parity: prose",
    )
    rows = [_system_row(system, report) for system in systems_]
    label = "Systems of this run"
    table = ui.Table("", label, "System", columns, rows, "verdicts systems")
    return [*blocks, table, ui.Paragraph(prose("systems"), "small")]


def systems_line(report: RunReport) -> str:
    systems_ = _named_systems(report)
    absent = sum(system.absent for system in systems_)
    missing = f"; {absent} not on this host" if absent else ""
    ran = sum(_succeeded(system) > 0 for system in systems_)
    return f"{ran} of {plural(len(systems_), 'system')} ran{missing}"


def _system_row(system: System, report: RunReport) -> ui.Row:
    kind, text, details = system_status(system)
    status: list[ui.Inline] = [ui.Span(text, f"chip {kind}")]
    if kind != "good" and details:
        status += [BREAK, small(", ".join(details))]
    throughput: list[ui.Inline] = [DASH]
    gain = ui.Td(DASH)
    if best := best_of(system, report):
        group, cell = best
        rate = group.rate(cell)
        ends = "" if rate.low is None else f" ({number(rate.low)} to {number(rate.high)})"
        throughput = [*cell_name(cell), BREAK, f"{number(rate.value)}{ends} {group.unit}"]
        if group is not report.leading:
            throughput += [BREAK, data(group.full_title, "small")]
        gain = over_baseline(cell)
    return ui.Row(
        data(system.name),
        [
            ui.Td(status, "word"),
            ui.Td(f"{_succeeded(system)} / {len(system.cells)}"),
            ui.Td(throughput, "prose"),
            gain,
            ui.Td(_system_parity(system) or DASH, "prose"),
        ],
    )


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
    def order(cell: CellResult) -> tuple[bool, int]:
        return cell.expected, NO_RESULT.index(cell.status)

    failed = sorted((c for c in report.cells if c.status in NO_RESULT), key=order)
    alike = grouped(failed, lambda cell: (cell.status, cell.expected, cell.reason))
    blocks = [_failure_box(cells, report.trials) for cells in alike.values()]
    missing = not_run(report.systems)
    for kind, title, text in _KINDS:
        boxes = [_missing_box(system, kind) for system in missing[kind]]
        blocks.append(ui.Part(title, [ui.Box("missing", boxes)], text))
    return blocks


def _failure_box(alike: Sequence[CellResult], trials: Sequence[TrialRecord]) -> ui.Block:
    cell, *others = alike
    of_cell = [trial for trial in trials if trial.cell_id == cell.cell_id]
    bad = [trial for trial in of_cell if trial.status == cell.status]
    last = max(bad, key=lambda trial: (trial.trial, trial.attempt))
    what = f"{STATUS[cell.status]}{', as expected' if cell.expected else ''}"
    chip = ui.Span(what, f"strong chip{'' if cell.expected else ' bad'}")
    reason = cell.reason or "no reason was recorded"
    count = small(f"({len(bad)} of {plural(len(of_cell), 'trial')})")
    blocks: ui.Blocks = [
        ui.Heading([chip, " ", data(cell.cell.name)]),
        ui.Paragraph([data(reason), " ", count]),
    ]
    names = [data(other.cell.name) for other in others]
    same = ui.Details(f"{plural(len(others), 'other cell')} with this reason", [ui.Bullets(names)])
    logs = (("End of the log", last.log_tail), ("Stacks of the ranks", last.stacks))
    folded = [ui.Details(title, [ui.Pre(text)]) for title, text in logs if text]
    return ui.Box("failure", [*blocks, same, ui.Only("page", folded)])


def _missing_box(system: System, kind: str) -> ui.Block:
    launched = len(system.cells) - system.count(*_LEFT_OUT)
    ran = f"{launched or 'none'} of {plural(len(system.cells), 'cell')} ran"
    chip = ui.Span(ran, f"chip{' bad' if kind == 'absent' else ''}")
    blocks: ui.Blocks = [ui.Heading([data(system.name), " ", chip], 4)]
    for (what, reason), cells in left_out(system).items():
        names = joined([data(name, "small") for name in cells], "; ")
        blocks.append(ui.Paragraph([strong(f"{what}:"), " ", data(reason), BREAK, *names]))
    return ui.Box(kind, blocks)


def cells_line(report: RunReport) -> str:
    return (
        f"{plural(len(report.cells), 'cell')} to sort, filter and compare; {report.ranked} ranked"
    )
