"""The largest trainable model: a search over the number of blocks with real steps under an enforced
budget of memory per rank.

Every probe is a recorded trial of the run's matrix `maxsize`: its number is 0, that of the verified
trial at the size found is 1. A larger model is taken to need no less memory: what fits is below
what does not. Model: ZeRO, arXiv 1910.02054, table 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import psutil

from harness.host.cache import cache_folder
from harness.host.scratch import remove_abandoned, scratch_folder
from harness.launch.launcher import LauncherProtocol
from harness.parity.reference import Reference
from harness.parity.reference_runs import reference_cell
from harness.record.plan import LeftOut, Plan
from harness.record.search import KINDS, MATRIX, ODD, sized
from harness.record.store import TrialKey
from harness.record.trial import TrialRecord
from harness.run.rows import left_out_record
from harness.run.runner import Runner, Watcher
from harness.spec.cell import Cell
from harness.strategy.registry import make_strategy
from harness.workloads import make_workload, prepare_data
from harness.workloads.counts import model_facts, parameters_of

MOST_BLOCKS = 4096


# What a rank takes beside its tensors, about: stacks of threads, Python's heap, buffers of gloo. It
# only moves the first guess.
OVERHEAD = 60 * 2**20


def hidden_size(budget: int) -> int:
    """The largest hidden size, in heads of 64, whose block of 12 hidden^2 is at most 2.5 % of what
    AdamW in fp32 with buckets fills."""
    return 64 * max(1, int(math.sqrt(0.025 * budget / 20 / 12)) // 64)


def wide_size(ranks: int) -> int:
    """The smallest hidden size, in heads of 64, whose smallest matrix has 1 MiB of fp32 per rank:
    libraries leave less off a disk."""
    return 64 * math.ceil(math.sqrt(ranks * 2**18) / 64)


def largest(
    fits: Callable[[int], bool], guess: int, most: int = MOST_BLOCKS
) -> tuple[int, int | None]:
    """The largest size from 1 that fits (0: none) and the smallest that does not (None: all to
    `most` fit).

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
    """Largest number whose states, and what a step needs beside them, fit the budget; None: the
    strategy has no formula."""
    parameters: int | None
    activations: tuple[int, int]
    """Bytes that forward and backward hold at most beside model and gradients: with one block, and
    for each one more."""


def formula(cell: Cell, activations: tuple[int, int]) -> dict[str, float] | None:
    """Bytes of the fullest rank at the peak of a step: states between steps, and beside them the
    larger of activations and what the step adds (gradients grow as activations go; ZeRO, arXiv
    1910.02054, section 3). Where blocks are computed again, one block's activations are there until
    the last gradient is. None: no formula.

    `activations`: see Prediction.
    """
    strategy, workload = make_strategy(cell), make_workload(cell.workload)
    layout = strategy.layout(cell.devices)
    states = strategy.states(cell, layout, model_facts(workload, cell.sequence_length))
    if states is None:
        return None
    kept = activations[0] + (workload.blocks - 1) * activations[1]
    beside = max(states.transient, float(kept))
    if cell.recompute != "none" and not states.gradients:
        beside = max(beside, activations[0] + states.transient)
    kinds = {kind: float(getattr(states, kind)) for kind in KINDS}
    return {
        **kinds,
        "transient": states.transient,
        "activations": float(kept),
        "total": states.total + beside,
    }


def predict(cell: Cell, budget: int) -> Prediction:
    """The formula's size for a family of cells, whose workload has one block."""
    from harness.workloads.activations import activation_bytes

    layout = make_strategy(cell).layout(cell.devices)
    samples = max(1, cell.global_batch // layout.shares // cell.micro_batches)
    of_one_block, of_two = (
        activation_bytes(
            make_workload(sized(cell, n).workload), samples, cell.sequence_length, cell.recompute
        )
        for n in (1, 2)
    )
    activations = (of_one_block, of_two - of_one_block)

    def fits(blocks: int) -> bool:
        needed = formula(sized(cell, blocks), activations)
        return needed is not None and needed["total"] <= budget

    known = formula(cell, activations) is not None
    blocks = largest(fits, guess=64)[0] if known else None
    step = parameters_of(sized(cell, 2)) - parameters_of(cell)
    return Prediction(
        step, blocks, parameters_of(sized(cell, blocks)) if blocks else blocks, activations
    )


def plan_of(
    cells: Sequence[Cell], left_out: Sequence[LeftOut], budget: int, order: Sequence[Sequence[str]]
) -> Plan:
    """The plan of a search: one cell of one block per strategy.

    `order`: labels, each chain by the size that theory gives.
    """
    predicted = {}
    for cell in cells:
        prediction = predict(cell, budget)
        predicted[cell.id] = {
            "step": prediction.step,
            "blocks": prediction.blocks,
            "parameters": prediction.parameters,
            "activations": list(prediction.activations),
        }
    plan = Plan.new(MATRIX, cells, 1, left_out)
    return Plan(
        **{
            **vars(plan),
            "search": {
                "budget": budget,
                "order": [list(chain) for chain in order],
                "predicted": predicted,
            },
        }
    )


class Stopped(Exception):
    """A probe ended for another reason than memory: the search cannot go on."""


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
        for row in (
            store.load([plan.run_id], steps=False).trials.sort_values("attempt").to_dict("records")
        ):
            self._known.setdefault((str(row["cell_id"]), int(row["trial"])), []).append(
                str(row["status"])
            )
        for left in plan.left_out:
            if (left.cell.id, 0) not in self._known:
                store.write_trial(left_out_record(plan.run_id, left.cell, left.status, left.reason))
        launcher = self.runner.start(plan.cells)
        try:
            for cell in plan.cells:
                self._search(
                    launcher,
                    cell,
                    plan.search["predicted"][cell.id]["blocks"],
                    plan.search["budget"],
                )
        except KeyboardInterrupt:
            return False
        return True

    def _search(
        self, launcher: LauncherProtocol, cell: Cell, predicted: int | None, budget: int
    ) -> None:
        """All probes of one strategy, then the trial at the size found that is compared with a
        reference run."""
        step = parameters_of(sized(cell, 2)) - parameters_of(cell)
        usable = max(budget // 2, budget - OVERHEAD)
        # Without a formula: 16 bytes a parameter. No guess is beyond a whole model in fp32, which
        # every rank builds.
        guess = min(
            round(predicted * usable / budget) if predicted else usable // 16 // step,
            usable // 4 // step,
        )
        try:
            low, _ = largest(lambda blocks: self._fits(launcher, sized(cell, blocks)), guess)
            while low and self._status(launcher, sized(cell, low), 1) == "out_of_memory":
                low -= 1  # the probe had just fitted, and this trial of the same size did not
        except Stopped:
            return

    def _fits(self, launcher: LauncherProtocol, cell: Cell) -> bool:
        """Whether a probe trains. One that fails twice in another way is too large if it trains
        without the limit; else Stopped.

        Libraries use memory that they were refused (a null pointer, so SIGSEGV) or wait for a rank
        that has failed.
        """
        status = self._status(launcher, cell, 0)
        if (
            status in ODD
            and self._status(launcher, cell.model_copy(update={"memory_limit_bytes": None}), 0)
            != "ok"
        ):
            raise Stopped(status)
        return status == "ok"

    def _status(self, launcher: LauncherProtocol, cell: Cell, trial: int) -> str:
        """Status of a probe or of the verified trial, launched unless it is known; what fails oddly
        gets a second try."""
        known = self._known.setdefault((cell.id, trial), [])
        while (
            not known
            or known[-1] == "interrupted"
            or (known[-1] in ODD and sum(status in ODD for status in known) < 2)
        ):
            self.watcher.trial_started(cell, trial, self.position)
            key = TrialKey(cell.id, trial, len(known) + 1)
            if trial == 0:
                trial_record = self.runner.run_trial(
                    launcher, cell, key, self.position, None, self.watcher.step
                )
            else:
                trial_record = self._verified(launcher, cell, key)
            self.position += 1
            known.append(trial_record.status)
            self.watcher.trial_finished(cell, trial_record)
            if known[-1] == "interrupted":
                raise KeyboardInterrupt
        return known[-1]

    def _verified(self, launcher: LauncherProtocol, cell: Cell, key: TrialKey) -> TrialRecord:
        """The trial against a reference run of the same size without the limit, whose parameters
        are not kept."""
        if 24 * parameters_of(cell) > psutil.virtual_memory().available:
            return self.runner.run_trial(
                launcher, cell, key, self.position, None, self.watcher.step
            )
        self.watcher.preparing(f"reference run of {cell.workload}, without the limit")
        remove_abandoned(cache_folder())
        with scratch_folder(cache_folder()) as folder:
            data = prepare_data(cell.data, make_workload(cell.workload), cell.sequence_length)
            if (
                launcher.run(reference_cell(cell), data, 1, reference_output=str(folder)).status
                == "interrupted"
            ):
                raise KeyboardInterrupt
            return self.runner.run_trial(
                launcher, cell, key, self.position, Reference(str(folder)), self.watcher.step
            )
