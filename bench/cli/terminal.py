from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from harness.record.trial import NOT_LAUNCHED

if TYPE_CHECKING:
    from harness.analysis.answer import Answer
    from harness.analysis.cell_result import CellResult
    from harness.record.plan import Plan
    from harness.record.store import Store
    from reports import blocks as ui

MEBIBYTE = 2**20
STYLES = {"bad": "red", "good": "green", "strong": "bold"}


def console(quiet: bool = False) -> Console:
    """Returns a console with colour only on terminals; a `quiet` one prints nothing."""
    chosen = Console(quiet=quiet, highlight=False, soft_wrap=True)
    if chosen.is_terminal:
        return chosen
    return Console(quiet=quiet, highlight=False, soft_wrap=True, width=160)


def table(title: str | None, *columns: str, left: Collection[str] = ()) -> Table:
    """Returns an empty table; its first column and `left` are left-aligned."""
    made = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        if index == 0 or column in left:
            made.add_column(column, overflow="fold")
        else:
            made.add_column(column, justify="right")
    return made


def write(out: Console, blocks: Sequence[ui.Block]) -> None:
    """Prints blocks of a report without its charts. Tables fold into the terminal."""
    from reports import blocks as ui

    for block in ui.visible(blocks, "text"):
        match block:
            case ui.Heading(text):
                out.print(f"[bold]{_markup(text)}[/bold]")
            case ui.Paragraph(text, kind):
                out.print(_markup(text), style="yellow" if kind == "caution" else "")
            case ui.Bullets(items):
                for item in items:
                    out.print(f"- {_markup(item)}")
            case ui.Facts(rows):
                for name, text in rows:
                    out.print(f"  {_markup(name)}: {_markup(text)}")
            case ui.Table():
                out.print(_table(block))
            case ui.Pre(content):
                for line in content.splitlines():
                    out.print(f"  {_markup(line)}")
            case ui.Details(summary, inner):
                out.print(f"[bold]{_markup(summary)}[/bold]")
                write(out, inner)
            case ui.Box(_, inner):
                write(out, inner)


def _table(block: ui.Table) -> Table:
    units = [f"{head.title} ({head.unit})" if head.unit else head.title for head in block.columns]
    left = [i for i, head in enumerate(block.columns) if head.kind != "number"]
    made = table(None, escape(block.first))
    for place, title in enumerate(map(escape, units)):
        made.add_column(title, justify="left" if place in left else "right", overflow="fold")
    for row in block.rows:
        kinds = [kind for td in row.cells for kind in td.kind.split()]
        style = next((style for kind, style in STYLES.items() if kind in kinds), "")
        made.add_row(*map(_markup, (row.head, *(td.text for td in row.cells))), style=style)
    return made


def _markup(text: ui.Text) -> str:
    """Returns text on one line, as markup without control characters."""
    from reports.blocks import BREAK, spans
    from reports.text import printable

    parts = []
    for span in spans(text):
        text = ", " if span is BREAK else escape(re.sub(r"\s+", " ", printable(span.text)))
        styles = [STYLES[name] for name in span.style.split() if name in STYLES]
        parts.append(f"[{' '.join(styles)}]{text}[/]" if styles and text else text)
    return "".join(parts)


def say_unused_gpus(out: Console) -> str | None:
    """Prints and returns why GPUs are unused. Uses stderr unless `out` is a terminal, so that pipes
    and files do not get it."""
    from harness.host.environment import unused_gpus

    reason = unused_gpus()
    if reason:
        read = out.is_terminal and not out.quiet
        to = out if read else Console(stderr=True, highlight=False, soft_wrap=True)
        to.print(f"[yellow]GPUs are not used[/yellow]: {escape(reason)}")
    return reason


def duration(seconds: float) -> str:
    """Formats seconds as `45 s`, `3 min 05 s`, `2 h 10 min`."""
    rounded = round(seconds)
    if rounded < 60:
        return f"{rounded} s"
    if rounded < 3600:
        return f"{rounded // 60} min {rounded % 60:02d} s"
    return f"{rounded // 3600} h {rounded % 3600 // 60:02d} min"


def measure_command(file: Path) -> str:
    return f"measure them with: python -m bench run --matrix {file}"


def ranking(out: Console, cells: Sequence[CellResult]) -> None:
    """Prints ranked cells per workload, then all other cells with reasons."""
    from harness.analysis.cell_result import CAUSES, NOT_CHECKED
    from harness.analysis.setting import grouped, systems

    ranked = [cell for cell in cells if cell.ranked]
    for workload, group in grouped(ranked, lambda cell: cell.cell.workload_name).items():
        out.print(_ranked(workload, group))
        if all(cell.cell.devices == 1 for cell in group) and len(group) > 1:
            out.print(
                "with one device nothing is communicated: this ranks each library's overhead,"
                " not its scaling"
            )
    for stand_in in sorted(
        {cell.placement.stand_in for cell in cells if cell.placement.stand_in is not None}
    ):
        out.print(f"† stand-in: {escape(stand_in)}")
    if any(cell.placement.oversubscribed for cell in cells):
        out.print("‡ more ranks than cores: its times tell you nothing about real hardware")
    for cause, meaning in CAUSES.items():
        if count := sum(cell.disturbance.by_cause.get(cause, 0) for cell in cells):
            out.print(f"¶ {meaning} {count} of its trials")
    for meaning in dict.fromkeys(
        meaning for cell in cells for meaning in cell.disturbance.gpu_findings
    ):
        out.print(f"  {escape(meaning)}")
    if absent := [system.name for system in systems(cells) if system.absent]:
        out.print(
            f"[yellow]not on this host[/yellow]: {escape(', '.join(absent))}; the reasons below"
            " say what is needed"
        )
    for cell in cells:
        if not cell.ranked and cell.outcome != NOT_CHECKED:
            expected = " (as expected)" if cell.expected else ""
            colour = "yellow" if cell.expected or cell.status in NOT_LAUNCHED else "red"
            status = "not ranked" if cell.status == "ok" else cell.status
            out.print(
                f"[{colour}]{status}{expected}[/{colour}] {escape(cell.cell.name)}:"
                f" {escape(cell.reason)}"
            )


def _ranked(workload: str, cells: Sequence[CellResult]) -> Table:
    from harness.cell.cell import over

    nodes = ["nodes"] if any(cell.cell.nodes > 1 for cell in cells) else []
    ranked = table(
        f"{workload}: ranked by throughput (● may be the fastest of its setting)",
        *("", "strategy", "devices", *nodes, "precision", "samples/s", "95%"),
        *("peak MiB/rank", "parity", "loss deviation"),
        left=("strategy", "precision", "parity"),
    )
    for cell in cells:
        marks = (
            ("†", cell.placement.stand_in is not None),
            ("‡", cell.placement.oversubscribed),
            ("¶", cell.disturbance.trials),
        )
        on = f" {over(cell.cell.links)}" if cell.cell.links else ""
        low, high = cell.speed.samples_per_second_low, cell.speed.samples_per_second_high
        peak, deviation = cell.memory.peak_memory_bytes, cell.parity.max_loss_deviation
        ranked.add_row(
            "●" if cell.relative.may_be_fastest else "",
            escape(cell.cell.label) + "".join(mark for mark, applies in marks if applies),
            f"{cell.cell.devices}{on}{' weak' if cell.cell.regime == 'weak' else ''}",
            *([str(cell.cell.nodes)] if nodes else []),
            cell.cell.precision,
            f"{cell.speed.samples_per_second or 0.0:.1f}",
            "1 trial" if None in (low, high) else f"{low:.1f} to {high:.1f}",
            "-" if peak is None else f"{peak / MEBIBYTE:.0f}",
            cell.parity_and_steps,
            "-" if deviation is None else f"{deviation:.1e}",
        )
    return ranked


def advice(out: Console, answer: Answer, where: str, between_runs: str) -> None:
    """Prints the answer. `where`: what was trained, on what. `between_runs`: the gain in several
    runs; empty if it is known from this run alone."""
    out.print(f"[bold]Which strategy?[/bold] {escape(where)}", highlight=False)
    for choice in answer.advice:
        out.print(f"[bold]{choice.role}[/bold] {escape(choice.sentence)}", highlight=False)
    from reports.verdict_sections import export_command

    out.print(f"[bold]Run it[/bold] {escape(export_command(answer))}", highlight=False)
    if between_runs:
        out.print(f"[bold]Between runs[/bold] {escape(between_runs)}", highlight=False)
    if answer.reason:
        out.print(f"[bold]Why[/bold] {escape(answer.reason)}", highlight=False)
    if answer.caveat:
        out.print(f"[bold]Caveat[/bold] {escape(answer.caveat)}", highlight=False)


def paths(out: Console, store: Store, planned: Plan, page: Path | None, finished: bool) -> None:
    from harness.record.files import TABLES

    tables = ",".join(table for table in TABLES if (store.folder / table).is_dir())
    lines = [f"parquet: {store.folder}/{{{tables}}}  run {planned.run_id}"]
    if page:
        lines.append(f"report:  {page}")
    if not finished:
        where = "" if str(store.folder) == "results" else f" --results {store.folder}"
        lines.append(f"interrupted; continue with: python -m bench run --resume{where}")
    for line in lines:
        out.print(escape(line))
