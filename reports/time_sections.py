"""Time: parts of a profiled step, bytes sent, bubbles of pipelines, experts, checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence

from harness.analysis.cell_result import CellResult
from harness.analysis.summary import PARTS
from harness.cell.errors import plural
from harness.cell.schedules import bubble_theory, schedule_of
from harness.record.profile_record import COMPONENTS, SPLIT
from reports import blocks as ui
from reports.bar_chart import MOST_ROWS, Bar, Bars, bars_of
from reports.blocks import phrase, prose
from reports.columns import (
    AnyColumn,
    ReportColumn,
    cell_table,
    computed,
    figure,
    milliseconds,
    size_column,
    text_cell,
    throughput_column,
    word,
)
from reports.groups import Group, by_setting
from reports.names import chart_name, main_workload, marks, named, notes_for
from reports.run_facts import StepProfile
from reports.run_report import RunReport
from reports.sections import Numbers, Panel
from reports.text import DASH, listed, number, percent, plain, scaled, signed, size

LABELS = {
    "compute": "compute",
    "communication": "exposed communication",
    "bubble": "pipeline bubble",
    "offload": "offload I/O",
}
AT_BOUND = 1.02


def _by_setting(profiles: Iterable[StepProfile]) -> list[list[StepProfile]]:
    by_id = {profile.result.cell_id: profile for profile in profiles}
    return [
        sorted(
            (by_id[cell.cell_id] for cell in group.rows),
            key=lambda cell_id_key: cell_id_key.profiled_step,
        )
        for group in by_setting([profile.result for profile in by_id.values()])
    ]


def part_bars(report: RunReport) -> list[Bars]:
    groups = _by_setting(report.profiled)
    main = groups[0][0].result.cell.workload_name if groups else ""
    return [
        _part_bars(group, f"parts-{i}", Group((group[0].result,)).short_title(main))
        for i, group in enumerate(groups)
    ]


def _part_bars(profiles: Sequence[StepProfile], name: str, title: str) -> Bars:
    bars = list(map(_part_bar, profiles[:MOST_ROWS]))
    return bars_of(
        name,
        title,
        "mean of the ranks (ms)",
        profiles,
        _part_bar,
        f"Parts of a profiled step of {plural(len(profiles), 'cell')}, {title}, shortest first",
        notes_for([profile.result for profile in profiles]),
        kinds=COMPONENTS,
        limit=max(max(bar.value or 0.0, bar.target or 0.0) for bar in bars) * 1.04,
    )


def _part_bar(profile: StepProfile) -> Bar:
    slow = "" if profile.straggler is None else f" · rank {profile.straggler} slow"
    parts = tuple(max(0.0, (profile.parts[name] or 0.0) * 1e3) for name in COMPONENTS)
    return Bar(
        named(profile.result),
        sum(parts),
        f"{number(profile.profiled_step * 1e3)} ms{slow}",
        marks="†" if profile.result.placement.stand_in is not None else "",
        target=profile.plain_step * 1e3,
        failed=bool(slow),
        parts=parts,
    )


def _profiles(
    measured: Callable[[StepProfile], object] = lambda profile: True,
) -> Callable[[RunReport], list[StepProfile]]:
    """Returns a function that lists a report's measured profiles by setting."""

    def rows(report: RunReport) -> list[StepProfile]:
        chosen = [profile for profile in report.profiled if measured(profile)]
        return [profile for group in _by_setting(chosen) for profile in group]

    return rows


def _in_milliseconds(
    title: str, field: str, seconds: Callable[[StepProfile], float | None], tip: str
) -> ReportColumn[StepProfile]:
    def value(profile: StepProfile) -> float | None:
        found = seconds(profile)
        return found and found * 1e3

    return computed(title, field, value, number, "ms", tip)


def _part_column(name: str) -> ReportColumn[StepProfile]:
    tips = {
        "overlapped": "communication in flight during other parts; not included in the sum",
        "operators": "part of the step during which an operator ran",
    }
    title = LABELS.get(name, name).capitalize()
    return _in_milliseconds(title, f"{name}_ms", lambda p: p.parts[name], tips.get(name, ""))


def _rank(rank: float | None) -> str:
    return DASH if rank is None else plain(rank)


def _peak_column(kind: str, title: str = "", tip: str = "") -> ReportColumn[StepProfile]:
    title = title or kind.capitalize()
    return computed(title, f"peak_{kind}", lambda p: p.peak[kind], size, tip=tip)


def _gpu_columns(profiles: Sequence[StepProfile]) -> list[AnyColumn]:
    names = [name for name in PARTS if any(p.gpu and name in p.gpu.seconds for p in profiles)]

    def share(name: str) -> ReportColumn[StepProfile]:
        def value(profile: StepProfile) -> float | None:
            part = profile.gpu.shares.get(name) if profile.gpu else None
            return part and part * 100

        return computed(PARTS[name].capitalize(), f"gpu_{name}_percent", value, unit="%")

    tip = "without the profiler's overhead"
    step = _in_milliseconds(
        "Step", "gpu_step_ms", lambda p: p.gpu.step_seconds if p.gpu else None, tip
    )
    return [step, *map(share, names)]


PARTS_TABLE: Numbers[RunReport] = Numbers(
    "parts-table",
    "Parts of a step",
    _profiles(),
    lambda _: [
        *map(_part_column, (*COMPONENTS, "overlapped", "operators")),
        _in_milliseconds(
            "Step", "profiled_ms", lambda p: p.profiled_step, "profiled, slowest rank"
        ),
        _in_milliseconds("Plain step", "plain_ms", lambda p: p.plain_step, "without the profiler"),
        figure("Straggler", "straggler", _rank, "rank", "slower than the others by more than 15%"),
        size_column(
            "Must send", "logical_bytes", "by theory, for the collectives it calls", "MiB per rank"
        ),
        figure("Off the formula", "off_theory", signed, tip="of the strategy"),
        figure(
            "Sent, off the algorithm",
            "off_algorithm",
            signed,
            tip="bytes on the sockets over those of the backend's algorithm",
        ),
    ],
)
PEAK_TABLE: Numbers[RunReport] = Numbers(
    "peak-table",
    "What fills the memory at the peak",
    _profiles(lambda profile: profile.peak["tracked"] is not None),
    lambda _: [
        *map(_peak_column, SPLIT),
        _peak_column("tracked", "Tensors", "at their peak"),
        size_column("Private memory", "private", "peak of the same step as trials measure it"),
    ],
    folded="What fills the memory at the peak",
)
GPU_TABLE: Numbers[RunReport] = Numbers(
    "gpu-table",
    "What the GPUs do in a step",
    _profiles(lambda profile: profile.gpu),
    _gpu_columns,
    folded="What the GPUs do in a step",
    note="gpu",
)
PART_PANELS: tuple[Panel[RunReport], ...] = (
    Panel(part_bars, "legend parts", [PARTS_TABLE, PEAK_TABLE, GPU_TABLE], note="parts"),
)


def parts_line(report: RunReport) -> str:
    profile = report.profiled[0]
    whole = profile.profiled_step or 1.0
    shares = [f"{percent((profile.parts[kind] or 0.0) / whole)} {LABELS[kind]}" for kind in LABELS]
    return f"of a step of {named(profile.result)}, {listed(shares[:2])}"


def utilization(cell: CellResult) -> str:
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
    return f"{scaled(rate, 1e-12)} TFLOP/s"


def with_traffic(cells: Sequence[CellResult]) -> list[CellResult]:
    return [
        cell
        for cell in cells
        if cell.status == "ok"
        and cell.traffic.sent_bytes_per_step is not None
        and (cell.work.trained_parameters or 0) > 0
        and (cell.placement.processes or 1) > 1
    ]


def sent(cell: CellResult) -> float:
    """Returns the busiest rank's bytes per step over the fp32 gradients'."""
    return (cell.traffic.sent_bytes_per_step or 0.0) / (4.0 * (cell.work.trained_parameters or 1))


def bound(cell: CellResult) -> float | None:
    """Returns a ring all-reduce's cost, 2 (N - 1) / N (Patarasuk and Yuan, JPDC 69, 2009).

    None unless each of N ranks has the whole model.
    """
    ranks = cell.placement.data_parallel or 1
    if ranks != cell.cell.devices or ranks < 2:
        return None
    return 2 * (ranks - 1) / ranks


def traffic_bars(report: RunReport) -> list[Bars]:
    """Returns a chart per setting; none for a search, whose cells have models of their own."""
    if report.is_search:
        return []

    def bar(cell: CellResult) -> Bar:
        limit, value = bound(cell), sent(cell)
        strong = limit is not None and value <= limit * AT_BOUND
        text = f"{number(value)} x"
        return Bar(named(cell), value, text, strong=strong, marks=marks(cell), target=limit)

    groups = [group for group in by_setting(with_traffic(report.cells)) if len(group.rows) > 1]
    titles = [group.short_title(groups[0].workload) for group in groups]
    return [
        bars_of(
            f"traffic-{i}",
            title,
            "sent per step (multiples of the gradients)",
            sorted(group.rows, key=sent),
            bar,
            f"Bytes sent per rank and step in multiples of the gradients, {title}, least first",
            notes_for(group.rows),
        )
        for i, (group, title) in enumerate(zip(groups, titles, strict=True))
    ]


def _over_bound(cell: CellResult) -> float | None:
    limit = bound(cell)
    return None if limit is None else sent(cell) / limit


def bounds_in_words(cells: Sequence[CellResult]) -> str:
    """Returns the bound by data-parallel ranks: `1.00 x for 2 ranks, 1.50 x for 4`."""
    limits = {
        cell.placement.data_parallel or 1: limit
        for cell in with_traffic(cells)
        if (limit := bound(cell)) is not None
    }
    return ", ".join(f"{number(limits[n])} x for {plural(n, 'rank')}" for n in sorted(limits))


def _traffic_note(report: RunReport) -> ui.Text:
    limits = bounds_in_words(report.cells)
    return phrase(prose("traffic"), phrase(" ", prose("ring", limits=limits)) if limits else "")


TRAFFIC: Numbers[RunReport] = Numbers(
    "traffic-table",
    "Bytes sent per rank and step",
    lambda report: [
        cell
        for group in by_setting(with_traffic(report.cells))
        for cell in sorted(group.rows, key=sent)
    ],
    lambda _: [
        size_column("Sent", "sent_bytes_per_step", "by the rank that sends most", "per step"),
        computed(
            "Sent",
            "sent_over_gradients",
            sent,
            unit="x gradients",
            tip="4 bytes for each trained parameter",
        ),
        computed(
            "Ring bound",
            "ring_bound",
            bound,
            unit="x gradients",
            tip="2 (N - 1) / N for N data-parallel ranks",
        ),
        computed("Sent / bound", "sent_over_bound", _over_bound),
    ],
    first=lambda _: [
        word("Workload", "workload"),
        figure("Ranks", "processes", plain),
        word("Precision", "precision"),
    ],
)
OFFLOAD: Numbers[RunReport] = Numbers(
    "offload-table",
    "States on a disk",
    lambda report: [
        cell
        for cell in report.cells
        if cell.status == "ok" and cell.traffic.offload_kept_bytes is not None
    ],
    lambda rows: [
        size_column(
            "Read", "offload_read_bytes_per_step", "from the disk, all ranks", "MiB per step"
        ),
        size_column(
            "Written", "offload_written_bytes_per_step", "to the disk, all ranks", "MiB per step"
        ),
        size_column("In the folder", "offload_kept_bytes", "size of its files"),
        size_column("In memory", "state_bytes", "states of the fullest rank between steps"),
        size_column("Peak", "peak_memory_bytes", "of the fullest device"),
        throughput_column(rows),
    ],
    folded="",
)
TRAFFIC_PANELS: tuple[Panel[RunReport], ...] = (
    Panel(traffic_bars, tables=[TRAFFIC], note=_traffic_note),
    Panel(tables=[OFFLOAD], title="States on a disk", note="disk"),
)


def traffic_line(report: RunReport) -> str:
    sending = {cell.cell_id for cell in with_traffic(report.cells)}
    return "a rank sends " + report.from_to(
        lambda cell: sent(cell) if cell.cell_id in sending else None,
        lambda multiple: f"{number(multiple)} x the gradients",
    )


def _waiting(report: RunReport) -> list[CellResult]:
    """Returns cells with a measured bubble, by schedule, the fewest micro-batches first."""
    cells = [cell for cell in report.cells if bubble_of(cell) is not None]
    return sorted(cells, key=lambda c: (c.cell.workload, schedule_of(c.cell), c.cell.micro_batches))


def bubble_of(cell: CellResult) -> tuple[float, float | None] | None:
    """Returns the measured bubble and its theory; None for cells without a pipeline."""
    stages = cell.placement.pipeline_parallel or 0
    if cell.times.bubble_fraction is None or stages < 2:
        return None
    return cell.times.bubble_fraction, bubble_theory(cell.cell, stages)


def bubble_bars(report: RunReport) -> list[Bars]:
    """Charts measured and theoretical bubbles in percent."""
    measured = _waiting(report)
    if not measured:
        return []
    main = main_workload(report.cells)

    def bar(cell: CellResult) -> Bar:
        share, theory = bubble_of(cell) or (0.0, None)
        target = None if theory is None else theory * 100
        text = percent(share) + ("" if theory is None else f" ({percent(theory)})")
        return Bar(chart_name(cell, main), share * 100, text, marks=marks(cell), target=target)

    return [
        bars_of(
            "bubble",
            "Share of stage time spent waiting",
            "bubble (% of stage time), in brackets the schedule's theory",
            measured,
            bar,
            "Pipeline bubble, measured and in brackets by the schedule's theory",
            notes_for(measured),
        )
    ]


def bubble_line(report: RunReport) -> str:
    waiting = [cell for cell in report.cells if cell.times.bubble_fraction is not None]
    ends = _range([100 * (cell.times.bubble_fraction or 0.0) for cell in waiting])
    return report.unless_most(waiting, f"{ends}% of a stage's time is spent waiting")


def _range(values: Sequence[float]) -> str:
    low, high = number(min(values, default=0.0)), number(max(values, default=0.0))
    return low if low == high else f"{low} to {high}"


def routed(cells: Sequence[CellResult]) -> list[CellResult]:
    """Returns cells with experts by workload, the least balanced first."""
    found = [cell for cell in cells if cell.traffic.expert_imbalance is not None]
    by_workload = sorted(found, key=lambda cell: -(cell.traffic.expert_imbalance or 0.0))
    return sorted(by_workload, key=lambda cell: cell.cell.workload_name)


def expert_bars(report: RunReport) -> list[Bars]:
    """Charts the imbalance of cells, and tokens of each workload's first cell, since equal
    trainings route equally."""
    cells = routed(report.cells)
    if not cells:
        return []
    main = main_workload(cells)

    def bar(cell: CellResult) -> Bar:
        value = cell.traffic.expert_imbalance or 0.0
        return Bar(chart_name(cell, main), value, number(value), marks=marks(cell), target=1.0)

    imbalance = bars_of(
        "expert-imbalance",
        "Imbalance of experts",
        "tokens of the busiest expert over the mean of its block",
        cells,
        bar,
        "Tokens of the busiest expert over the mean of its block",
        notes_for(cells),
    )
    first: dict[str, CellResult] = {}
    for cell in report.cells:
        if cell.traffic.expert_tokens:
            first.setdefault(cell.cell.workload_name, cell)
    return [imbalance, *map(_token_bars, first.values())]


def _token_bars(cell: CellResult) -> Bars:
    blocks: list[list[int]] = json.loads(cell.traffic.expert_tokens or "[]")
    bars = [
        Bar(
            f"block {block}, expert {expert}",
            tokens,
            str(tokens),
            target=sum(experts) / len(experts),
        )
        for block, experts in enumerate(blocks)
        for expert, tokens in enumerate(experts)
    ]
    return bars_of(
        f"expert-tokens-{cell.cell_id}",
        f"Tokens of each expert: {cell.cell.workload_name}, {cell.cell.label}",
        "tokens in the last warm-up step",
        bars,
        lambda bar: bar,
        f"Tokens of each expert of {cell.cell.workload_name}",
    )


def _experts_table(report: RunReport) -> ui.Blocks:
    columns = [
        word("workload", "workload"),
        figure("busiest expert / mean", "expert_imbalance"),
        word("tokens of each expert by block", "expert_tokens"),
    ]
    cells = routed(report.cells)
    table = cell_table(
        "", "Tokens of each expert", cells, columns, "cell", lambda cell: cell.cell.name
    )
    return [ui.Only("text", [table])]


EXPERT_PANELS: tuple[Panel[RunReport], ...] = (Panel(expert_bars, "experts", more=_experts_table),)


def experts_line(report: RunReport) -> str:
    cells = routed(report.cells)
    ends = _range([cell.traffic.expert_imbalance or 0.0 for cell in cells])
    return report.unless_most(cells, f"the busiest gets {ends} times the mean tokens")


def _restored(title: str, attribute: str) -> ReportColumn[CellResult]:
    texts = {True: "restored", False: "not restored", None: ""}
    return ReportColumn(title, lambda cell: text_cell(texts[cell.column(attribute)]))


CHECKPOINTS: Numbers[RunReport] = Numbers(
    "checkpoint-table",
    "Checkpoints",
    lambda report: [cell for cell in report.cells if cell.checkpoint.checkpoint_bytes is not None],
    lambda _: [
        word("Restart", "outcome"),
        word("Parity", "parity_and_steps"),
        milliseconds("Save", "checkpoint_save_seconds", "slowest rank"),
        milliseconds("Blocked", "checkpoint_blocked_seconds", "time in which it could not train"),
        milliseconds("Load", "checkpoint_load_seconds", "slowest rank; unknown if within set-up"),
        size_column("On disk", "checkpoint_bytes", "size of its files"),
        figure("Files", "checkpoint_files", plain),
        _restored("Bit by bit", "checkpoint_restores_bits"),
        _restored("Random state", "checkpoint_restores_random"),
    ],
    folded="",
    first=lambda _: [],
)


def has_checkpoints(report: RunReport) -> bool:
    return any(cell.cell.checkpoint != "none" for cell in report.cells)
