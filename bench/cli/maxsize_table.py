"""The final table of bench maxsize."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from harness.analysis.maxsize import MaxsizeResult
    from harness.record.plan import Plan


def show(out: Console, plan: Plan, rows: list[MaxsizeResult]) -> list[str]:
    """Prints the table, the bytes responsible, and where the order departs from theory; returns
    these notes."""
    from rich.markup import escape
    from rich.table import Table

    from harness.analysis.maxsize import limits, mebibytes, order_notes

    assert plan.search is not None
    first = next((row for row in rows if row.step), None)
    grown = "longest trainable sequence" if plan.search.get("tokens") else "largest trainable model"
    title = f"{grown} within {mebibytes(plan.search['budget'])} per rank"
    if first and first.step:
        title += f"; a search step is {first.amount(first.step)}"
    table = Table(title=title, title_justify="left")
    table.add_column("strategy", overflow="fold")
    table.add_column("ranks", justify="right")
    for column in ("reached", "formula", "ratio", "peak", "set-up peak", "between steps"):
        table.add_column(column, justify="right")
    table.add_column("parity")
    devices = {cell.label: str(cell.devices) for cell in plan.cells}
    for row in rows:
        peaks = [
            mebibytes(size) if size else "-"
            for size in (row.peak_memory_bytes, row.setup_peak_memory_bytes)
        ]
        table.add_row(
            escape(row.label),
            devices.get(row.label, "-"),
            row.largest_model,
            row.text(row.predicted) if row.predicted else "-",
            f"{row.ratio:.2f}" if row.ratio else "-",
            *peaks,
            mebibytes(sum(row.kept.values())) if row.kept else "-",
            row.parity or "-",
        )
    out.print(table)
    out.print(_filled(rows))
    for row in rows:
        if row.reason:
            out.print(escape(f"{row.label}: {row.status}: {row.reason}"))
        elif reasons := limits(row):
            out.print(escape(f"{row.label}: {reasons}"))
    notes = order_notes(rows, plan.search["order"])
    for note in notes:
        out.print(escape(note))
    return notes


def _filled(rows: list[MaxsizeResult]) -> Table:
    """Returns what filled each budget at the smallest size that does not train."""
    from rich.markup import escape
    from rich.table import Table

    names = list(next((row.fill for row in rows if row.fill), {}))
    table = Table(title="what fills the budget where memory runs out, MiB", title_justify="left")
    table.add_column("strategy", overflow="fold")
    table.add_column("at", justify="right")
    table.add_column("in")
    for name in names:
        table.add_column(name.removesuffix(" of threads"), justify="right")
    for row in rows:
        if row.fill:
            sizes = [f"{row.fill[name] / 2**20:.0f}" for name in names]
            table.add_row(
                escape(row.label), row.text(row.next_parameters or 0), row.failed_in or "-", *sizes
            )
    return table
