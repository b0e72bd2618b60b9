"""What a run shows on the terminal: the plan, the progress, the ranking."""

from __future__ import annotations

import contextlib
import itertools
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from harness.record.status import NOT_LAUNCHED

if TYPE_CHECKING:
    import pandas as pd

    from harness.record.plan import Plan
    from harness.record.store import Store

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
