from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bench.cli import options as opt
from harness.record.trial_status import NOT_LAUNCHED
from harness.spec.text import plural

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from harness.analysis.cell_result import CellResult, Parity
    from reports.cell_detail import CellDetail

BAR = 20
STEPS = 32


def show(
    which: opt.Cell,
    run: Annotated[
        str | None,
        typer.Option(
            "--run",
            help="Run: an id or its prefix, latest, latest~1; by default the newest with the cell.",
        ),
    ] = None,
    results: opt.Results = Path("results"),
    json_output: opt.Json = False,
) -> None:
    """Show one cell: trials, steps, memory, where time goes, parity.

    Example: [bold]python -m bench show 'ddp llama-micro x2 fp32*'[/bold]
    """
    from bench.select import find_recorded_cell, find_run
    from harness.record.store import Store
    from reports.cell_detail import in_full

    store = Store(results)
    tables, cell_id = find_recorded_cell(store, which, find_run(store, run) if run else None)
    detail = in_full(tables, store.steps_of(str(tables.runs["run_id"].iloc[0]), cell_id), cell_id)
    if json_output:
        print(json.dumps(detail.as_json(), allow_nan=False))
        return
    from bench.cli import terminal

    draw(terminal.console(), detail)


def draw(out: Console, detail: CellDetail) -> None:
    cell = detail.cell
    out.print(f"[bold]{clean(cell.cell.name)}[/bold]  {cell.cell_id}")
    out.print(
        f"run {clean(cell.run_id)}, {detail.started_at:%Y-%m-%d %H:%M} UTC;"
        f" {clean(detail.hardware)}"
    )
    if cell.status != "ok":
        colour = "yellow" if cell.expected or cell.status in NOT_LAUNCHED else "red"
        out.print(
            f"[{colour}]{cell.status}{' (as expected)' if cell.expected else ''}[/{colour}]:"
            f" {clean(cell.reason)}"
        )
    for caution in detail.cautions:
        out.print(f"[yellow]{caution.word}[/yellow]: {clean(caution.meaning)}")
    _throughput(out, detail)
    _ranks(out, detail)
    _memory(out, detail)
    _time(out, detail)
    _parity(out, cell)
    _checkpoint(out, cell)
    if detail.log_tail:
        out.print("[bold]end of the log[/bold]")
        for line in detail.log_tail.splitlines()[-8:]:
            out.print(f"  {clean(line)}")


def clean(text: object) -> str:
    """Returns text on one line, without control characters."""
    from rich.markup import escape

    from reports.text import printable

    return escape(" ".join(printable(str(text)).split()))


def _throughput(out: Console, detail: CellDetail) -> None:
    from reports.text import DASH, MIB, number, scaled
    from reports.time_sections import utilization

    cell, place = detail.cell, detail.place
    speeds = [detailed.trial.samples_per_second for detailed in detail.trials]
    most = max((speed for speed in speeds if speed), default=0.0)
    table = _table(
        "trial", "samples/s", "", "steps: time of the slowest rank", "p50 ms", "p95 ms", "peak MiB"
    )
    for detailed, speed in zip(detail.trials, speeds, strict=True):
        trial = detailed.trial
        name = str(trial.trial) + (f" (attempt {trial.attempt})" if trial.attempt > 1 else "")
        line = sparkline_of(detailed.slowest_rank_step_seconds) or (
            DASH if trial.status == "ok" else trial.status
        )
        times = [scaled(p, 1e3) for p in (trial.step_seconds_p50, trial.step_seconds_p95)]
        table.add_row(
            name,
            number(speed),
            bar(speed, most),
            line,
            *times,
            scaled(trial.peak_memory_bytes, 1 / MIB),
        )
    out.print("[bold]throughput[/bold]")
    out.print(table)
    if cell.speed.samples_per_second is not None:
        low, high = cell.speed.samples_per_second_low, cell.speed.samples_per_second_high
        interval = "1 trial: no interval"
        if low is not None:
            interval = f"95 % interval {number(low)} to {number(high)}"
        rate = cell.speed.tokens_per_second
        tokens = "" if rate is None else f", {number(rate)} tokens/s"
        out.print(f"  mean {number(cell.speed.samples_per_second)} samples/s{tokens}, {interval}")
    if text := utilization(cell):
        out.print(f"  {text}")
    if place:
        alike = f", tied with place {place.place - 1}" if place.same_as_above else ""
        out.print(f"  place {place.place} of {place.of}{alike}: {clean(place.setting)}")
        if place.ratio is not None:
            ratio, low, high = place.ratio.ratio, place.ratio.low, place.ratio.high
            ends = "" if low is None else f" ({number(low)} to {number(high)})"
            out.print(
                f"  {number(ratio)} x the fastest{ends},"
                f" {clean(place.fastest)}: {place.ratio.verdict}"
            )


def _ranks(out: Console, detail: CellDetail) -> None:
    from reports.text import MIB, scaled

    if len(detail.ranks) < 2:
        return
    most = max((rank.peak_memory_bytes or 0 for rank in detail.ranks), default=0)
    table = _table("rank", "step p50 ms", "peak MiB", "")
    for rank in detail.ranks:
        peak = rank.peak_memory_bytes
        table.add_row(
            str(rank.rank),
            scaled(rank.step_seconds_p50, 1e3),
            scaled(peak, 1 / MIB),
            bar(peak, most),
        )
    out.print("[bold]ranks[/bold]")
    out.print(table)


def _memory(out: Console, detail: CellDetail) -> None:
    from reports.text import MIB, scaled, signed

    cell = detail.cell
    if detail.kinds is None or cell.states.state_bytes is None:
        return
    most = max(cell.memory.peak_memory_bytes or 0, cell.states.state_bytes)
    table = _table("kept by the fullest rank between steps", "MiB", "formula MiB", "")
    for kind in detail.kinds:
        table.add_row(
            kind.kind,
            scaled(kind.bytes, 1 / MIB),
            scaled(kind.formula_bytes, 1 / MIB),
            bar(kind.bytes, most),
        )
    away = cell.states.formula_deviation
    off = "" if away is None else f" ({signed(away)})"
    sum_of_kinds = scaled(cell.states.state_bytes, 1 / MIB) + off
    table.add_row(
        "together",
        sum_of_kinds,
        scaled(cell.states.formula_bytes, 1 / MIB),
        bar(cell.states.state_bytes, most),
    )
    table.add_row(
        "peak of a step",
        scaled(cell.memory.peak_memory_bytes, 1 / MIB),
        "",
        bar(cell.memory.peak_memory_bytes, most),
    )
    out.print("[bold]memory[/bold]")
    out.print(table)


def _time(out: Console, detail: CellDetail) -> None:
    from harness.record.profile_record import COMPONENTS
    from reports.text import percent, scaled
    from reports.time_sections import WORDS

    profiled = detail.profiled
    out.print("[bold]where the time goes[/bold]")
    if profiled is None:
        out.print(
            "  not profiled in this run: use bench run --profile, or: python -m bench profile"
        )
        return
    step_seconds = sum(profiled.parts[name] or 0.0 for name in COMPONENTS)
    table = _table("part of a profiled step", "ms", "share", "")
    for name in COMPONENTS:
        seconds = profiled.parts[name]
        if seconds:
            table.add_row(
                WORDS.get(name, name),
                scaled(seconds, 1e3),
                percent(seconds / step_seconds),
                bar(seconds, step_seconds),
            )
    out.print(table)
    slow = "" if profiled.straggler is None else f"; rank {profiled.straggler} is slow"
    plain = scaled(profiled.plain_step, 1e3)
    out.print(
        f"  step {scaled(profiled.profiled_step, 1e3)} ms under the profiler, {plain} ms"
        f" without{slow}"
    )
    if profiled.gpu:
        out.print(f"  GPU: {profiled.gpu.sentence}")


def _parity(out: Console, cell: CellResult) -> None:
    from reports.text import deviation

    if cell.parity.verdict is None:
        return
    colour = {"exact": "green", "within tolerance": "green", "diverged": "red"}.get(
        cell.parity.verdict, "yellow"
    )
    reason = f": {clean(cell.parity.reason)}" if cell.parity.reason else ""
    out.print(f"[bold]parity[/bold]  [{colour}]{cell.parity.verdict}[/{colour}]{reason}")
    loss = (
        f"{deviation(cell.parity.max_loss_deviation)} of"
        f" {deviation(cell.parity.loss_tolerance)} allowed"
    )
    update = (
        f"{deviation(cell.parity.max_update_deviation)} of"
        f" {deviation(cell.parity.update_tolerance)} allowed"
    )
    out.print(
        f"  over {plural(cell.cell.parity_steps, 'step')}: largest deviation in loss {loss}, in"
        f" parameters {update}"
    )
    _compared(out, cell.parity)
    if cell.parity.rewinds:
        times = "once" if cell.parity.rewinds == 1 else f"{cell.parity.rewinds} times"
        out.print(
            f"  state rewound {times} between timed steps: largest deviation in loss"
            f" {deviation(cell.parity.rewind_loss_deviation)}, in parameters"
            f" {deviation(cell.parity.rewind_update_deviation)}"
        )
    elif cell.parity.rewind_skipped_reason:
        why = clean(cell.parity.rewind_skipped_reason)
        out.print(f"  state never rewound between timed steps: {why}")
    if losses := [loss for loss in cell.parity.losses if loss is not None and math.isfinite(loss)]:
        out.print(f"  loss {sparkline_of(losses)} from {losses[0]:.4f} to {losses[-1]:.4f} nats")


def _compared(out: Console, parity: Parity) -> None:
    from reports.text import deviation

    if parity.max_element_deviation is None:
        return
    of_buffers, of_states = parity.max_buffer_deviation, parity.max_moment_deviation
    buffers = "" if of_buffers is None else f", buffers {deviation(of_buffers)}"
    states = "" if of_states is None else f", optimizer states {deviation(of_states)}"
    out.print(
        f"  single elements {deviation(parity.max_element_deviation)}, component along the weights"
        f" {deviation(parity.max_decay_deviation)}{buffers}{states}"
    )
    if parity.moments_skipped_reason:
        out.print(f"  optimizer {clean(parity.moments_skipped_reason)}")


def _checkpoint(out: Console, cell: CellResult) -> None:
    from reports.text import MIB, scaled

    facts = cell.checkpoint
    if facts.checkpoint_bytes is None:
        return
    seconds = facts.checkpoint_load_seconds
    loaded = "in set-up" if seconds is None else f"in {scaled(seconds, 1e3)} ms"
    out.print(
        f"[bold]checkpoint[/bold]  {cell.cell.checkpoint}, saved by"
        f" {cell.cell.checkpoint_from or 'the same ranks'}:"
        f" {scaled(facts.checkpoint_bytes, 1 / MIB)} MiB in"
        f" {plural(facts.checkpoint_files or 0, 'file')}"
    )
    out.print(
        f"  saved in {scaled(facts.checkpoint_save_seconds, 1e3)} ms, of which"
        f" {scaled(facts.checkpoint_blocked_seconds, 1e3)} ms blocked training; loaded {loaded}"
    )
    for what, restored in (
        ("parameters and optimizer states, bit by bit", facts.checkpoint_restores_bits),
        ("torch's random state", facts.checkpoint_restores_random),
    ):
        if restored is not None:
            out.print(f"  {'restored' if restored else 'not restored'}: {what}")


def _table(*columns: str) -> Table:
    from bench.cli import terminal

    charts = [column for column in columns if column == "" or column.startswith("steps")]
    return terminal.table(None, *columns, left=charts)


def bar(value: float | None, most: float) -> str:
    """Returns a bar of at most BAR characters, in steps of an eighth."""
    if not value or not most:
        return ""
    whole, rest = divmod(int(BAR * 8 * value / most + 0.5), 8)
    return "█" * whole + ("▏▎▍▌▋▊▉"[rest - 1] if rest else "")


def sparkline_of(values: Sequence[float | None]) -> str:
    """Returns a block per value; of more than STEPS, the largest of each of STEPS groups."""
    from bench.cli.compare import sparkline

    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return ""
    count = min(STEPS, len(known))
    edges = [i * len(known) // count for i in range(count + 1)]
    return sparkline([max(known[a:b]) for a, b in itertools.pairwise(edges)])
