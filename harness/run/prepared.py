from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace

from harness.cell.cell import Cell
from harness.cell.training import EXACT, REPLAYED_STEPS
from harness.host.cores import available_memory_bytes
from harness.host.environment import device_type, to_preload
from harness.launch.interleaved import Launch
from harness.launch.launcher import LauncherProtocol, LaunchOptions
from harness.launch.outcome import Outcome
from harness.launch.restarted import RestartedLaunch
from harness.parity.reference import Reference
from harness.parity.reference_runs import mark_used
from harness.record.store import TrialKey
from harness.run.expected import has_control
from harness.seam.checkpoints import checkpoint_step, saving_cell
from harness.seam.peak_memory import states_or_bound
from harness.seam.registry import make_strategy, own_command, validate
from harness.worker.spec import STEPS_IN_A_TURN
from harness.workloads import make_workload, prepare_data
from harness.workloads.counts import model_facts

MOST_OF_FREE_MEMORY = 0.25
"""Maximum fraction of available memory for copies of ranks' states (harness/worker/rewind.py)."""
SAMPLES_PER_CONTROL = 8
"""Number of samples that a rank trains between controls. Ranks restart together after a control, so
frequent controls would favour strategies that synchronise often."""
LAUNCHES_PER_REWIND = 3
"""Number of trials of which one rewinds the state. Not all do, because a rewind takes a second."""
REWOUND_ELSEWHERE = "another trial of the cell is rewound"


class PreparedTrial:
    def __init__(
        self,
        cell: Cell,
        key: TrialKey,
        position: int,
        reference: Reference | None,
        timed_seconds: float | None = None,
        seed: int = 0,
        launches: int = 1,
        timed_steps: int | None = None,
    ) -> None:
        """Prepares a trial. `timed_seconds`: see Plan.timed_seconds_of. `launches`: the cell's
        planned trials. `seed` and `key` decide whether and when it rewinds. `timed_steps`: number
        of timed steps of an interleaved trial."""
        self.sketched_after: tuple[int, ...] = ()
        self.is_planned = key.trial < launches
        self.cell, self.key, self.position, self.reference = cell, key, position, reference
        self.existing_reference = reference if reference and reference.exists else None
        if self.existing_reference:
            mark_used(self.existing_reference)
        self.gpus = cell.devices // cell.nodes if cell.device == "cuda" else 0
        self.workload = make_workload(cell.workload)
        self.strategy, self.layout = validate(cell, self.workload)
        more: LaunchOptions = {
            "reference": self.existing_reference.folder if self.existing_reference else None,
            "max_restarts": self.strategy.capabilities.max_restarts,
            "command": own_command(self.strategy, cell),
        }
        if timed_seconds is not None and _may_have_control(cell):
            more |= {
                "samples_per_control": SAMPLES_PER_CONTROL,
                "timed_seconds": least_timed_seconds(cell, timed_seconds),
            }
        if timed_steps is not None:
            more["timed_steps"] = timed_steps
        self.rewind_skipped_reason = self._why_not_rewound(timed_seconds)
        begins_with = zlib.crc32(f"{seed} {key.cell_id}".encode())
        chosen = (begins_with + key.trial) % min(launches, LAUNCHES_PER_REWIND) == 0
        if not self.rewind_skipped_reason and not chosen:
            self.rewind_skipped_reason = REWOUND_ELSEWHERE
        if not self.rewind_skipped_reason:
            text = f"{seed} {key.cell_id} {key.trial} {key.attempt}"
            more["rewind_seed"] = zlib.crc32(text.encode())
        data = prepare_data(cell.data, self.workload, cell.sequence_length)
        rewound = not self.rewind_skipped_reason
        longer = math.ceil(_extra_limit_seconds(cell, timed_seconds, timed_steps, rewound))
        limit = {"time_limit_seconds": cell.time_limit_seconds + longer}
        launched = cell.model_copy(update=limit) if longer else cell
        self.launch = Launch(launched, data, self.layout.processes, more)
        self.restarted = self._restarted() if cell.checkpoint != "none" else None

    def sketch(self, after: Sequence[int]) -> None:
        """Makes ranks sketch their parameters after these steps; see TrialSpec."""
        self.sketched_after = tuple(after)
        more: LaunchOptions = {**self.launch.more, "sketched_after": self.sketched_after}
        self.launch = replace(self.launch, more=more)

    def _restarted(self) -> RestartedLaunch:
        saves, first = self.launch, saving_cell(self.cell)
        if first != self.cell:
            strategy, layout = validate(first, self.workload)
            more: LaunchOptions = {"command": own_command(strategy, first)}
            saves = replace(saves, cell=first, processes=layout.processes, more=more)
        bitwise = self.strategy.tolerance(self.cell, self.workload) != EXACT
        after = checkpoint_step(self.cell)
        return RestartedLaunch(saves, self.launch, after=after, bitwise=bitwise)

    def run(self, launcher: LauncherProtocol, on_progress: Callable[[int, float], None]) -> Outcome:
        return (self.restarted or self.launch).run(launcher, on_progress)

    def _why_not_rewound(self, timed_seconds: float | None) -> str:
        cell = self.cell
        if self.existing_reference is None:
            return "there is no reference run to compare with"
        if cell.checkpoint != "none":
            return "its state is saved and loaded instead"
        if timed_seconds is None:
            return "no minimum duration is set for its timed steps"
        if cell.parity_steps < 2:
            return "the parity segment has one step"
        if cell.memory_limit_bytes is not None:
            return "its memory is limited"
        needed = self.layout.processes // cell.nodes * states_or_bound(cell).total
        if needed > MOST_OF_FREE_MEMORY * available_memory_bytes():
            return (
                f"copies of its state need {needed / 2**30:.1f} GiB of memory, more than"
                f" {MOST_OF_FREE_MEMORY:.0%} of what this process may still use here"
            )
        return self.strategy.rewind_skipped_reason(cell)


def needs_at_least_as_much_as(cell: Cell, other: Cell) -> bool:
    """Returns whether `cell` equals `other`, except for a larger model, batch or sequence, or fewer
    devices."""
    sizes = ("workload", "global_batch", "sequence_length", "devices")
    same_size = cell.model_copy(update={name: getattr(other, name) for name in sizes})
    if same_size.id != other.id:
        return False
    a, b = make_workload(cell.workload), make_workload(other.workload)
    same_kind = a.family is b.family is not None and a.suffixes == b.suffixes
    if cell.workload != other.workload and not same_kind:
        return False

    def needs(any_cell: Cell) -> tuple[int, ...]:
        parameters = model_facts(
            make_workload(any_cell.workload), any_cell.sequence_length
        ).parameters
        return (
            parameters,
            any_cell.global_batch,
            any_cell.sequence_length,
            -any_cell.devices,
        )

    return all(a >= b for a, b in zip(needs(cell), needs(other), strict=True))


def _may_have_control(cell: Cell) -> bool:
    return has_control(cell) and cell.checkpoint == "none"


def least_timed_seconds(cell: Cell, timed_seconds: float | None) -> float:
    """Returns the minimum duration of a separate trial's timed steps; 0 if their number is fixed.
    `timed_seconds`: see Plan.timed_seconds_of."""
    fixed = make_strategy(cell).capabilities.fixed_steps
    return timed_seconds or 0.0 if _may_have_control(cell) and not fixed else 0.0


def _extra_limit_seconds(
    cell: Cell, timed_seconds: float | None, timed_steps: int | None, rewound: bool
) -> float:
    cycle = make_strategy(cell).cycle
    seconds, added = 0.0, 0
    if timed_steps is not None:
        settling = math.ceil(timed_steps / STEPS_IN_A_TURN)
        added = max(0, cell.warmup_steps + timed_steps + settling - cell.total_steps)
    else:
        seconds = least_timed_seconds(cell, timed_seconds)
        # Two replays, one of them AHEAD, each of which waits for the start of a cycle.
        added = 2 * (REPLAYED_STEPS + cycle - 1) if rewound else 0
    return seconds + cell.time_limit_seconds * added / cell.total_steps


def may_be_in_heat(cell: Cell) -> bool:
    """Returns whether trials of the race may be interleaved: their steps can be chosen and cost
    about the same, and they share all that they need."""
    strategy = make_strategy(cell)
    return (
        _may_have_control(cell)
        and cell.memory_limit_bytes is None
        and strategy.cycle == 1
        and not strategy.capabilities.fixed_steps
    )


def packages(cells: Sequence[Cell]) -> list[str]:
    """Returns the modules that the fork server imports."""
    strategies = [make_strategy(cell) for cell in cells]
    needed = [
        p for strategy in strategies for p in (*strategy.requires, *strategy.capabilities.preload)
    ]
    needed += [p for cell in cells for p in make_workload(cell.workload).requires]
    with_gpus = device_type() == "cuda" or any(cell.device == "cuda" for cell in cells)
    return to_preload(list(dict.fromkeys(needed)), with_gpus)
