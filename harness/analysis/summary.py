"""Trials -> one row per cell: what tables and reports show."""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.analysis.disturbance import CAUSES, Cause, disturbances
from harness.analysis.setting import SCALED, batch, series, setting
from harness.analysis.stats import (
    COMPARED_CONFIDENCE,
    CONFIDENCE,
    LEAST_TRIALS,
    Comparison,
    Estimate,
    SliceRates,
    compare_rounds,
    compare_runs,
    efficiency,
    estimate,
)
from harness.host.gpu_record import GpuRecord
from harness.record.status import NOT_LAUNCHED, WORST_FIRST
from harness.spec.cell import BASELINE

if TYPE_CHECKING:
    import pandas as pd

RANKED = ("exact", "within tolerance")

Row = dict[str, Any]


def cells(trials: pd.DataFrame) -> pd.DataFrame:
    """One row per run and cell. Columns beside the cell's own:

    status (the worst of its trials, of those that the user did not stop), reason, expected, trials
    (finished ones), samples_per_second, tokens_per_second with _low and _high (95 %), by_round
    (samples_per_second by number of trial), turns (by number of trial, of those that trained by
    turns), disturbed (trials that something disturbed), disturbed_by (their number by cause, see
    harness.measure.load), gpu_findings (what was found on their GPUs, in words), step_seconds_p50,
    peak_memory_bytes (largest), parity_* (of the trial that deviates most), ranked (may be compared
    by speed), efficiency_own (against the same strategy on one device), efficiency_single (against
    the single process), both null where there is nothing to compare with.

    Of the fullest rank, in the trial where it keeps most: parameter_bytes, gradient_bytes,
    optimizer_bytes, library_bytes, their sum state_bytes, formula_bytes and formula_deviation (null
    without a formula), library_buffers, host_state_bytes. Of the rank that sends most, median over
    trials: sent_bytes_per_step.
    """
    import pandas as pd

    return pd.DataFrame(cell_rows(trials))


def cell_rows(trials: pd.DataFrame) -> list[Row]:
    """The rows of `cells`, what is null being None: ranked ones first, fastest first."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in _plain(trials):
        found.setdefault((row["run_id"], row["cell_id"]), []).append(row)
    rows = [_cell(group) for group in found.values()]
    _scale(rows)
    return sorted(rows, key=lambda row: (not row["ranked"], -(row["samples_per_second"] or 0.0)))


_SAME = [
    "run_id",
    "cell_id",
    "cell_name",
    "label",
    "system",
    "strategy",
    "options",
    "workload",
    "data",
    "sequence_length",
    "devices",
    "nodes",
    "links",
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
    "wraps_ddp",
    "threads_per_device",
    "stand_in",
    "oversubscribed",
    "parameters",
    "trained_parameters",
    "flops_per_step",
    "memory_method",
    "parity_steps",
]


def _plain(trials: pd.DataFrame) -> Iterator[Row]:
    """The trials as dictionaries in which what is null is None: thousands of small frames would
    take ten times as long."""
    columns = {
        str(name): column.astype(object).where(column.notna(), None).tolist()
        for name, column in trials.items()
    }
    return (
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    )


def ended(trials: Sequence[dict[Any, Any]]) -> Sequence[dict[Any, Any]]:
    """Without those that the user stopped, which say nothing of the cell; all of them where none
    came to an end."""
    return [trial for trial in trials if trial["status"] != "interrupted"] or trials


def worst_of(trials: Sequence[Mapping[Any, Any]]) -> Mapping[Any, Any]:
    """The trial whose status is its cell's: the first of those that ended worst."""
    return min(trials, key=lambda trial: WORST_FIRST.index(trial["status"]))


def reason_of(trials: Sequence[Mapping[Any, Any]]) -> str:
    """Why a cell's status is what it is, and of how many of its trials, where others ended
    otherwise."""
    worst = worst_of(trials)
    same = sum(trial["status"] == worst["status"] for trial in trials)
    return (
        worst["reason"]
        if same == len(trials) or worst["status"] == "ok"
        else f"{same} of {len(trials)} trials: {worst['reason']}"
    )


def _cell(group: Sequence[Row]) -> Row:
    """One cell's row. Only the last attempt of each trial counts."""
    attempts = {row["trial"]: row for row in sorted(group, key=lambda row: row["attempt"])}
    last = ended([attempts[trial] for trial in sorted(attempts)])
    row = {name: last[0][name] for name in _SAME}
    row["nodes"] = int(row["nodes"] or 1)  # unknown before version 4, when there was but one
    worst = worst_of(last)
    row |= {
        "status": worst["status"],
        "reason": reason_of(last),
        "expected": bool(worst["expected"]),
    }
    good = [one for one in last if one["samples_per_second"] is not None]
    row["trials"] = len(good)
    for figure in ("samples_per_second", "tokens_per_second"):
        values = _known(good, figure)
        found = estimate(values) if values else None
        row[figure] = found.value if found else None
        row[f"{figure}_low"], row[f"{figure}_high"] = (
            (found.low, found.high) if found else (None, None)
        )
    row["by_round"] = {int(one["trial"]): float(one["samples_per_second"]) for one in good}
    row["turns"] = turns_of(good)
    causes = Counter(cause for one in good for cause in _causes(one))
    row["disturbed"] = sum(bool(_causes(one)) for one in good)
    row["disturbed_by"] = {cause: causes[cause] for cause in CAUSES if causes[cause]}
    row["gpu_findings"] = tuple(
        dict.fromkeys(f.words for one in good for f in gpus_of(one).findings())
    )
    for figure in _TYPICAL:
        row[figure] = statistics.median(values) if (values := _known(good, figure)) else None
    row["trend"] = max(map(abs, _known(good, "trend")), default=None)
    for figure in ("peak_memory_bytes", "offload_kept_bytes", "fp32_loss_deviation"):
        row[figure] = max(_known(good, figure), default=None)
    row |= _by_rank(good)
    judged = [one for one in last if one["parity_verdict"] is not None]
    row["parity_verdict"] = None
    if judged:
        order = ("diverged", "unknown", "within tolerance", "exact")
        chosen = min(judged, key=lambda one: order.index(one["parity_verdict"]))
        row |= {
            name: value
            for name, value in chosen.items()
            if name.startswith("parity_") and name != "parity_steps"
        }
        row |= {"losses": chosen["losses"], "reference_losses": chosen["reference_losses"]}
    row["ranked"] = (
        row["parity_verdict"] in RANKED
        and row["status"] == "ok"
        and row["samples_per_second"] is not None
    )
    return row


_TYPICAL = (
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
    "energy_joules_per_sample",
    "offload_read_bytes_per_step",
    "offload_written_bytes_per_step",
)
"""Figures of which a cell shows the median over its trials."""


def _known(rows: Sequence[Row], name: str) -> list[float]:
    return [row[name] for row in rows if row[name] is not None]


LOAD = ("foreign_load_cores", "idle_before", "idle_after")
GPUS = ("gpu_before", "gpu_after", "gpu_use")


def gpus_of(trial: Mapping[Any, Any]) -> GpuRecord:
    """What a trial's row says of its GPUs."""
    return GpuRecord.read(*(trial[name] for name in GPUS))


def _causes(trial: Mapping[Any, Any]) -> tuple[Cause, ...]:
    foreign, before, after = (known(trial[name]) for name in LOAD)
    return disturbances(foreign, before, after, gpus_of(trial))


def known(value: Any) -> float | None:
    """A number, None where it is null."""
    return None if value is None or value != value else float(value)


def turns_of(trials: Iterable[Mapping[Any, Any]]) -> dict[int, SliceRates]:
    """Begin and throughput of each turn, by number of trial, of those that trained by turns."""
    found: dict[int, SliceRates] = {}
    for one in trials:
        if begins := _numbers(one["turn_began"]):
            found[int(one["trial"])] = list(
                zip(begins, _numbers(one["turn_samples_per_second"]), strict=True)
            )
    return found


def too_wide(trials: pd.DataFrame, precision: float) -> dict[str, float]:
    """Ranked cell's id -> half width of the interval over the throughput, where that is above
    `precision` or trials are too few.

    Of cells that trained by turns with others in their setting it is the interval of the ratio (95
    % too), the widest of them.
    """
    ranked, found = [row for row in cell_rows(trials) if row["ranked"]], {}
    for row in ranked:
        alike = [
            x
            for x in ranked
            if x is not row and x["run_id"] == row["run_id"] and setting(x) == setting(row)
        ]
        comparisons = [
            one
            for x in alike
            if x["turns"] and row["turns"] and (one := compared(row, x, CONFIDENCE))
        ]
        if comparisons:
            reached = max(
                math.inf if one.precision is None else one.precision for one in comparisons
            )
        else:
            low, high = (known(row[f"samples_per_second_{end}"]) for end in ("low", "high"))
            own = Estimate(row["samples_per_second"], low, high, row["trials"]).precision
            reached = math.inf if own is None else own
        if reached > precision or row["trials"] < LEAST_TRIALS:
            found[str(row["cell_id"])] = reached
    return found


def _numbers(value: Any) -> list[float]:
    """A list column's value; empty where the file's version did not have it."""
    return [] if value is None else [float(x) for x in value]


_KEPT = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "library_bytes")


def _by_rank(good: Sequence[Row]) -> Row:
    """What each rank kept, sent and needed, as the figures of one rank."""
    row: Row = dict.fromkeys(
        [*_KEPT, "state_bytes", "host_state_bytes", "library_buffers", "sent_bytes_per_step"]
    )
    row |= dict.fromkeys(["formula_bytes", "formula_transient_bytes", "formula_deviation"]) | {
        "peak_memory_bytes_by_rank": []
    }
    sent = [max(ranks) for one in good if (ranks := _numbers(one["sent_bytes_per_step"]))]
    if sent:
        row["sent_bytes_per_step"] = statistics.median(sent)
    by_rank = [ranks for one in good if (ranks := _numbers(one["peak_memory_bytes_by_rank"]))]
    row["peak_memory_bytes_by_rank"] = max(by_rank, key=max, default=[])
    fullest: tuple[float, Row, dict[str, float]] | None = None
    for trial in good:
        for kept in zip(*(_numbers(trial[name]) for name in _KEPT), strict=True):
            if fullest is None or sum(kept) > fullest[0]:
                fullest = sum(kept), trial, dict(zip(_KEPT, kept, strict=True))
    if fullest is None:
        return row
    total, trial, kinds = fullest
    row |= {**kinds, "state_bytes": total, "library_buffers": trial["library_buffers"]}
    row["host_state_bytes"] = max(_numbers(trial["host_state_bytes"]), default=None)
    formula = [trial[f"formula_{name}"] for name in _KEPT]
    if all(value is not None for value in formula):
        row |= {
            "formula_bytes": sum(formula),
            "formula_transient_bytes": trial["formula_transient_bytes"],
        }
        row["formula_deviation"] = (
            total / row["formula_bytes"] - 1 if row["formula_bytes"] else None
        )
    return row


def _scale(rows: Sequence[Row]) -> None:
    """Adds the scaling efficiencies; weak scaling compares with one device at the batch that each
    device has."""
    own: dict[tuple[Any, ...], float] = {}
    single: dict[tuple[Any, ...], float] = {}
    for row in rows:
        if row["ranked"] and row["devices"] == 1:
            key = (row["run_id"], *setting(row, SCALED), row["global_batch"])
            own.setdefault((*key, *series(row)), row["samples_per_second"])
            if row["strategy"] == BASELINE and row["micro_batches"] == 1:
                single.setdefault(key, row["samples_per_second"])
    for row in rows:
        key = (row["run_id"], *setting(row, SCALED), batch(row))
        for column, base in (("own", own.get((*key, *series(row)))), ("single", single.get(key))):
            compared_with = base if row["ranked"] else None
            row[f"efficiency_{column}"] = (
                efficiency(row["samples_per_second"], row["devices"], compared_with)
                if compared_with
                else None
            )


def alike(rows: Sequence[Any]) -> list[bool]:
    """For rows in ranking order: whether each cannot be told apart from the row above it."""
    return [False, *(same(row, above) for above, row in itertools.pairwise(rows))][: len(rows)]


def compared(row: Any, other: Any, confidence: float = COMPARED_CONFIDENCE) -> Comparison | None:
    """The throughput of one cell over another's: within rounds where both are of one run; None
    where one has no trial."""
    if row["run_id"] == other["run_id"]:
        return compare_rounds(
            row["by_round"], other["by_round"], (row["turns"], other["turns"]), confidence
        )
    return compare_runs(
        list(row["by_round"].values()), list(other["by_round"].values()), confidence
    )


def same(row: Any, other: Any) -> bool:
    """Whether two cells cannot be told apart."""
    found = compared(row, other)
    return found is None or found.verdict == "no difference seen"


@dataclass(frozen=True)
class System:
    """The cells that the matrix files under one system; a cell without one stands for itself, by
    its label."""

    name: str
    cells: tuple[Row, ...]

    def count(self, *statuses: str) -> int:
        return sum(row["status"] in statuses for row in self.cells)

    @property
    def absent(self) -> bool:
        """Whether this host could run none of its cells."""
        return self.count("unavailable") > 0 and self.count(*NOT_LAUNCHED) == len(self.cells)


def systems(rows: Sequence[Any]) -> list[System]:
    """All systems in the order of their leading numbers, those without one after them as they
    come."""
    grouped: dict[str, list[Row]] = {}
    for row in rows:
        grouped.setdefault(
            row["system"] if isinstance(row["system"], str) else row["label"], []
        ).append(row)
    found = [System(name, tuple(cells)) for name, cells in grouped.items()]
    return sorted(
        found,
        key=lambda system: (
            int(number.group()) if (number := re.match(r"\d{1,9}", system.name)) else 10**9
        ),
    )
