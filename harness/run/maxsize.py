"""Searches for the largest trainable model or longest sequence under a memory budget per rank.

Probes take real steps (trial 0 of matrix `maxsize`); trial 1 verifies the size found. Assumes that
a larger model never needs less memory. Method: ZeRO, arXiv 1910.02054, table 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from harness.cell.cell import BASELINE, Cell
from harness.host.cores import available_memory_bytes
from harness.host.folders import cache_folder, remove_abandoned, scratch_folder
from harness.launch.launcher import LauncherProtocol
from harness.parity.reference import Reference
from harness.parity.reference_runs import reference_cell
from harness.record.plan import (
    BLOCKS,
    MATRIX,
    NOT_A_SIZE_LIMIT,
    Growth,
    LeftOut,
    Plan,
    SearchPlan,
    cell_at_size,
)
from harness.record.store import TrialKey
from harness.record.trial import TrialRecord
from harness.run.metrics import left_out_record
from harness.run.runner import ProgressListener, Runner
from harness.seam.peak_memory import activation_bytes, peak_bytes, states_by_formula
from harness.workloads import make_workload, prepare_data
from harness.workloads.counts import parameters_of

MOST_STEPS = 4096
OVERHEAD = 60 * 2**20
"""Approximate memory of a rank besides tensors: thread stacks, Python's heap, gloo buffers. It only
affects the first guess."""


def hidden_size(budget: int) -> int:
    """Returns the largest hidden size, a multiple of 64, whose block takes at most 2.5% of the
    budget: 12 hidden^2 parameters of 20 bytes (AdamW's fp32 states, buckets)."""
    return 64 * max(1, int(math.sqrt(0.025 * budget / 20 / 12)) // 64)


def long_hidden_size(budget: int, tokens: int, ranks: int) -> int:
    """Returns the largest hidden size of a four-block model for long sequences, a multiple of 64
    for each rank.

    AdamW's fp32 states (16 bytes for each of 12 hidden^2 parameters per block) take at most a tenth
    of the budget. Activations take about 136 bytes per token, block and hidden unit. Korthikanti
    et al. (arXiv 2205.05198, section 4.1) count 34 in half precision.
    """
    most = min(math.sqrt(budget / 10 / (4 * 12 * 16)), budget / (4 * 136 * tokens))
    return 64 * ranks * max(1, int(most) // (64 * ranks))


def wide_size(ranks: int) -> int:
    """Returns the smallest hidden size, a multiple of 64, whose square matrices have 1 MiB of fp32
    per rank, so that libraries offload more."""
    return 64 * math.ceil(math.sqrt(ranks * 2**18) / 64)


def largest(
    fits: Callable[[int], bool], guess: int, most: int = MOST_STEPS
) -> tuple[int, int | None]:
    """Returns the largest size that fits, and the smallest that does not. The first is 0 if none
    fits; the second is None if all up to `most` fit. Doubles strides from the guess until both are
    known, then bisects."""
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


def token_step(workload: str, ranks: int, budget: int) -> int:
    """Returns a search's token step: about 1% of the tokens that fill the budget, and a multiple
    of twice the ranks."""
    few = 2 * ranks
    cell = Cell(strategy=BASELINE, workload=workload, global_batch=1)
    growth = Growth(tokens=few * 16)
    short, long = (activation_bytes(cell_at_size(cell, n, growth)) for n in (1, 2))
    per_token = (long - short) / (few * 16)
    return few * max(1, round(budget / per_token / 100 / few))


def predict(cell: Cell, budget: int, growth: Growth = BLOCKS) -> SearchPlan:
    """Predicts the largest size that fits the budget. `cell`: at one search step. `step`: size that
    a search step adds, in `Growth.unit`. `parameters`: size in this unit after `blocks` search
    steps. `activations`: peak activation bytes at the first search step, and what each further step
    adds."""

    def after(steps: int) -> Cell:
        return cell_at_size(cell, steps, growth)

    first, second = (int(activation_bytes(after(steps))) for steps in (1, 2))
    activations = [first, second - first]

    def fits(steps: int) -> bool:
        held = activations[0] + (steps - 1) * activations[1]
        return peak_bytes(after(steps), held) <= budget

    by_formula = states_by_formula(cell) is not None
    steps = largest(fits, 64, most_steps(cell, growth))[0] if by_formula else None
    step = growth.step or parameters_of(after(2)) - parameters_of(cell)
    size = steps and (steps * growth.step or parameters_of(after(steps)))
    return {"step": step, "blocks": steps, "parameters": size, "activations": activations}


def most_steps(cell: Cell, growth: Growth = BLOCKS) -> int:
    """Returns the maximum number of search steps; the model's positions limit sequences."""
    positions = make_workload(cell.workload).max_tokens if growth.tokens else 0
    return min(MOST_STEPS, positions // growth.tokens) if positions else MOST_STEPS


def plan_of(
    cells: Sequence[Cell],
    left_out: Sequence[LeftOut],
    budget: int,
    order: Sequence[Sequence[str]],
    growth: Growth = BLOCKS,
) -> Plan:
    """Plans a search with one cell per strategy. `order`: lists of labels in increasing theoretical
    size."""
    plan = Plan.new(MATRIX, cells, 1, left_out)
    search = {
        "budget": budget,
        "tokens": growth.tokens,
        "width": growth.width,
        "order": [list(chain) for chain in order],
        "predicted": {cell.id: predict(cell, budget, growth) for cell in cells},
    }
    return replace(plan, search=search)


def first_guess(predicted: SearchPlan, budget: int, growth: Growth) -> int:
    """Returns the number of search steps to try first. It follows from the formula, reduced for
    memory outside tensors. Without a formula, assumes 16 bytes per parameter (12 times the width
    squared in a block), or that activations fill the budget."""
    usable = max(budget // 2, budget - OVERHEAD)
    step = int(predicted["step"])
    if steps := predicted["blocks"]:
        guess = round(int(steps) * usable / budget)
    elif growth.width:
        guess = int(math.sqrt(usable / 16 / 12)) // step
    elif growth.tokens:
        guess = usable // int(predicted["activations"][1])
    else:
        guess = usable // 16 // step
    return guess if growth.step else min(guess, usable // 4 // step)


class Stopped(Exception):
    """A probe failed for a reason other than memory, so the search cannot go on."""


@dataclass
class Search:
    runner: Runner
    listener: ProgressListener
    position: int = 0
    _statuses: dict[tuple[str, int], list[str]] = field(default_factory=dict)

    def run(self) -> bool:
        """Runs the search. Returns False if it was interrupted."""
        plan, store = self.runner.plan, self.runner.store
        assert plan.search is not None
        for row in (
            store.load([plan.run_id], steps=False).trials.sort_values("attempt").to_dict("records")
        ):
            self._statuses.setdefault((str(row["cell_id"]), int(row["trial"])), []).append(
                str(row["status"])
            )
        for left in plan.left_out:
            if (left.cell.id, 0) not in self._statuses:
                store.write_trial(left_out_record(plan.run_id, left.cell, left.status, left.reason))
        launcher = self.runner.start(plan.cells)
        try:
            for cell in plan.cells:
                self._search(launcher, cell, plan.search)
        except KeyboardInterrupt:
            return False
        return True

    def _search(self, launcher: LauncherProtocol, cell: Cell, search: SearchPlan) -> None:
        growth = Growth.of(search)
        guess = first_guess(search["predicted"][cell.id], search["budget"], growth)

        def after(steps: int) -> Cell:
            return cell_at_size(cell, steps, growth)

        try:
            low, _ = largest(
                lambda steps: self._fits(launcher, after(steps)), guess, most_steps(cell, growth)
            )
            while low and self._status(launcher, after(low), 1) == "out_of_memory":
                low -= 1  # The probe fitted, but this trial of the same size did not.
        except Stopped:
            return

    def _fits(self, launcher: LauncherProtocol, cell: Cell) -> bool:
        """Returns whether a probe trains. If it fails twice for another reason, tries without the
        limit: it is too large if it then trains, else raises Stopped. Libraries may crash or hang
        when memory is refused."""
        status = self._status(launcher, cell, 0)
        if (
            status in NOT_A_SIZE_LIMIT
            and self._status(launcher, cell.model_copy(update={"memory_limit_bytes": None}), 0)
            != "ok"
        ):
            raise Stopped(status)
        return status == "ok"

    def _status(self, launcher: LauncherProtocol, cell: Cell, trial: int) -> str:
        statuses = self._statuses.setdefault((cell.id, trial), [])
        while (
            not statuses
            or statuses[-1] == "interrupted"
            or (
                statuses[-1] in NOT_A_SIZE_LIMIT
                and sum(status in NOT_A_SIZE_LIMIT for status in statuses) < 2
            )
        ):
            self.listener.trial_started(cell, trial, self.position)
            key = TrialKey(cell.id, trial, len(statuses) + 1)
            if trial == 0:
                trial_record = self.runner.run_trial(
                    launcher, cell, key, self.position, None, self.listener.step
                )
            else:
                trial_record = self._verified(launcher, cell, key)
            self.position += 1
            statuses.append(trial_record.status)
            self.listener.trial_finished(cell, trial_record)
            if statuses[-1] == "interrupted":
                raise KeyboardInterrupt
        return statuses[-1]

    def _verified(self, launcher: LauncherProtocol, cell: Cell, key: TrialKey) -> TrialRecord:
        if peak_bytes(reference_cell(cell)) > available_memory_bytes():
            return self.runner.run_trial(
                launcher, cell, key, self.position, None, self.listener.step
            )
        self.listener.preparing(f"reference run of {cell.workload}, without the limit")
        remove_abandoned(cache_folder())
        with scratch_folder(cache_folder()) as folder:
            data = prepare_data(cell.data, make_workload(cell.workload), cell.sequence_length)
            if (
                launcher.run(reference_cell(cell), data, 1, reference_output=str(folder)).status
                == "interrupted"
            ):
                raise KeyboardInterrupt
            return self.runner.run_trial(
                launcher, cell, key, self.position, Reference(str(folder)), self.listener.step
            )
