"""The recorded trials of a check, as a table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from harness.record.status import WORST_FIRST
from harness.spec.errors import UsageError

if TYPE_CHECKING:
    import pandas as pd

MOST_OF_A_REASON = 160


def trials(results: Path) -> pd.DataFrame | None:
    """Returns a results folder's trials, worst first; None without any."""
    from harness.record.store import Store

    try:
        table = Store(results).load(steps=False).trials
    except (UsageError, OSError):  # no run yet
        return None
    if table.empty:
        return None
    order = {status: place for place, status in enumerate(WORST_FIRST)}
    order["diverged parity"] = order["diverged"]
    judged = table["status"].where(table["parity_verdict"] != "diverged", "diverged parity")
    return table.iloc[judged.map(order).argsort(kind="stable")]


def lines(table: pd.DataFrame) -> list[str]:
    """Returns one line per trial; cells that did not run are named once."""
    import pandas as pd

    def number(value: object, form: str) -> str:
        known = isinstance(value, float | int) and not pd.isna(value)
        return format(value, form) if known else "-"

    texts = []
    for row in table.to_dict("records"):
        bad = row["status"] != "ok" or row["parity_verdict"] == "diverged"
        reason = str(row["reason"] or row["parity_reason"] or "")[:MOST_OF_A_REASON] if bad else ""
        texts.append(
            f"{row['status']:13s} {row['parity_verdict'] or '-'!s:17s}"
            f" loss {number(row['parity_max_loss_deviation'], '.1e')}"
            f" update {number(row['parity_max_update_deviation'], '.1e')}"
            f" (noise {number(row['reference_update_noise'], '.1e')})"
            f" step {number(row['step_seconds_p50'], '.3f')} s"
            f" MFU {number(row['mfu'], '.2f')} wall {number(row['wall_seconds'], '.1f')} s"
            f" {row['cell_name']} {reason}".rstrip()
        )
    return list(dict.fromkeys(texts))
