from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from harness.analysis.cell_result import CellResult
from harness.analysis.utilization import PARTS, GpuTime, gpu_time
from harness.record.profile_record import COMPONENTS, SPLIT, ProfileRecord
from harness.spec.text import plural
from reports import blocks as ui
from reports.bar_chart import MOST_ROWS, Bar, Bars, first_few, omitted
from reports.blocks import phrase, prose
from reports.columns import (
    ReportColumn,
    cell_table,
    computed,
    device_columns,
    figure,
    in_mebibytes,
    mebibytes,
    throughput_column,
    word,
)
from reports.groups import Group, by_setting
from reports.memory_sections import MOST_CHARTS
from reports.names import chart_name, main_workload, marks, named, notes_for
from reports.text import DASH, number, percent, plain, scaled, signed

WORDS = {
    "compute": "compute",
    "communication": "exposed communication",
    "bubble": "pipeline bubble",
    "offload": "offload I/O",
}
AT_BOUND = 1.02
TERA = 1e12
_NUMBERS = "All cells in numbers"


@dataclass(frozen=True)
class StepProfile:
    result: CellResult
    parts: Mapping[str, float | None]
    """Seconds by part of the step, overlaps included; mean of the ranks."""
    plain_step: float
    """Unprofiled step of the slowest rank, in seconds."""
    profiled_step: float
    straggler: int | None
    logical_bytes: float | None
    """Bytes per step that a rank's collectives must send in theory; mean of the ranks."""
    off_theory: float | None
    """Those bytes over the strategy's formula, minus 1."""
    off_algorithm: float | None
    """Socket bytes over those of the backend's algorithm, minus 1."""
    peak: Mapping[str, int | None]
    """Bytes at the peak by kind and in total (`tracked`), of the fullest rank."""
    private: int | None
    """Peak bytes of the step, measured as in trials."""
    gpu: GpuTime | None


def profiled(cells: Iterable[CellResult], profiles: Iterable[ProfileRecord]) -> list[StepProfile]:
    newest = {profile.cell_id: profile for profile in profiles if profile.status == "ok"}
    return [_profiled(cell, newest[cell.cell_id]) for cell in cells if cell.cell_id in newest]


def _profiled(cell: CellResult, profile: ProfileRecord) -> StepProfile:
    logical, theory = _mean(profile.logical_bytes), profile.theory_bytes
    sent, algorithm = _mean(profile.sent_bytes), _mean(profile.algorithm_bytes)
    parts = (*COMPONENTS, "overlapped", "operators")
    return StepProfile(
        cell,
        parts={name: _mean(getattr(profile, f"{name}_seconds")) for name in parts},
        plain_step=profile.plain_step_seconds or 0.0,
        profiled_step=profile.profiled_step_seconds or 0.0,
        straggler=profile.straggler,
        logical_bytes=logical,
        off_theory=logical / theory - 1 if logical is not None and theory else None,
        off_algorithm=sent / algorithm - 1 if sent is not None and algorithm else None,
        peak={
            kind: max(getattr(profile, f"peak_{kind}_bytes"), default=None)
            for kind in (*SPLIT, "tracked")
        },
        private=max(profile.private_bytes, default=None),
        gpu=gpu_time(
            profile,
            cell.work.flops_per_step and cell.work.flops_per_step / cell.cell.devices,
            cell.work.matmul_flops_per_second,
        ),
    )


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _by_setting(profiles: Iterable[StepProfile]) -> list[list[StepProfile]]:
    by_id = {profile.result.cell_id: profile for profile in profiles}
    return [
        sorted((by_id[cell.cell_id] for cell in group.rows), key=lambda one: one.profiled_step)
        for group in by_setting([profile.result for profile in by_id.values()])
    ]


def part_bars(profiles: Sequence[StepProfile]) -> list[Bars]:
    groups = _by_setting(profiles)
    main = groups[0][0].result.cell.workload_name if groups else ""
    return [
        _part_bars(group, f"parts-{i}", Group((group[0].result,)).short_title(main))
        for i, group in enumerate(groups)
    ]


def _part_bars(profiles: Sequence[StepProfile], name: str, title: str) -> Bars:
    bars = [_part_bar(profile) for profile in profiles[:MOST_ROWS]]
    cells = [profile.result for profile in profiles]
    return Bars(
        name,
        title,
        "mean of the ranks (ms)",
        tuple(bars),
        f"Parts of a profiled step of {plural(len(cells), 'cell')}, {title}, shortest first:"
        f" {first_few(bars, 5)}",
        notes_for(cells) + omitted(len(cells)),
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


def profile_blocks(profiles: Sequence[StepProfile]) -> ui.Blocks:
    charts = [ui.Chart(bars) for bars in part_bars(profiles)[:MOST_CHARTS]]
    gpu = ui.Part("", [_gpu_table(profiles)], prose("gpu"))
    blocks: ui.Blocks = [
        ui.Charts(charts, prose("legend parts")),
        ui.Details(_NUMBERS, [_parts_table(profiles)]),
        ui.Details("What fills the memory at the peak", [_peak_table(profiles)]),
        ui.Details("What the GPUs do in a step", [gpu]),
    ]
    return [ui.Part("", blocks, prose("parts"))]


def _profile_table(
    name: str,
    label: str,
    profiles: Sequence[StepProfile],
    columns: Sequence[ReportColumn[StepProfile]],
) -> ui.Table:
    by_id = {profile.result.cell_id: profile for profile in profiles}
    cells = [profile.result for profile in profiles]

    def of_cell(column: ReportColumn[StepProfile]) -> ReportColumn[CellResult]:
        return ReportColumn(
            column.title, lambda cell: column.make(by_id[cell.cell_id]), column.unit, column.tip
        )

    first = [word("Workload", "workload"), *device_columns(cells)]
    return cell_table(name, label, cells, [*first, *map(of_cell, columns)])


def _parts_table(profiles: Sequence[StepProfile]) -> ui.Table:
    rows = [profile for group in _by_setting(profiles) for profile in group]
    straggling = "slower than the others by more than 15 %"
    sockets = "bytes on the sockets over those of the backend's algorithm"
    columns: list[ReportColumn[StepProfile]] = [
        *map(_part_column, (*COMPONENTS, "overlapped", "operators")),
        _seconds("Step", "profiled_ms", "profiled_step", "profiled, slowest rank"),
        _seconds("Plain step", "plain_ms", "plain_step", "without the profiler"),
        figure("Straggler", "straggler", _rank, "rank", straggling),
        mebibytes(
            "Must send", "logical_bytes", "by theory, for the collectives it calls", "MiB per rank"
        ),
        figure("Off the formula", "off_theory", signed, tip="of the strategy"),
        figure("Sent, off the algorithm", "off_algorithm", signed, tip=sockets),
    ]
    return _profile_table("parts-table", "Parts of a step", rows, columns)


def _rank(rank: float | None) -> str:
    return DASH if rank is None else plain(rank)


def _seconds(title: str, field: str, attribute: str, tip: str) -> ReportColumn[StepProfile]:
    def value(profile: StepProfile) -> float:
        return float(getattr(profile, attribute)) * 1e3

    return computed(title, field, value, number, "ms", tip)


def _part_column(name: str) -> ReportColumn[StepProfile]:
    tips = {
        "overlapped": "communication in flight during other parts; not included in the sum",
        "operators": "part of the step during which an operator ran",
    }

    def value(profile: StepProfile) -> float | None:
        seconds = profile.parts[name]
        return seconds and seconds * 1e3

    title = WORDS.get(name, name).capitalize()
    return computed(title, f"{name}_ms", value, number, "ms", tips.get(name, ""))


def _peak_table(profiles: Sequence[StepProfile]) -> ui.Table:
    measured = [profile for profile in profiles if profile.peak["tracked"] is not None]
    rows = [profile for group in _by_setting(measured) for profile in group]

    def of_kind(kind: str, title: str = "", tip: str = "") -> ReportColumn[StepProfile]:
        return computed(
            title or kind.capitalize(),
            f"peak_{kind}",
            lambda profile: profile.peak[kind],
            in_mebibytes,
            "MiB",
            tip,
        )

    columns: list[ReportColumn[StepProfile]] = [
        *map(of_kind, SPLIT),
        of_kind("tracked", "Tensors", "at their peak"),
        mebibytes("Private memory", "private", "peak of the same step as trials measure it"),
    ]
    return _profile_table("peak-table", "What fills the memory at the peak", rows, columns)


def _gpu_table(profiles: Sequence[StepProfile]) -> ui.Table:
    measured = [profile for profile in profiles if profile.gpu]
    rows = [profile for group in _by_setting(measured) for profile in group]
    names = [name for name in PARTS if any(p.gpu and name in p.gpu.seconds for p in rows)]

    def step(profile: StepProfile) -> float | None:
        return profile.gpu.step_seconds * 1e3 if profile.gpu else None

    def share(name: str) -> ReportColumn[StepProfile]:
        def value(profile: StepProfile) -> float | None:
            part = profile.gpu.shares.get(name) if profile.gpu else None
            return part and part * 100

        return computed(PARTS[name].capitalize(), f"gpu_{name}_percent", value, unit="%")

    tip = "without the profiler's overhead"
    columns = [computed("Step", "gpu_step_ms", step, unit="ms", tip=tip), *map(share, names)]
    return _profile_table("gpu-table", "What the GPUs do in a step", rows, columns)


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
    return f"{scaled(rate, 1 / TERA)} TFLOP/s"


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


def traffic_bars(cells: Sequence[CellResult]) -> list[Bars]:
    groups = [group for group in by_setting(with_traffic(cells)) if len(group.rows) > 1]
    return [
        _traffic_bars(group, f"traffic-{i}", group.short_title(groups[0].workload))
        for i, group in enumerate(groups)
    ]


def _traffic_bars(group: Group[CellResult], name: str, title: str) -> Bars:
    cells = sorted(group.rows, key=sent)
    bars = []
    for cell in cells[:MOST_ROWS]:
        limit, value = bound(cell), sent(cell)
        strong = limit is not None and value <= limit * AT_BOUND
        text = f"{number(value)} x"
        bars.append(Bar(named(cell), value, text, strong=strong, marks=marks(cell), target=limit))
    return Bars(
        name,
        title,
        "sent per step (multiples of the gradients)",
        tuple(bars),
        f"Bytes sent per rank and step in multiples of the gradients, {title}, least first:"
        f" {first_few(bars, 5)}",
        notes_for(cells) + omitted(len(cells)),
    )


def _over_bound(cell: CellResult) -> float | None:
    limit = bound(cell)
    return None if limit is None else sent(cell) / limit


def _traffic_table(cells: Sequence[CellResult]) -> ui.Table:
    groups = by_setting(with_traffic(cells))
    rows = [cell for group in groups for cell in sorted(group.rows, key=sent)]
    parameters = "4 bytes for each trained parameter"
    ring = "2 (N - 1) / N for N data-parallel ranks"
    columns = [
        word("Workload", "workload"),
        figure("Ranks", "processes", plain),
        word("Precision", "precision"),
        mebibytes("Sent", "sent_bytes_per_step", "by the rank that sends most", "MiB per step"),
        computed("Sent", "sent_over_gradients", sent, unit="x gradients", tip=parameters),
        computed("Ring bound", "ring_bound", bound, unit="x gradients", tip=ring),
        computed("Sent / bound", "sent_over_bound", _over_bound),
    ]
    return cell_table("traffic-table", "Bytes sent per rank and step", rows, columns)


def offload_table(cells: Sequence[CellResult]) -> ui.Table:
    rows = [
        cell
        for cell in cells
        if cell.status == "ok" and cell.traffic.offload_kept_bytes is not None
    ]
    columns = [
        word("Workload", "workload"),
        *device_columns(rows),
        mebibytes(
            "Read", "offload_read_bytes_per_step", "from the disk, all ranks", "MiB per step"
        ),
        mebibytes(
            "Written", "offload_written_bytes_per_step", "to the disk, all ranks", "MiB per step"
        ),
        mebibytes("In the folder", "offload_kept_bytes", "size of its files"),
        mebibytes("In memory", "state_bytes", "states of the fullest rank between steps"),
        mebibytes("Peak", "peak_memory_bytes", "of the fullest device"),
        throughput_column(rows),
    ]
    return cell_table("offload-table", "States on a disk", rows, columns)


def traffic_blocks(cells: Sequence[CellResult], one_model: bool = True) -> ui.Blocks:
    """Returns bytes sent against a ring all-reduce, and bytes to disk.

    `one_model`: see `states_blocks`.
    """
    charts = [ui.Chart(bars) for bars in traffic_bars(cells)[:MOST_CHARTS]] if one_model else []
    limits = bounds_in_words(cells)
    ring = phrase(" ", prose("ring", limits=limits)) if limits else ""
    about = phrase(prose("traffic"), ring)
    sent: ui.Blocks = [ui.Charts(charts), ui.Details(_NUMBERS, [_traffic_table(cells)])]
    disk = ui.Part("States on a disk", [offload_table(cells)], prose("disk"))
    return [ui.Part("", sent, about), disk]


def bounds_in_words(cells: Sequence[CellResult]) -> str:
    """Returns the bound by data-parallel ranks: `1.00 x for 2 ranks, 1.50 x for 4`."""
    limits = {
        cell.placement.data_parallel or 1: limit
        for cell in with_traffic(cells)
        if (limit := bound(cell)) is not None
    }
    return ", ".join(f"{number(limits[n])} x for {plural(n, 'rank')}" for n in sorted(limits))


def bubble_theory(stages: int, micro_batches: int) -> float:
    """Returns (p - 1) / (m + p - 1), p stages, m micro-batches (Huang et al., arXiv 1811.06965)."""
    return (stages - 1) / (micro_batches + stages - 1)


def bubble_bars(cells: Sequence[CellResult]) -> Bars | None:
    """Charts measured and theoretical bubbles in %, smallest first."""
    measured = [
        (cell.times.bubble_fraction, bubble_theory(stages, cell.cell.micro_batches), cell)
        for cell in cells
        if cell.times.bubble_fraction is not None
        and (stages := cell.placement.pipeline_parallel or 0) > 1
    ]
    if not measured:
        return None
    measured.sort(key=lambda row: row[0])
    main = main_workload(cells)
    bars = []
    for share, theory, cell in measured[:MOST_ROWS]:
        text = f"{percent(share)} ({percent(theory)})"
        label = chart_name(cell, main)
        bars.append(Bar(label, share * 100, text, marks=marks(cell), target=theory * 100))
    return Bars(
        "bubble",
        "Share of stage time spent waiting",
        "bubble (% of stage time), in brackets the theory's",
        tuple(bars),
        "Pipeline bubble, measured and in brackets by theory: " + first_few(bars, 8),
        notes_for([cell for *_, cell in measured]) + omitted(len(measured)),
    )


def bubble_blocks(cells: Sequence[CellResult]) -> ui.Blocks:
    bars = bubble_bars(cells)
    return [ui.Charts([ui.Chart(bars)] if bars else [], prose("bubble"))]


def routed(cells: Sequence[CellResult]) -> list[CellResult]:
    known = [cell for cell in cells if cell.traffic.expert_imbalance is not None]
    return sorted(known, key=lambda cell: (cell.cell.workload_name, cell.traffic.expert_imbalance))


def imbalance_bars(cells: Sequence[CellResult]) -> Bars | None:
    known = routed(cells)
    if not known:
        return None
    main = main_workload(known)
    bars = [
        Bar(chart_name(cell, main), value, number(value), marks=marks(cell), target=1.0)
        for cell in known[:MOST_ROWS]
        if (value := cell.traffic.expert_imbalance) is not None
    ]
    return Bars(
        "expert-imbalance",
        "Imbalance of experts",
        "tokens of the busiest expert over the mean of its block",
        tuple(bars),
        "Tokens of the busiest expert over the mean of its block: " + first_few(bars, 8),
        notes_for(known) + omitted(len(known)),
    )


def token_bars(cells: Sequence[CellResult]) -> list[Bars]:
    """Charts each workload's first cell; equal trainings route equally."""
    first: dict[str, CellResult] = {}
    for cell in cells:
        if cell.traffic.expert_tokens:
            first.setdefault(cell.cell.workload_name, cell)
    return [_tokens_of(cell) for cell in first.values()]


def _tokens_of(cell: CellResult) -> Bars:
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
    return Bars(
        f"expert-tokens-{cell.cell_id}",
        f"Tokens of each expert: {cell.cell.workload_name}, {cell.cell.label}",
        "tokens in the last warm-up step",
        tuple(bars[:MOST_ROWS]),
        f"Tokens of each expert of {cell.cell.workload_name}: " + first_few(bars, 8),
        omitted(len(bars)),
    )


def experts_blocks(cells: Sequence[CellResult]) -> ui.Blocks:
    imbalance = imbalance_bars(cells)
    charts = [ui.Chart(bars) for bars in (imbalance, *token_bars(cells)) if bars and imbalance]
    columns = [
        word("workload", "workload"),
        figure("busiest expert / mean", "expert_imbalance"),
        word("tokens of each expert by block", "expert_tokens"),
    ]
    label = "Tokens of each expert"
    table = cell_table("", label, routed(cells), columns, "cell", lambda cell: cell.cell.name)
    return [ui.Charts(charts, prose("experts")), ui.Only("text", [table])]
