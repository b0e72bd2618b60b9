"""What a run shows on the terminal: the plan, the progress, the ranking."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from harness.record.status import NOT_LAUNCHED

if TYPE_CHECKING:
    import pandas as pd

    from harness.record.plan import Plan
    from harness.record.store import Store, TrialKey
    from harness.run.expected import References
    from harness.spec.cell import Cell

MEBIBYTE = 2**20


def console(quiet: bool = False) -> Console:
    """Colour only on a terminal; nothing at all where a machine reads stdout."""
    found = Console(quiet=quiet, highlight=False, soft_wrap=True)
    return (
        found
        if found.is_terminal
        else Console(quiet=quiet, highlight=False, soft_wrap=True, width=160)
    )


def duration(seconds: float) -> str:
    """`45 s`, `3 min 05 s`, `2 h 10 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def plan(
    out: Console,
    store: Store,
    planned: Plan,
    todo: Sequence[tuple[int, Cell, TrialKey]],
    gpu: str | None = None,
) -> tuple[dict[str, float], References]:
    """Prints the cells, the time they will take and what is left out; returns expected seconds by
    cell id, and the references.

    `gpu`: NVML's name of the GPUs that the plan is for.
    """
    from harness.host.cores import allowed_cores, oversubscribed
    from harness.run.expected import expected_seconds, references_of
    from harness.spec.link import over

    cores = len(allowed_cores())
    seconds = expected_seconds(store, planned.cells, cores, gpu)
    table = Table(title=_title(planned), title_justify="left")
    for column, justify in (
        ("strategy", "left"),
        ("workload", "left"),
        ("devices", "right"),
        ("precision", "left"),
        ("batch", "right"),
    ):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    table.add_column("expected", justify="right")
    for cell in planned.cells:
        crowded = cell.device == "cpu" and oversubscribed(cell)
        devices = f"{cell.devices}{' (more than cores)' if crowded else ''}"
        devices += f" on {cell.nodes} nodes" if cell.nodes > 1 else ""
        devices += f" {over(cell.links)}" if cell.links else ""
        batch = f"{cell.global_batch}{' weak' if cell.regime == 'weak' else ''}"
        each = f"{planned.trials_of(cell)} x {seconds[cell.id]:.1f} s"
        table.add_row(
            escape(cell.label), escape(cell.workload), devices, cell.precision, batch, each
        )
    out.print(table)
    for left in planned.left_out:
        out.print(
            f"[yellow]left out[/yellow] {escape(left.cell.name)}: {left.status}:"
            f" {escape(left.reason)}"
        )
    references = references_of([cell for _, cell, _ in todo], cores, gpu)
    total = sum(seconds[cell.id] for _, cell, _ in todo) + 4
    disk = f"{references.kept_bytes / 2**30:.1f} GiB of disk"
    out.print(f"{len(todo)} trials to run, about {duration(total)}")
    out.print(
        f"{references.number} reference runs, where none is kept: {duration(references.seconds)},"
        f" {disk}"
    )
    out.print(f"in all about {duration(total + references.seconds)}")
    return seconds, references


def inputs(out: Console, device: str) -> None:
    """What the predicted times rest on."""
    from harness.run.expected import CONTEXT_SECONDS, CPU, GPU

    known = dataclasses.asdict(GPU if device == "cuda" else CPU) | (
        {"context_seconds": CONTEXT_SECONDS} if device == "cuda" else {}
    )
    out.print(
        "predicted from: "
        + ", ".join(f"{name} {value:g}" for name, value in known.items())
        + " (docs/hosts.md)"
    )


def _title(planned: Plan) -> str:
    timed = (
        f"matrix {escape(planned.matrix)}: {len(planned.cells) - len(planned.once)} cells x"
        f" {planned.trials} trials"
    )
    return timed + (f", and {len(planned.once)} launched once, for parity" if planned.once else "")


@contextlib.contextmanager
def stop_signals() -> Iterator[None]:
    """SIGTERM stops a run as Ctrl-C does: what is running is recorded as interrupted.

    A second one does not disturb that.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Drawing:
    """A progress bar on a terminal, a line per trial elsewhere.

    Draws only when told something, at most twice a second.
    """

    def __init__(self, out: Console, planned: Plan, seconds: dict[str, float], total: int) -> None:
        self.out, self.seconds, self.total, self.done = out, seconds, total, 0
        every = planned.schedule()
        self.left = sum(seconds[cell.id] for cell, _ in every) * total / max(1, len(every))
        self.began = time.monotonic()
        self.current: Cell | None = None
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
        )
        self.bar = (
            Progress(*columns, console=out, auto_refresh=False)
            if out.is_terminal and not out.quiet
            else None
        )
        self.task = self.bar.add_task("starting", total=total, note="") if self.bar else None

    def __enter__(self) -> Drawing:
        if self.bar:
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar:
            self.bar.stop()

    def _draw(self, description: str | None = None, note: str = "") -> None:
        if self.bar and self.task is not None:
            said = None if description is None else escape(description)
            self.bar.update(self.task, completed=self.done, description=said, note=note)
            self.bar.refresh()

    def preparing(self, what: str) -> None:
        self._draw(what)
        if not self.bar:
            self.out.print(escape(what))

    def round_added(self, cells: Sequence[Cell]) -> None:
        self.total += len(cells)
        self.left += sum(self.seconds.get(cell.id, 0.0) for cell in cells)
        if self.bar and self.task is not None:
            self.bar.update(self.task, total=self.total)
        self.preparing(f"one more round: {len(cells)} cells have a wider interval than asked for")

    def trial_started(self, cell: Cell, trial: int, position: int) -> None:
        self.current = cell
        self._draw(cell.name, f"{duration(self.left)} left")

    def step(self, step: int, seconds: float) -> None:
        if self.current:
            self._draw(
                None,
                f"step {step + 1}/{self.current.total_steps} {seconds * 1e3:.0f} ms,"
                f" {duration(self.left)} left",
            )

    def trial_finished(self, cell: Cell, row: dict[str, Any]) -> None:
        self.done += 1
        self.left = max(0.0, self.left - self.seconds.get(cell.id, 0.0))
        elapsed = time.monotonic() - self.began
        if self.done >= 5:  # by then what was measured tells more than what was expected
            self.left = elapsed / self.done * (self.total - self.done)
        good = row["status"] == "ok" or row.get("expected")
        if not good:
            self.out.print(
                f"[red]{row['status']}[/red] {escape(cell.name)}: {escape(row['reason'])}"
            )
        elif not self.bar:
            rate = (
                f"{row['samples_per_second']:.1f} samples/s"
                if row.get("samples_per_second")
                else row["status"]
            )
            said = f"{cell.name}: {rate}, parity {row.get('parity_verdict')}"
            self.out.print(escape(f"[{self.done}/{self.total}] {said}, {duration(self.left)} left"))
        self._draw(None, f"{duration(self.left)} left")


def ranking(out: Console, table: pd.DataFrame) -> None:
    """The cells by throughput, per workload; what was not ranked below, with the reason."""
    from harness.analysis.disturbance import CAUSES
    from harness.analysis.summary import alike, systems
    from harness.spec.link import over

    for workload, group in table[table["ranked"]].groupby("workload", sort=False):
        shown = Table(
            title=f"{workload}: ranked by throughput (~ cannot be told apart from the one above)",
            title_justify="left",
        )
        nodes = ["nodes"] if (group["nodes"] > 1).any() else []
        for column in (
            "",
            "strategy",
            "devices",
            *nodes,
            "precision",
            "samples/s",
            "95 %",
            "peak MiB/rank",
            "parity",
            "loss deviation",
        ):
            shown.add_column(
                column,
                justify="left" if column in ("strategy", "precision", "parity", "") else "right",
            )
        rows = group.to_dict("records")
        for same, row in zip(alike(rows), rows, strict=True):
            half = (
                (row["samples_per_second_high"] or 0) - row["samples_per_second"]
                if _known(row["samples_per_second_high"])
                else None
            )
            marks = "".join(
                m
                for m, on in (
                    ("†", _known(row["stand_in"])),
                    ("‡", row["oversubscribed"]),
                    ("¶", row["disturbed"]),
                )
                if on
            )
            on = f" {over(row['links'])}" if _known(row["links"]) else ""
            shown.add_row(
                "~" if same else "",
                escape(row["label"]) + marks,
                f"{row['devices']}{on}{' weak' if row['regime'] == 'weak' else ''}",
                *(str(row[name]) for name in nodes),
                row["precision"],
                f"{row['samples_per_second']:.1f}",
                f"± {half:.1f}" if half is not None else "1 trial",
                (
                    f"{row['peak_memory_bytes'] / MEBIBYTE:.0f}"
                    if _known(row["peak_memory_bytes"])
                    else "-"
                ),
                row["parity_verdict"],
                (
                    f"{row['parity_max_loss_deviation']:.1e}"
                    if _known(row["parity_max_loss_deviation"])
                    else "-"
                ),
            )
        out.print(shown)
        if (group["devices"] == 1).all() and len(group) > 1:
            out.print(
                "on one device nothing is communicated: this ranks what each library costs by"
                " itself, not how it scales"
            )
    if table["stand_in"].notna().any():
        for said in sorted(set(table["stand_in"].dropna())):
            out.print(f"† stand-in: {escape(said)}")
    if table["oversubscribed"].any():
        out.print("‡ more ranks than cores: its times say nothing of real hardware")
    if table["disturbed"].any():
        for cause, words in CAUSES.items():
            if count := sum(causes.get(cause, 0) for causes in table["disturbed_by"]):
                out.print(f"¶ {words} {count} of its trials")
        for words in dict.fromkeys(itertools.chain.from_iterable(table["gpu_findings"])):
            out.print(f"  {escape(words)}")
    if absent := [system.name for system in systems(table.to_dict("records")) if system.absent]:
        out.print(
            f"[yellow]not on this host[/yellow]: {escape(', '.join(absent))}; each reason below"
            " says what would change it"
        )
    for row in table[~table["ranked"]].to_dict("records"):
        expected = " (as expected)" if row["expected"] else ""
        colour = "yellow" if row["expected"] or row["status"] in NOT_LAUNCHED else "red"
        out.print(
            f"[{colour}]{row['status']}{expected}[/{colour}] {escape(row['cell_name'])}:"
            f" {escape(row['reason'])}"
        )


def _known(value: Any) -> bool:
    return value is not None and value == value


def paths(out: Console, store: Store, planned: Plan, page: Path | None, finished: bool) -> None:
    from harness.record.schema import TABLES

    tables = ",".join(table for table in TABLES if (store.folder / table).is_dir())
    out.print(f"parquet: {store.folder}/{{{tables}}}  run {planned.run_id}")
    if page:
        out.print(f"report:  {page}")
    if not finished:
        out.print(
            "interrupted; go on with: python -m bench run --resume"
            + ("" if str(store.folder) == "results" else f" --results {store.folder}")
        )
