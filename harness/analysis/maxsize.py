"""What a search for the largest model found: its table, from what was recorded alone, and what
filled the memory."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.record.plan import Plan
from harness.record.search import COLUMNS, KINDS, MATRIX, ODD, family
from harness.record.store import Results
from harness.spec.cell import Cell

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class MaxsizeResult:
    """What the search found for one strategy: a row of the table."""

    label: str
    status: str
    """found, none fits, all fit, unfinished, stopped (a probe failed for another reason than
    memory), unavailable, refused."""
    reason: str
    workload: str
    budget: int
    step: int | None = None
    """Parameters of one search step."""
    parameters: int | None = None
    """Of the largest model that trains."""
    next_parameters: int | None = None
    """Of the smallest that does not."""
    predicted: int | None = None
    """Parameters that the formula's states allow."""
    peak_memory_bytes: int | None = None
    setup_peak_memory_bytes: int | None = None
    parity: str | None = None
    kept: Mapping[str, int] = field(default_factory=dict)
    """Bytes of the fullest rank between steps, by kind."""
    buffers: Mapping[str, int] = field(default_factory=dict)
    """The library's by name."""
    failed_in: str | None = None
    """What the smallest model that does not train ran out of memory in."""
    failure: str = ""
    """How it failed otherwise, though only under the limit."""
    holding: Mapping[str, Any] = field(default_factory=dict)
    """What a rank held then, see harness/measure/oom.py."""
    formula: Mapping[str, float] = field(default_factory=dict)
    """What the formula gives for that model."""
    probes: int = 0
    seconds: float = 0.0

    @property
    def largest_model(self) -> str:
        """`50.1M`, or what stands in its place."""
        return millions(self.parameters) if self.parameters else self.status

    @property
    def ratio(self) -> float | None:
        """Reached over predicted."""
        return self.parameters / self.predicted if self.parameters and self.predicted else None

    @property
    def fill(self) -> dict[str, float]:
        """What filled the budget where memory ran out, bytes by name: states by kind, then the
        rest; empty where nothing ran out.

        `temporaries`: what the failed operation freed again, and what it asked for. `rest`:
        activations that autograd keeps, buffers of C++, Python's heap.
        """
        if not self.holding:
            return {}
        held = {kind: float(self.holding.get(kind, 0)) for kind in KINDS}
        held["other tensors"] = float(self.holding.get("other", 0))
        held["stacks of threads"] = float(self.holding.get("stacks", 0))
        held["rest"] = max(0.0, self.holding["in_use"] - sum(held.values()))
        held["temporaries"] = max(0.0, self.budget - self.holding["in_use"])
        return held

    @property
    def responsible(self) -> list[tuple[str, float]]:
        """What ZeRO's model states do not have, largest first: name and bytes, where memory ran
        out.

        None below 1 % of the budget.
        """
        fill = self.fill
        beyond = (
            {
                f"{kind} beyond the formula's": fill[kind] - self._expected(kind)
                for kind in KINDS[:3]
            }
            if fill and self.formula
            else {}
        )
        beyond |= {name: float(size) for name, size in (self.holding.get("buffers") or {}).items()}
        beyond |= {name: size for name, size in fill.items() if name not in KINDS}
        if self.holding.get("largest"):
            beyond[f"other tensors ({', '.join(self.holding['largest'])})"] = beyond.pop(
                "other tensors"
            )
        if fill:
            beyond[f"temporaries of {self.failed_in}"] = beyond.pop("temporaries")
            beyond["activations, buffers of C++ and Python's heap"] = beyond.pop("rest")
        return sorted(
            [(name, size) for name, size in beyond.items() if size >= self.budget / 100],
            key=lambda one: -one[1],
        )

    def _expected(self, kind: str) -> float:
        """Bytes by the formula; gradients may be what it files under library or transient."""
        if kind != "gradients":
            return self.formula[kind]
        missing = max(0.0, self.formula["library"] - float(self.holding.get("library", 0)))
        return self.formula[kind] + self.formula["transient"] + missing


def millions(parameters: int) -> str:
    return f"{parameters / 1e6:.1f}M"


def mebibytes(size: float) -> str:
    return f"{size / 2**20:.0f} MiB"


def limits(row: MaxsizeResult) -> str:
    """Where memory ran out and what filled it beside ZeRO's model states, in words; empty where
    nothing ran out."""
    said = []
    if row.failed_in:
        beyond = ", ".join(f"{name} {mebibytes(size)}" for name, size in row.responsible)
        said.append(
            f"{millions(row.next_parameters or 0)} parameters run out of memory in {row.failed_in};"
            f" beside ZeRO's model states: {beyond}"
        )
    elif row.failure:
        said.append(
            f"{millions(row.next_parameters or 0)} parameters fail under the limit only:"
            f" {row.failure}"
        )
    setup, steps = row.setup_peak_memory_bytes or 0, row.peak_memory_bytes or 0
    if row.parameters and setup > steps:
        whole = f"every rank first builds the whole model, {mebibytes(4 * row.parameters)}"
        said.append(
            f"at {row.largest_model} set-up takes {mebibytes(setup)}, more than the steps'"
            f" {mebibytes(steps)}: {whole}"
        )
    return "; ".join(said)


def order_notes(rows: Sequence[MaxsizeResult], order: Sequence[Sequence[str]]) -> list[str]:
    """A sentence for every neighbour in a chain that does not reach more than the one before it,
    with the bytes responsible."""
    by_label = {row.label: row for row in rows if row.parameters}
    notes = []
    for chain in order:
        present = [by_label[label] for label in chain if label in by_label]
        for less, more in itertools.pairwise(present):
            if (more.parameters or 0) <= (less.parameters or 0):
                notes.append(
                    f"not the theory's order: {more.label} reaches {more.largest_model}, no more"
                    f" than {less.label} with {less.largest_model}. {more.label}: {limits(more)}."
                    f" {less.label}: {limits(less)}"
                )
    return notes


def found(results: Results) -> list[MaxsizeResult]:
    """The table of each search in these results, in the order of its cells; from what was recorded
    alone."""
    rows: list[MaxsizeResult] = []
    for run in results.runs[results.runs["matrix"] == MATRIX].to_dict("records"):
        plan = Plan.from_row(run)
        if plan.search is None:
            continue
        trials = results.trials[results.trials["run_id"] == plan.run_id]
        unlimited = trials[trials["memory_limit_bytes"].isna()]
        families = [family(Cell(**json.loads(cell))).id for cell in trials["cell"]]
        for cell in plan.cells:
            mine = trials[[one == cell.id for one in families]]
            rows.append(_found(cell, plan.search, mine, unlimited))
        rows += [
            MaxsizeResult(x.cell.label, x.status, x.reason, x.cell.workload, plan.search["budget"])
            for x in plan.left_out
        ]
    return rows


def _found(
    cell: Cell, search: Mapping[str, Any], trials: pd.DataFrame, unlimited: pd.DataFrame
) -> MaxsizeResult:
    """One strategy's row from its trials.

    `unlimited`: those that had no limit, of probes that failed in an odd way.
    """
    known = search["predicted"][cell.id]
    last = trials.sort_values("attempt").groupby(["cell_id", "trial"], sort=False).tail(1)
    probes, verified = (
        last[last["trial"] == 0],
        last[(last["trial"] == 1) & (last["status"] == "ok")],
    )
    trains = set(
        unlimited[(unlimited["label"] == cell.label) & (unlimited["status"] == "ok")]["workload"]
    )
    odd = last[last["status"].isin(ODD)]
    short = last[
        (last["status"] == "out_of_memory")
        | (last["status"].isin(ODD) & last["workload"].isin(trains))
    ].sort_values("parameters")
    odd = odd[~odd["workload"].isin(trains)]
    fits = probes[probes["status"] == "ok"].sort_values("parameters")
    facts: dict[str, Any] = {
        "workload": cell.workload,
        "step": known["step"],
        "predicted": known["parameters"],
        "probes": len(last),
        "seconds": float(last["wall_seconds"].sum()),
    }
    if not short.empty:
        row = short.iloc[0]
        facts |= {
            "next_parameters": int(row["parameters"]),
            "failed_in": _text(row["failed_in"]),
            "failure": "" if row["status"] == "out_of_memory" else str(row["reason"]),
            "holding": json.loads(_text(row["failed_holding"]) or "{}"),
            "formula": _formula(row, known["activations"]),
        }
    best = verified if not verified.empty else fits
    if not best.empty:
        facts |= _reached(best.sort_values("parameters").iloc[-1])
    reason = ""
    if not odd.empty:
        status, reason = (
            "stopped",
            f"{odd.iloc[0]['cell_name']}: {odd.iloc[0]['status']}: {odd.iloc[0]['reason']}",
        )
    elif not verified.empty:
        status = "found" if not short.empty else "all fit"
    elif not short.empty and short.iloc[0]["workload"] == cell.workload:
        status, reason = "none fits", str(short.iloc[0]["reason"])
    else:
        status, reason = "unfinished", "go on with: python -m bench maxsize --resume"
    return MaxsizeResult(
        label=cell.label, status=status, reason=reason, budget=search["budget"], **facts
    )


def _reached(row: Any) -> dict[str, Any]:
    def whole(name: str) -> int | None:
        return int(row[name]) if row[name] == row[name] and row[name] is not None else None

    return {
        "parameters": int(row["parameters"]),
        "workload": row["workload"],
        "peak_memory_bytes": whole("peak_memory_bytes"),
        "setup_peak_memory_bytes": whole("setup_peak_memory_bytes"),
        "parity": _text(row["parity_verdict"]),
        "kept": {
            kind: int(max(row[f"{column}_bytes"], default=0)) for kind, column in COLUMNS.items()
        },
        "buffers": json.loads(_text(row["library_buffers"]) or "{}"),
    }


def _formula(row: Any, activations: Sequence[int]) -> dict[str, float]:
    """The formula's columns of a trial, and its activations; empty where there is none."""
    values = {
        kind: row[f"formula_{column}_bytes"]
        for kind, column in {**COLUMNS, "transient": "transient"}.items()
    }
    if any(value is None or value != value for value in values.values()):
        return {}
    blocks = int(str(row["workload"]).rpartition("x")[2])
    return {
        **{k: float(v) for k, v in values.items()},
        "activations": float(activations[0] + (blocks - 1) * activations[1]),
    }


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
