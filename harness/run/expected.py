"""Predicts a trial's duration: from earlier runs, else from three medians. Uses no clock and no
torch, so every machine predicts the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from harness.cell.cell import Cell, Link
from harness.cell.errors import DamagedRun, Refused
from harness.host.gpu_models import peak_flops_per_second
from harness.record.store import Store
from harness.seam.registry import make_strategy
from harness.workloads import make_workload
from harness.workloads.catalog import split_name
from harness.workloads.counts import model_facts


@dataclass(frozen=True)
class Inputs:
    start_seconds: float
    """Seconds to start and end a trial, and to compare it with the reference."""
    slow_start_seconds: float
    """Additional seconds for torch.compile or new interpreters (spawn, mpirun, accelerate
    launch)."""
    micro_batch_seconds: float
    """Seconds per micro-batch for Python, kernel launches and the latency of collectives."""
    flops_per_second: float
    """Rate of a CPU core, or of a GPU of unknown peak."""


CPU = Inputs(2.0, 6.0, 0.012, 60e9)
"""Source: medians of 1,242 trials of two runs of `full` on two cores of an Intel Xeon with AMX."""
GPU = Inputs(3.0, 8.0, 0.02, 10e12)
"""Source: medians of 31 trials on an H200. The rate is that of a graphics card of 2020."""
SHARE_OF_PEAK, FP32_SHARE = 0.35, 0.7
"""Estimated fractions of a GPU's peak that training reaches."""
UNSHAPED_BITS_PER_SECOND = 8e9
"""Estimated rate between two emulated nodes without a limit."""
CONTROL_SHARE = 0.12
"""Time that controls take relative to the time of steps, in `full`."""
LIMIT_FACTOR = 8.0
"""Time limit over predicted time: it must end hangs, not slow machines."""
LEAST_LIMIT_SECONDS = 120.0


def has_control(cell: Cell) -> bool:
    """Returns whether a control can run between steps. It cannot on GPUs, where it needs memory,
    nor on several nodes."""
    return cell.device == "cpu" and cell.nodes == 1


def trial_seconds(
    cell: Cell, cores: int | None, gpu: str | None = None, timed_seconds: float = 0.0
) -> float:
    """Returns one trial's predicted seconds. `cores`: number per node; if None, there are enough.
    `gpu`: NVML's name. `timed_seconds`: see Plan."""
    inputs, strategy = GPU if cell.device == "cuda" else CPU, make_strategy(cell)
    try:
        layout = strategy.layout(cell.devices)
    except Refused:
        return inputs.start_seconds
    started = inputs.start_seconds
    if cell.launcher == "spawn" or strategy.own_launcher or cell.compile != "none":
        started += inputs.slow_start_seconds
    started *= 2 if cell.checkpoint != "none" else 1  # killed, and launched again
    busy, crowded = cell.devices, 1.0
    if cell.device == "cpu":
        busy *= cell.threads_per_device
        if cores is not None:  # Ranks that share a core wait for each other.
            cores *= 1 if cell.links else cell.nodes
            busy, crowded = min(cores, busy), max(1.0, layout.processes / cores)
    precision = make_workload(cell.workload).arithmetic or cell.precision
    peak = peak_flops_per_second(gpu, precision) if cell.device == "cuda" else None
    share = FP32_SHARE if precision == "fp32" else SHARE_OF_PEAK
    rate = share * peak if peak else inputs.flops_per_second
    # FLOPs per parameter and token: 2 in forward, 4 in backward, 2 in full recomputation.
    per_token = (8 if cell.recompute == "full" else 6) * _parameters(cell)
    computed = per_token * cell.global_batch * cell.sequence_length / (busy * rate)
    overhead = inputs.micro_batch_seconds * cell.micro_batches
    # A GPU computes while its kernels are launched.
    worked = max(computed, overhead) if cell.device == "cuda" else computed + overhead
    steps = cell.total_steps * (worked + (_on_links(cell) if cell.links else 0.0))
    if timed_seconds and has_control(cell):
        untimed = (cell.total_steps - cell.timed_steps) / cell.total_steps * steps
        steps = max(steps, untimed + timed_seconds) * (1 + CONTROL_SHARE)
    return (started + steps) * crowded


def _parameters(cell: Cell) -> int:
    return model_facts(make_workload(split_name(cell.workload)[0])).parameters


def _on_links(cell: Cell) -> float:
    """Returns the seconds per step that emulated links take for a rank's bytes and messages."""
    strategy, workload, link = (
        make_strategy(cell),
        make_workload(cell.workload),
        Link.of(cell.links),
    )
    layout = strategy.layout(cell.devices)
    sent = strategy.traffic(cell, layout, model_facts(workload)) or 0.0
    by_block = strategy.shards_parameters or layout.replicas < cell.devices
    messages = 2 * workload.blocks * cell.micro_batches if by_block else 1
    rate = min(link.bits_per_second or UNSHAPED_BITS_PER_SECOND, UNSHAPED_BITS_PER_SECOND)
    return 8 * sent / rate + messages * link.delay_seconds


def time_limit_seconds(cell: Cell, gpu: str | None) -> float:
    """Returns the time limit of a GPU cell that sets none itself."""
    return max(LEAST_LIMIT_SECONDS, round(LIMIT_FACTOR * trial_seconds(cell, 1, gpu)))


@dataclass(frozen=True)
class References:
    number: int
    seconds: float
    kept_bytes: int


def references_of(cells: Sequence[Cell], cores: int | None, gpu: str | None) -> References:
    """Returns the number, total time and disk space of references. References that measure noise
    run twice."""
    from harness.parity.reference_runs import is_noisy, kept_bytes, reference_cell, reference_key
    from harness.parity.verdict import compared

    every = {reference_key(cell): cell for cell in compared(cells)}
    runs = [reference_cell(cell) for cell in every.values()]
    runs += list(filter(is_noisy, runs))
    return References(
        len(every),
        sum(trial_seconds(run, cores, gpu) for run in runs),
        sum(map(kept_bytes, every.values())),
    )


MOST_RUNS = 20


def _seconds_before(
    store: Store, cell_ids: set[str], hardware: Mapping[str, object]
) -> dict[str, float]:
    """Returns median seconds by cell id, each from the newest run that has any. Interleaved trials
    also wait for other trials, so they count only for cells without separate trials."""
    medians: dict[str, float] = {}
    for run_id in store.run_ids()[: -MOST_RUNS - 1 : -1]:
        if hardware and not _ran_on(store, run_id, hardware):
            continue
        separate: dict[str, list[float]] = {}
        interleaved: dict[str, list[float]] = {}
        for trial in store.ended_trials(run_id):
            if trial.wall_seconds is not None:
                kind = interleaved if trial.turn_began else separate
                kind.setdefault(trial.cell_id, []).append(trial.wall_seconds)
        by_cell = interleaved | separate
        medians = {cell_id: median(took) for cell_id, took in by_cell.items()} | medians
        if cell_ids <= medians.keys():
            break
    return medians


def _ran_on(store: Store, run_id: str, hardware: Mapping[str, object]) -> bool:
    try:
        row = store.run_row(run_id)
    except DamagedRun:
        return False
    return all(row[column] == value for column, value in hardware.items())


def expected_seconds(
    store: Store,
    cells: Sequence[Cell],
    cores: int | None,
    gpu: str | None = None,
    timed_seconds: Callable[[Cell], float | None] = lambda cell: None,
    hardware: Mapping[str, object] | None = None,
) -> dict[str, float]:
    """Returns a trial's seconds by cell id: measured if an earlier run on the same hardware has the
    cell, else predicted.

    `hardware`: columns that the run's row must match; None ignores earlier runs. `gpu`: NVML's
    name. `timed_seconds`: see Plan.timed_seconds_of.
    """
    ids = {cell.id for cell in cells}
    before = {} if hardware is None else _seconds_before(store, ids, hardware)
    return {
        cell.id: before[cell.id]
        if cell.id in before
        else trial_seconds(cell, cores, gpu, timed_seconds(cell) or 0.0)
        for cell in cells
    }
