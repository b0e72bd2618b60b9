"""The largest trainable model: a search over the number of blocks with real steps under an enforced budget of memory per rank.

Every probe is a recorded trial of the run's matrix `maxsize`: its number is 0, that of the verified trial at the size found
is 1. A larger model is taken to need no less memory: what fits is below what does not. Model: ZeRO, arXiv 1910.02054, table 2.
"""

from __future__ import annotations

import itertools
import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psutil

from harness.cell import Cell
from harness.launch import Launcher
from harness.parity import Reference
from harness.record import left_out_row
from harness.runner import Plan, Runner, Watcher
from harness.store import Results, TrialKey
from harness.strategy import make_strategy
from harness.workloads import make_workload, prepare_data
from harness.workloads.data import cache_folder
from harness.workloads.facts import model_facts

if TYPE_CHECKING:
    import pandas as pd

MATRIX = "maxsize"
MOST_BLOCKS = 4096
# What a rank takes beside its tensors, about: stacks of threads, Python's heap, buffers of gloo. It only moves the first guess.
OVERHEAD = 60 * 2**20
KINDS = ("parameters", "gradients", "optimizer", "library")
COLUMNS = dict(zip(KINDS, ("parameter", "gradient", "optimizer", "library"), strict=True))


def hidden_size(budget: int) -> int:
    """The largest hidden size, in heads of 64, whose block of 12 hidden^2 is at most 2.5 % of what AdamW in fp32 with buckets fills."""
    return 64 * max(1, int(math.sqrt(0.025 * budget / 20 / 12)) // 64)


def wide_size(ranks: int) -> int:
    """The smallest hidden size, in heads of 64, whose smallest matrix has 1 MiB of fp32 per rank: libraries leave less off a disk."""
    return 64 * math.ceil(math.sqrt(ranks * 2**18) / 64)


def sized(cell: Cell, blocks: int) -> Cell:
    """The cell with that many blocks: `llama-320x1` becomes `llama-320x40`."""
    return cell.model_copy(update={"workload": f"{cell.workload.rpartition('x')[0]}x{blocks}"})


def family(cell: Cell) -> Cell:
    """The cell of one block that a probe's cell was made from."""
    return sized(cell, 1)


def parameters_of(cell: Cell) -> int:
    return model_facts(make_workload(cell.workload), cell.sequence_length).parameters


def largest(fits: Callable[[int], bool], guess: int, most: int = MOST_BLOCKS) -> tuple[int, int | None]:
    """The largest size from 1 that fits (0: none) and the smallest that does not (None: all to `most` fit).

    Strides from the guess, doubling, until both sides are known, then halves the gap.
    """
    low, high = 0, most + 1
    size = min(max(1, guess), most)
    stride = max(1, size // 32)
    while high - low > 1:
        if fits(size):
            low = size
        else:
            high = size
        if low and high <= most:
            size = (low + high) // 2
        else:
            size = min(low + stride, most) if low else max(1, high - stride)
            stride *= 2
    return low, high if high <= most else None


@dataclass(frozen=True)
class Prediction:
    """What the formula says of one strategy."""

    step: int
    """Parameters of one block: a search step."""
    blocks: int | None
    """Largest number whose states, and what a step needs beside them, fit the budget; None: the strategy has no formula."""
    parameters: int | None
    activations: tuple[int, int]
    """Bytes that autograd keeps: with one block, and for each one more."""


def formula(cell: Cell, activations: tuple[int, int]) -> dict[str, float] | None:
    """Bytes of the fullest rank at the peak of a step: states between steps, and beside them the larger of activations and what
    the step adds (gradients grow as activations go; ZeRO, arXiv 1910.02054, section 3). None: no formula."""
    strategy, workload = make_strategy(cell), make_workload(cell.workload)
    layout = strategy.layout(cell.devices)
    states = strategy.states(cell, layout, model_facts(workload, cell.sequence_length))
    if states is None:
        return None
    kept = activations[0] + (workload.blocks - 1) * activations[1]
    beside = max(states.transient, float(kept))
    kinds = {kind: float(getattr(states, kind)) for kind in KINDS}
    return {**kinds, "transient": states.transient, "activations": float(kept), "total": states.total + beside}


def predict(cell: Cell, budget: int) -> Prediction:
    """The formula's size for a family of cells, whose workload has one block."""
    from harness.measure.activations import activation_bytes

    layout = make_strategy(cell).layout(cell.devices)
    samples = max(1, cell.global_batch // layout.shares // cell.micro_batches)
    one, two = (activation_bytes(make_workload(sized(cell, n).workload), samples, cell.sequence_length) for n in (1, 2))
    activations = (one, two - one)

    def fits(blocks: int) -> bool:
        needed = formula(sized(cell, blocks), activations)
        return needed is not None and needed["total"] <= budget

    known = formula(cell, activations) is not None
    blocks = largest(fits, guess=64)[0] if known else None
    step = parameters_of(sized(cell, 2)) - parameters_of(cell)
    return Prediction(step, blocks, parameters_of(sized(cell, blocks)) if blocks else blocks, activations)


def plan_of(cells: Sequence[Cell], left_out: Sequence[Any], budget: int, order: Sequence[Sequence[str]]) -> Plan:
    """The plan of a search: one cell of one block per strategy. `order`: labels, each chain by the size that theory gives."""
    predicted = {}
    for cell in cells:
        found = predict(cell, budget)
        predicted[cell.id] = {
            "step": found.step,
            "blocks": found.blocks,
            "parameters": found.parameters,
            "activations": list(found.activations),
        }
    plan = Plan.new(MATRIX, cells, 1, left_out)
    return Plan(**{**vars(plan), "search": {"budget": budget, "order": [list(chain) for chain in order], "predicted": predicted}})


class Stopped(Exception):
    """A probe ended for another reason than memory: the search cannot go on."""


ODD = ("failed", "timeout", "diverged", "unavailable", "refused")


@dataclass
class Search:
    """Searches for each cell of a plan in turn; what is recorded already is not launched again."""

    runner: Runner
    watcher: Watcher
    position: int = 0
    _known: dict[tuple[str, int], list[str]] = field(default_factory=dict)
    """(cell id, trial) -> status of each attempt."""

    def run(self) -> bool:
        """False if it was interrupted."""
        plan, store = self.runner.plan, self.runner.store
        assert plan.search is not None
        for row in store.load([plan.run_id], steps=False).trials.sort_values("attempt").to_dict("records"):
            self._known.setdefault((str(row["cell_id"]), int(row["trial"])), []).append(str(row["status"]))
        for left in plan.left_out:
            if (left.cell.id, 0) not in self._known:
                store.write_trial(left_out_row(plan.run_id, left.cell, left.status, left.reason), [])
        launcher = self.runner.start(plan.cells)
        try:
            for cell in plan.cells:
                self._search(launcher, cell, plan.search["predicted"][cell.id]["blocks"], plan.search["budget"])
        except KeyboardInterrupt:
            return False
        return True

    def _search(self, launcher: Launcher, cell: Cell, predicted: int | None, budget: int) -> None:
        """All probes of one strategy, then the trial at the size found that is compared with a reference run."""
        step = parameters_of(sized(cell, 2)) - parameters_of(cell)
        usable = max(budget // 2, budget - OVERHEAD)
        # Without a formula: 16 bytes a parameter. No guess is beyond a whole model in fp32, which every rank builds.
        guess = min(round(predicted * usable / budget) if predicted else usable // 16 // step, usable // 4 // step)
        try:
            low, _ = largest(lambda blocks: self._fits(launcher, sized(cell, blocks)), guess)
            while low and self._status(launcher, sized(cell, low), 1) == "out_of_memory":
                low -= 1  # by a hair, and not this time
        except Stopped:
            return

    def _fits(self, launcher: Launcher, cell: Cell) -> bool:
        """Whether a probe trains. One that fails twice in another way is too large if it trains without the limit; else Stopped.

        Libraries use memory that they were refused (a null pointer, so SIGSEGV) or wait for a rank that has failed.
        """
        status = self._status(launcher, cell, 0)
        if status in ODD and self._status(launcher, cell.model_copy(update={"memory_limit_bytes": None}), 0) != "ok":
            raise Stopped(status)
        return status == "ok"

    def _status(self, launcher: Launcher, cell: Cell, trial: int) -> str:
        """Status of a probe or of the verified trial, launched unless it is known; what fails oddly gets a second try."""
        known = self._known.setdefault((cell.id, trial), [])
        while not known or known[-1] == "interrupted" or (known[-1] in ODD and sum(status in ODD for status in known) < 2):
            self.watcher.trial_started(cell, trial, self.position)
            key = TrialKey(cell.id, trial, len(known) + 1)
            if trial == 0:
                row = self.runner.one(launcher, cell, key, self.position, None, self.watcher.step)
            else:
                row = self._verified(launcher, cell, key)
            self.position += 1
            known.append(str(row["status"]))
            self.watcher.trial_finished(cell, row)
            if known[-1] == "interrupted":
                raise KeyboardInterrupt
        return known[-1]

    def _verified(self, launcher: Launcher, cell: Cell, key: TrialKey) -> dict[str, Any]:
        """The trial against a reference run of the same size without the limit, whose parameters are not kept."""
        if 24 * parameters_of(cell) > psutil.virtual_memory().available:
            return self.runner.one(launcher, cell, key, self.position, None, self.watcher.step)
        self.watcher.preparing(f"reference run of {cell.workload}, without the limit")
        with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
            data = prepare_data(cell.data, make_workload(cell.workload), cell.sequence_length)
            if launcher.run(cell.reference(), data, 1, reference_output=folder).status == "interrupted":
                raise KeyboardInterrupt
            return self.runner.one(launcher, cell, key, self.position, Reference(folder), self.watcher.step)


@dataclass(frozen=True)
class Found:
    """What the search found for one strategy: a row of the table."""

    label: str
    status: str
    """found, none fits, all fit, unfinished, stopped (a probe failed for another reason than memory), unavailable, refused."""
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
    """What a rank held then, see harness/measure/shortage.py."""
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
        """What filled the budget where memory ran out, bytes by name: states by kind, then the rest; empty where nothing ran out.

        `temporaries`: what the failed operation freed again, and what it asked for. `rest`: activations that autograd keeps,
        buffers of C++, Python's heap.
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
        """What ZeRO's model states do not have, largest first: name and bytes, where memory ran out. None below 1 % of the budget."""
        fill = self.fill
        beyond = {f"{kind} beyond the formula's": fill[kind] - self._expected(kind) for kind in KINDS[:3]} if fill and self.formula else {}
        beyond |= {name: float(size) for name, size in (self.holding.get("buffers") or {}).items()}
        beyond |= {name: size for name, size in fill.items() if name not in KINDS}
        if self.holding.get("largest"):
            beyond[f"other tensors ({', '.join(self.holding['largest'])})"] = beyond.pop("other tensors")
        if fill:
            beyond[f"temporaries of {self.failed_in}"] = beyond.pop("temporaries")
            beyond["activations, buffers of C++ and Python's heap"] = beyond.pop("rest")
        return sorted([(name, size) for name, size in beyond.items() if size >= self.budget / 100], key=lambda one: -one[1])

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


def limits(row: Found) -> str:
    """Where memory ran out and what filled it beside ZeRO's model states, in words; empty where nothing ran out."""
    said = []
    if row.failed_in:
        beyond = ", ".join(f"{name} {mebibytes(size)}" for name, size in row.responsible)
        said.append(
            f"{millions(row.next_parameters or 0)} parameters run out of memory in {row.failed_in}; beside ZeRO's model states: {beyond}"
        )
    elif row.failure:
        said.append(f"{millions(row.next_parameters or 0)} parameters fail under the limit only: {row.failure}")
    setup, steps = row.setup_peak_memory_bytes or 0, row.peak_memory_bytes or 0
    if row.parameters and setup > steps:
        whole = f"every rank first builds the whole model, {mebibytes(4 * row.parameters)}"
        said.append(f"at {row.largest_model} set-up takes {mebibytes(setup)}, more than the steps' {mebibytes(steps)}: {whole}")
    return "; ".join(said)


def order_notes(rows: Sequence[Found], order: Sequence[Sequence[str]]) -> list[str]:
    """A sentence for every neighbour in a chain that does not reach more than the one before it, with the bytes responsible."""
    by_label = {row.label: row for row in rows if row.parameters}
    notes = []
    for chain in order:
        present = [by_label[label] for label in chain if label in by_label]
        for less, more in itertools.pairwise(present):
            if (more.parameters or 0) <= (less.parameters or 0):
                notes.append(
                    f"not the theory's order: {more.label} reaches {more.largest_model}, no more than {less.label}"
                    f" with {less.largest_model}. {more.label}: {limits(more)}. {less.label}: {limits(less)}"
                )
    return notes


def found(results: Results) -> list[Found]:
    """The table of each search in these results, in the order of its cells; from what was recorded alone."""
    rows: list[Found] = []
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
        rows += [Found(x.cell.label, x.status, x.reason, x.cell.workload, plan.search["budget"]) for x in plan.left_out]
    return rows


def _found(cell: Cell, search: Mapping[str, Any], trials: pd.DataFrame, unlimited: pd.DataFrame) -> Found:
    """One strategy's row from its trials. `unlimited`: those that had no limit, of probes that failed in an odd way."""
    known = search["predicted"][cell.id]
    last = trials.sort_values("attempt").groupby(["cell_id", "trial"], sort=False).tail(1)
    probes, verified = last[last["trial"] == 0], last[(last["trial"] == 1) & (last["status"] == "ok")]
    trains = set(unlimited[(unlimited["label"] == cell.label) & (unlimited["status"] == "ok")]["workload"])
    odd = last[last["status"].isin(ODD)]
    short = last[(last["status"] == "out_of_memory") | (last["status"].isin(ODD) & last["workload"].isin(trains))].sort_values("parameters")
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
        status, reason = "stopped", f"{odd.iloc[0]['cell_name']}: {odd.iloc[0]['status']}: {odd.iloc[0]['reason']}"
    elif not verified.empty:
        status = "found" if not short.empty else "all fit"
    elif not short.empty and int(short.iloc[0]["parameters"]) <= parameters_of(cell):
        status, reason = "none fits", str(short.iloc[0]["reason"])
    else:
        status, reason = "unfinished", "go on with: python -m bench maxsize --resume"
    return Found(label=cell.label, status=status, reason=reason, budget=search["budget"], **facts)


def _reached(row: Any) -> dict[str, Any]:
    def whole(name: str) -> int | None:
        return int(row[name]) if row[name] == row[name] and row[name] is not None else None

    return {
        "parameters": int(row["parameters"]),
        "workload": row["workload"],
        "peak_memory_bytes": whole("peak_memory_bytes"),
        "setup_peak_memory_bytes": whole("setup_peak_memory_bytes"),
        "parity": _text(row["parity_verdict"]),
        "kept": {kind: int(max(row[f"{column}_bytes"], default=0)) for kind, column in COLUMNS.items()},
        "buffers": json.loads(_text(row["library_buffers"]) or "{}"),
    }


def _formula(row: Any, activations: Sequence[int]) -> dict[str, float]:
    """The formula's columns of a trial, and its activations; empty where there is none."""
    values = {kind: row[f"formula_{column}_bytes"] for kind, column in {**COLUMNS, "transient": "transient"}.items()}
    if any(value is None or value != value for value in values.values()):
        return {}
    blocks = int(str(row["workload"]).rpartition("x")[2])
    return {**{k: float(v) for k, v in values.items()}, "activations": float(activations[0] + (blocks - 1) * activations[1])}


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
