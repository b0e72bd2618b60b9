"""bench plan --here: the strategies of the suite on this machine, by what was measured on it."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, get_args

if TYPE_CHECKING:
    from rich.table import Table

    from harness.analysis.setting import Setting
    from harness.planner.local.local_calibration import CpuCalibration
    from harness.planner.local.local_plan import CpuCandidate, CpuPlan, Variant
    from harness.planner.local.measurements import Here


MOST_REASONS = 6
"""Why variants are left out, on a terminal."""
RANKS = 2
"""Unless others are asked for."""


@dataclass(frozen=True)
class Asked:
    """The options that say what is to be trained, as they were given; None: as measured most."""

    workload: str | None = None
    devices: int | None = None
    per_node: int | None = None
    link: str | None = None
    sequence_length: int | None = None
    batch: int | None = None
    precision: str | None = None


@dataclass(frozen=True)
class Options:
    """What it is predicted from, and what is shown."""

    folders: tuple[Path, ...]
    goal: str = "throughput"
    top: int = 10
    unseen: bool = False
    """Leave the model's own cells out of what it is predicted from."""
    matrix: Path | None = None
    """New file for the cells that would settle which is best."""
    export: Path | None = None
    """New folder for the choice as files that run without the suite."""
    html: Path | None = None
    """File for a page."""


def answer(asked: Asked, options: Options, json_output: bool) -> None:
    """Prints the plan; raises UsageError."""
    from rich.markup import escape

    from bench.cli import terminal
    from harness.planner.local.local_explanation import explanation
    from harness.planner.local.measurements import read_here, variants_of

    links = checked(asked, options)
    here = read_here(options.folders, asked.workload)
    setting = setting_asked(asked, links, here)
    calibration = calibrated(here, setting.workload if options.unseen else "")
    variants, refused = variants_of(setting, here, not options.unseen)
    plan = plan_of(setting, here, options, calibration, (variants, refused))
    sentences = explanation(plan)
    written = _written(plan, variants, options)
    if options.html:
        from reports import write_whole
        from reports.plan_pages import here_page

        swept = _swept(setting, here, options, calibration)
        write_whole(here_page(plan, sentences, here.machine, swept), options.html, "--html")
        written.append(f"page: {options.html}")
    if json_output:
        document = dataclasses.asdict(plan) | {
            "explanation": sentences,
            "machine": here.machine,
            "written": written,
        }
        print(json.dumps(document))
        return
    console = terminal.console()
    console.print(_table(plan, options.top))
    for sentence in sentences:
        console.print(escape(sentence))
    for reason, count in list(plan.refused.items())[:MOST_REASONS]:
        console.print(escape(f"left out, {count}: {reason}"))
    if len(plan.refused) > MOST_REASONS:
        console.print(f"left out for {len(plan.refused) - MOST_REASONS} other reasons, see --json")
    for sentence in (f"measured on: {here.machine}", *written):
        console.print(escape(sentence))


def _written(plan: CpuPlan, variants: Sequence[Variant], options: Options) -> list[str]:
    """Writes the files that are asked for; returns what was written, in sentences."""
    from bench.cli.settled import matrix_written
    from harness.planner.follow_up import export_first
    from harness.planner.local.local_plan import open_questions

    written = []
    candidates = plan.candidates or plan.inexact
    cells = {variant.cell.id: variant.cell for variant in variants}
    if options.matrix:
        chosen = (candidates[0], *open_questions(candidates))
        ordered = [cells[candidate.cell_id] for candidate in chosen]
        written.append(matrix_written(ordered, options.matrix))
    if options.export:
        ranked = ((cells[candidate.cell_id], candidate.seconds) for candidate in candidates)
        written.append(export_first(ranked, options.export))
    return written


def checked(asked: Asked, options: Options) -> str:
    """The text of the link that is asked for, empty without one.

    Raises UsageError for a value that means nothing, before anything is read.
    """
    from harness.planner.local.local_plan import Goal
    from harness.spec.errors import UsageError
    from harness.spec.link import link_text
    from harness.workloads import make_workload

    try:
        links = link_text(asked.link or "")
    except ValueError as error:
        raise UsageError(f"--link {asked.link!r}: {error}") from None
    if asked.workload:
        make_workload(asked.workload)
    for name, value, least in (
        ("--devices", asked.devices, 1),
        ("--per-node", asked.per_node, 1),
        ("--seq", asked.sequence_length, 2),
        ("--batch", asked.batch, 1),
    ):
        if value is not None and value < least:
            raise UsageError(f"{name} {value}: give at least {least}")
    if asked.precision not in (None, "fp32", "bf16", "fp16"):
        raise UsageError(f"--precision {asked.precision!r}: give fp32, bf16 or fp16")
    if asked.per_node is not None and not links:
        raise UsageError("--per-node goes with --link here: all ranks are on this machine")
    devices, per_node = asked.devices or RANKS, asked.per_node or 1
    if links and (devices % per_node or devices == per_node):
        raise UsageError(
            f"--devices {devices} with --per-node {per_node}: a link is between at least two nodes"
            " that are filled"
        )
    if options.goal not in get_args(Goal):
        raise UsageError(f"--goal {options.goal!r} with --here: give {' or '.join(get_args(Goal))}")
    return links


def setting_asked(asked: Asked, links: str, here: Here) -> Setting:
    """The setting that is asked for; what is not given is as it was measured most."""
    from harness.planner.local.measurements import data_for, usual_setting

    usual = usual_setting(here.cells)
    devices = asked.devices or RANKS
    workload = asked.workload or usual.workload
    return dataclasses.replace(
        usual,
        workload=workload,
        data=data_for(workload, usual),
        devices=devices,
        global_batch=asked.batch or usual.global_batch,
        sequence_length=asked.sequence_length or usual.sequence_length,
        precision=asked.precision or "fp32",
        nodes=devices // (asked.per_node or 1) if links else 1,
        links=links,
    )


def calibrated(here: Here, unseen: str = "") -> CpuCalibration:
    """The calibration that the measured cells give, without those of the `unseen` workload.

    Raises UsageError where too little was measured.
    """
    from harness.planner.local.local_calibration import (
        base_of,
        calibrate_cells,
        leave_out,
        with_spreads,
    )

    measured = [
        cell.measured
        for cell in here.cells
        if not unseen or base_of(cell.measured.facts) != unseen.split("+")[0]
    ]
    return with_spreads(calibrate_cells(measured), leave_out(measured))


def plan_of(
    setting: Setting,
    here: Here,
    options: Options,
    calibration: CpuCalibration,
    variants: tuple[list[Variant], Counter[str]],
) -> CpuPlan:
    """The plan of a setting, whose `variants` can run or were refused for some reason; raises
    UsageError where nothing can run."""
    from harness.planner.local.local_plan import Goal, plan_here

    goal: Goal = next(goal for goal in get_args(Goal) if goal == options.goal)
    able, refused = variants
    return plan_here(
        setting.text, able, calibration, setting.global_batch, here.memory_bytes, goal, refused
    )


def _swept(
    setting: Setting, here: Here, options: Options, calibration: CpuCalibration
) -> dict[str, dict[int, CpuPlan | str]]:
    """The plans of the measured workloads, and of the one that is asked about, on each number of
    ranks that this machine has a core for; the reason where nothing can run."""
    from harness.planner.local.measurements import data_for, variants_of
    from harness.spec.errors import UsageError

    counts = sorted({1, setting.devices, *(n for n in (2, 4, 8, 16, 32) if n <= here.cores)})
    answers: dict[str, dict[int, CpuPlan | str]] = {}
    for workload in dict.fromkeys((setting.workload, *calibration.workloads)):
        for devices in counts:
            links = setting.links if devices > 1 else ""
            asked = dataclasses.replace(
                setting,
                workload=workload,
                data=data_for(workload, setting),
                devices=devices,
                links=links,
                nodes=devices if links else 1,
            )
            try:
                variants = variants_of(asked, here, not options.unseen)
                answer: CpuPlan | str = plan_of(asked, here, options, calibration, variants)
            except UsageError as error:
                answer = str(error)
            answers.setdefault(workload, {})[devices] = answer
    return answers


def _table(plan: CpuPlan, top: int) -> Table:
    """The cells, best first: those that train exactly the same, then others."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=f"{escape(plan.setting)}; 80 % intervals", title_justify="left")
    table.add_column("strategy", overflow="fold", min_width=20)
    for column in ("step (ms)", "samples/s", "fullest rank (MB)", "known by"):
        table.add_column(column, justify="right")
    for row in plan.candidates[:top]:
        table.add_row(*map(escape, _row(row)))
    if plan.inexact:
        table.add_section()
        for row in plan.inexact[: max(1, top // 3)]:
            table.add_row(*map(escape, _row(row, "other training")))
    return table


def _row(row: CpuCandidate, remark: str = "") -> tuple[str, ...]:
    low, high = row.seconds_low * 1e3, row.seconds_high * 1e3
    return (
        f"{row.label} ({remark})" if remark else row.label,
        f"{row.seconds * 1e3:.0f} ({low:.0f} to {high:.0f})",
        f"{row.samples_per_second:.1f}",
        f"{row.peak_bytes / 1e6:.0f} ({row.peak_low / 1e6:.0f} to {row.peak_high / 1e6:.0f})",
        "measurement" if row.measured else "prediction",
    )
