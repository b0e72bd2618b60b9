"""Trials -> one row per cell: what tables and reports show."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.stats import efficiency, estimate

if TYPE_CHECKING:
    import pandas as pd

RANKED = ("exact", "within tolerance")


def cells(trials: pd.DataFrame) -> pd.DataFrame:
    """One row per run and cell. Columns beside the cell's own:

    status (the worst of its trials), reason, expected, trials (finished ones), samples_per_second, tokens_per_second with
    _low and _high (95 %), step_seconds_p50, peak_memory_bytes (largest), parity_* (of the trial that deviates most),
    ranked (may be compared by speed), efficiency_own (against the same strategy on one device), efficiency_single (against
    the single process), both null where there is nothing to compare with.
    """
    import pandas as pd

    rows = [_cell(group) for _, group in trials.groupby(["run_id", "cell_id"], sort=False)]
    table = pd.DataFrame(rows)
    if table.empty:
        return table
    table["efficiency_own"] = [_against(table, row, own=True) for _, row in table.iterrows()]
    table["efficiency_single"] = [_against(table, row, own=False) for _, row in table.iterrows()]
    return table.sort_values(["ranked", "samples_per_second"], ascending=[False, False], na_position="last", ignore_index=True)


_SAME = [
    "run_id",
    "cell_id",
    "cell_name",
    "label",
    "strategy",
    "options",
    "workload",
    "data",
    "sequence_length",
    "devices",
    "device",
    "processes",
    "data_parallel",
    "pipeline_parallel",
    "tensor_parallel",
    "precision",
    "regime",
    "global_batch",
    "micro_batches",
    "optimizer",
    "launcher",
    "threads_per_device",
    "stand_in",
    "oversubscribed",
    "parameters",
    "flops_per_step",
    "memory_method",
    "parity_steps",
]
_WORST = ("failed", "timeout", "out_of_memory", "diverged", "interrupted", "unavailable", "refused", "ok")


def _cell(group: pd.DataFrame) -> dict[str, Any]:
    """One cell's row. Only the last attempt of each trial counts."""
    last = group.sort_values("attempt").groupby("trial", sort=True).tail(1)
    row = {name: None if last[name].isna().iloc[0] else last[name].iloc[0] for name in _SAME}
    worst = min(last.index, key=lambda i: _WORST.index(last.loc[i, "status"]))
    row |= {"status": last.loc[worst, "status"], "reason": last.loc[worst, "reason"], "expected": bool(last.loc[worst, "expected"])}
    good = last[last["samples_per_second"].notna()]
    row["trials"] = len(good)
    for figure in ("samples_per_second", "tokens_per_second"):
        values = good[figure].dropna().tolist()
        found = estimate(values) if values else None
        row[figure] = found.value if found else None
        row[f"{figure}_low"], row[f"{figure}_high"] = (found.low, found.high) if found else (None, None)
    for figure in [
        "step_seconds_p50",
        "step_seconds_p95",
        "data_seconds_p50",
        "setup_seconds",
        "startup_seconds",
        "first_step_seconds",
        "mfu",
        "bubble_fraction",
        "memory_imbalance",
        "wall_seconds",
    ]:
        row[figure] = good[figure].median() if len(good) else None
    row["trend"] = good["trend"].abs().max() if len(good) else None
    row["peak_memory_bytes"] = good["peak_memory_bytes"].max() if len(good) else None
    judged = last[last["parity_verdict"].notna()]
    order = ("diverged", "unknown", "within tolerance", "exact")
    if len(judged):
        chosen = min(judged.index, key=lambda i: order.index(judged.loc[i, "parity_verdict"]))
        for name in [c for c in last.columns if c.startswith("parity_") and c != "parity_steps"]:
            row[name] = judged.loc[chosen, name]
        row["losses"], row["reference_losses"] = judged.loc[chosen, "losses"], judged.loc[chosen, "reference_losses"]
    else:
        row |= {"parity_verdict": None}
    row["ranked"] = row["parity_verdict"] in RANKED and row["status"] == "ok"
    return row


def _against(table: pd.DataFrame, row: Any, own: bool) -> float | None:
    """Scaling efficiency of a row; weak scaling compares with one device at the batch that each device has."""
    if not row["ranked"]:
        return None
    batch = row["global_batch"] // row["devices"] if row["regime"] == "weak" else row["global_batch"]
    same = table["ranked"] & (table["run_id"] == row["run_id"]) & (table["devices"] == 1) & (table["global_batch"] == batch)
    for name in ("workload", "data", "sequence_length", "precision", "optimizer", "device", "threads_per_device"):
        same &= table[name] == row[name]
    if own:
        for name in ("strategy", "options", "micro_batches", "launcher"):
            same &= table[name] == row[name]
    else:
        same &= (table["strategy"] == "single") & (table["micro_batches"] == 1)
    base = table[same]
    if base.empty:
        return None
    return efficiency(row["samples_per_second"], row["devices"], base["samples_per_second"].iloc[0])


def indistinguishable(table: pd.DataFrame) -> list[bool]:
    """For a table in ranking order: whether each row's interval overlaps that of the row above it."""
    result = [False]
    for above, row in zip(table.to_dict("records"), table.to_dict("records")[1:], strict=False):
        low, high = above["samples_per_second_low"], row["samples_per_second_high"]
        known = low is not None and high is not None and low == low and high == high
        result.append(bool(known and high >= low))
    return result[: len(table)]
