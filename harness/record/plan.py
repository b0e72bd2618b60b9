from __future__ import annotations

import itertools
import json
import random
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from harness.cell.cell import Cell, is_script
from harness.cell.errors import NothingToResume, UsageError
from harness.cell.yaml_text import adapter
from harness.record.store import Store

SearchPlan = dict[str, Any]
"""Settings of a search as JSON: budget, tokens, width, order and predictions."""
MATRIX = "maxsize"
KINDS = ("parameters", "gradients", "optimizer", "library")
COLUMNS = dict(zip(KINDS, ("parameter", "gradient", "optimizer", "library"), strict=True))
NOT_A_SIZE_LIMIT = ("failed", "timeout", "diverged", "unavailable", "refused")
"""Statuses of a probe that say nothing about the maximum size."""
LEAST_ROUNDS = 2
"""Number of rounds that run regardless of the time budget: the minimum for a spread between
trials."""
FURTHER_TIMES = 4.0
"""Factor on the timed seconds of trials after the planned rounds. Longer trials cost less than more
launches and average out as much noise (docs/studies/run-precision.md)."""


@dataclass(frozen=True)
class Growth:
    """What a search step adds: tokens, hidden units, or a block if both are 0."""

    tokens: int = 0
    width: int = 0

    @classmethod
    def of(cls, search: SearchPlan) -> Growth:
        return cls(int(search.get("tokens", 0)), int(search.get("width", 0)))

    @property
    def unit(self) -> str:
        """Unit of sizes: `tokens`, `hidden units` or `parameters`."""
        return "tokens" if self.tokens else "hidden units" if self.width else "parameters"

    @property
    def what(self) -> str:
        """What is searched for, such as `longest sequence`."""
        return {"tokens": "longest sequence", "hidden units": "widest layer"}.get(
            self.unit, "largest model"
        )

    @property
    def step(self) -> int:
        """Size that a step adds; 0 if it is a block, whose parameters depend on the model."""
        return self.tokens or self.width


BLOCKS = Growth()


def cell_at_size(cell: Cell, steps: int, growth: Growth = BLOCKS) -> Cell:
    """Returns a cell after this many search steps, e.g. `llama-320x40` for `llama-320x1`."""
    if growth.tokens:
        return cell.model_copy(update={"sequence_length": steps * growth.tokens})
    before, _, blocks = cell.workload.rpartition("x")
    if growth.width:
        family = before.rpartition("-")[0]
        return cell.model_copy(update={"workload": f"{family}-{steps * growth.width}x{blocks}"})
    return cell.model_copy(update={"workload": f"{before}x{steps}"})


def steps_of(cell: Cell, growth: Growth = BLOCKS) -> int:
    if growth.tokens:
        return cell.sequence_length // growth.tokens
    before, _, blocks = cell.workload.rpartition("x")
    return int(before.rpartition("-")[2]) // growth.width if growth.width else int(blocks)


@dataclass(frozen=True)
class LeftOut:
    cell: Cell
    status: str
    reason: str


@dataclass(frozen=True)
class Plan:
    """Everything needed to run a matrix once, or to resume it elsewhere."""

    run_id: str
    matrix: str
    cells: tuple[Cell, ...]
    trials: int
    left_out: tuple[LeftOut, ...] = ()
    order_seed: int = 0
    search: SearchPlan | None = None
    """Settings of a search, whose cells are model families."""
    time_budget_seconds: float | None = None
    """Time after which no round starts, nor any trial from `spare_from` on. None if there is no
    limit."""
    timed_seconds: float = 0.0
    """Minimum duration of timed steps, with a control between them. If 0, a trial has the cell's
    number of steps and no control."""
    long_training: bool = False
    """Whether each strategy also trains a nano model for many steps, to verify late ones."""
    until_answered: bool = False
    """Whether cells that may be fastest get more trials after the planned rounds."""
    not_compared: frozenset[str] = frozenset()
    """Ids of cells that run once, to verify parity: fp32 twins, and cells with nothing to compare
    with."""
    rehearsed: Mapping[str, int] = field(default_factory=dict)
    """Bytes that a rank keeps between steps by a rehearsal, by cell id; empty unless the matrix
    asks for it."""
    launches_per_round: Mapping[str, int] = field(default_factory=dict)
    """Trials per round by cell id, for cells with more than one trial (baselines)."""

    @classmethod
    def new(
        cls,
        matrix: str,
        cells: Sequence[Cell],
        trials: int,
        left_out: Sequence[LeftOut],
        run_id: str = "",
        not_compared: Iterable[str] = (),
    ) -> Plan:
        """Returns a plan in random order. `run_id`: by default a new id made from the time."""
        seed = secrets.randbelow(2**31)
        return cls(
            run_id or new_run_id(),
            matrix,
            tuple(cells),
            trials,
            tuple(left_out),
            seed,
            not_compared=frozenset(not_compared),
        )

    def schedule(self) -> list[tuple[Cell, int]]:
        """Returns (cell, trial) pairs in rounds over all cells, shuffled so that drift affects all
        alike. A cell's first trial in a round has the round's number, further trials have numbers
        from `trials` on."""
        further = {cell_id: itertools.count(self.trials) for cell_id in self.launches_per_round}
        of_round = [
            cell for cell in self.cells for _ in range(self.launches_per_round.get(cell.id, 1))
        ]
        order = []
        for number in range(self.trials):
            begun = set(self.not_compared) if number else set()
            for cell in self.shuffled(of_round, number):
                if cell.id not in begun:
                    order.append((cell, number))
                    begun.add(cell.id)
                elif cell.id in further:
                    order.append((cell, next(further[cell.id])))
        return order

    @property
    def needs_gpu(self) -> bool:
        return any(cell.device == "cuda" for cell in self.cells)

    @property
    def spare_from(self) -> int:
        """Position of the first trial that the time budget may drop."""
        order = self.schedule()
        if self.trials > LEAST_ROUNDS and self.time_budget_seconds:
            begun = (at for at, (_, trial) in enumerate(order) if trial == LEAST_ROUNDS)
            return next(begun, len(order))
        return len(order)

    def trials_of(self, cell: Cell) -> int:
        if cell.id in self.not_compared:
            return 1
        return self.trials * self.launches_per_round.get(cell.id, 1)

    def timed_seconds_of(self, cell: Cell, trial: int = 0) -> float | None:
        """Returns the minimum duration of a trial's timed steps; None without a control."""
        if not self.timed_seconds:
            return None
        if cell.id in self.not_compared:
            return 0.0
        return self.timed_seconds * (FURTHER_TIMES if trial >= self.trials_of(cell) else 1.0)

    def shuffled(self, cells: Sequence[Cell], trial: int) -> list[Cell]:
        order = list(cells)
        random.Random(self.order_seed + trial).shuffle(order)
        return order

    def to_json(self) -> str:
        """Returns the plan as JSON, without run, matrix and empty fields."""
        content = {name: value for name, value in vars(self).items() if value}
        del content["run_id"], content["matrix"]
        always = {"cells": [], "left_out": [], "trials": self.trials}
        return json.dumps(always | content, default=_plain)

    @classmethod
    def from_row(cls, row: Mapping[Any, Any]) -> Plan:
        """Reads the plan from a row of table `runs`; raises UsageError if it has none."""
        try:
            content = json.loads(row["plan"])
            # Runs of older versions may have further fields.
            twins = content.get("once", ())
            content["not_compared"] = (*twins, *content.get("not_compared", ()))
            content |= {"run_id": row["run_id"], "matrix": row["matrix"]}
            plan: Plan = adapter(Plan).validate_python(content)
            return plan
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise UsageError(
                f"the plan of run {row['run_id']!r} cannot be read: {type(error).__name__}"
            ) from None


def foreign_names(cell: Cell) -> list[str]:
    """Returns a cell's names of code outside the suite and its plug-ins, and of models and data on
    a hub."""
    code = (cell.strategy, cell.checkpoint_from, cell.workload)
    named = [name for name in code if ":" in name or is_script(name)]
    return [*named, *[cell.data][: cell.data.startswith("hf:")]]


def require_named(cells: Iterable[Cell], given: Iterable[str]) -> None:
    """Raises UsageError if recorded cells would run code, or use a hub, that only results name, as
    these may be somebody else's. `given`: texts of the user's matrix and options."""
    sources = {_source(max(parts)) for text in given for parts in _QUOTED_OR_BARE.findall(text)}
    for name in (name for cell in cells for name in foreign_names(cell)):
        if _source(name) not in sources:
            raise UsageError(
                f"the results name {name!r}, and what only results name is not used: if you trust"
                " it, repeat the matrix or the options that name it"
            )


_QUOTED_OR_BARE = re.compile(r"\"([^\"]+)\"|'([^']+)'|([^\s'\",=\[\]{}]+)")


def _source(name: str) -> str:
    """Returns the absolute path of a file with code, or else the name without suffixes."""
    file = re.match(r"(.+?\.py)(?::|$)", name)
    return str(Path(file[1]).expanduser().resolve()) if file else name.partition("+")[0]


def _plain(value: object) -> object:
    if isinstance(value, Cell):
        return value.model_dump(mode="json")
    return sorted(value) if isinstance(value, frozenset) else vars(value)


def new_run_id() -> str:
    """Returns an id that sorts by time."""
    return f"{datetime.now(timezone.utc):%Y%m%dT%H%M%S}-{secrets.token_hex(2)}"


def kept_plan(store: Store, run_id: str) -> Plan:
    return Plan.from_row(store.run_row(run_id))


def matrix_name(matrix: str) -> str:
    """Returns a matrix's name without folder and suffix, because jobs give its absolute path."""
    return Path(matrix).name.removesuffix(".yaml")


def resumable(store: Store, matrix: str | None) -> Plan:
    """Returns the newest run's plan (of this matrix), finished or not. Raises NothingToResume."""
    for plan in map(Plan.from_row, store.newest_rows()):
        if matrix == plan.matrix or (matrix is None and plan.search is None):
            return plan
    of = f" of matrix {matrix!r}" if matrix else ""
    raise NothingToResume(f"nothing to resume in {str(store.folder)!r}: no run{of}")
