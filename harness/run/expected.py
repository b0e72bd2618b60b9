"""Predicts a trial's duration, and its memory on a shared GPU. Uses no clock and no torch, so every
machine predicts the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from harness.host.gpu_models import gpu_model, peak_flops_per_second
from harness.parity.reference_runs import CONTEXT_BYTES
from harness.record.store import Store
from harness.spec.cell import Cell
from harness.spec.errors import DamagedRun, Refused
from harness.spec.link import Link
from harness.strategy.formulas import model_states
from harness.strategy.registry import make_strategy, validate
from harness.workloads import make_workload
from harness.workloads.counts import model_facts


@dataclass(frozen=True)
class Inputs:
    launch_seconds: float
    """Start and end of a trial, without ranks: forks, answers, records."""
    rank_seconds: float
    """Per rank: process, device context, process group, model, share of comparison."""
    interpreter_seconds: float
    """Extra time for new interpreters (spawn, mpirun, accelerate launch)."""
    library_seconds: float
    """Start-up of a library, such as DeepSpeed, Horovod or Accelerate."""
    compile_seconds: float
    """torch.compile of blocks, mostly from its cache."""
    step_seconds: float
    """Per micro-batch: Python, kernel launches, latency of collectives."""
    fp32_flops_per_second: float
    """Rate of a CPU core, or of a GPU whose peak is unknown."""
    bf16_flops_per_second: float
    fp16_flops_per_second: float
    fp32_share_of_peak: float
    half_share_of_peak: float
    """Reached fraction of the peak in bf16 and fp16."""
    link_bytes_per_second: float
    """Rate between two devices of a node."""
    moved_bytes_per_second: float
    """Rate to and from a disk, or through one process in host memory."""
    compared_bytes_per_second: float
    """Rate of the comparison with the reference, all ranks together."""


CPU = Inputs(
    launch_seconds=1.5,
    rank_seconds=0.15,
    interpreter_seconds=5.0,
    library_seconds=0.3,
    compile_seconds=20.0,
    step_seconds=0.012,
    fp32_flops_per_second=60e9,
    bf16_flops_per_second=100e9,
    fp16_flops_per_second=30e9,
    fp32_share_of_peak=1.0,
    half_share_of_peak=1.0,
    link_bytes_per_second=1e9,
    moved_bytes_per_second=1e9,
    compared_bytes_per_second=1e9,
)
"""Source: fitted to 1,242 trials of two runs of `full` on two cores of an Intel Xeon with AMX and
AVX-512 FP16 (without the latter, fp16 is ten times slower), and `launch_seconds` to 411 trials on
an AMD EPYC."""


GPU = Inputs(
    launch_seconds=1.0,
    rank_seconds=0.15,
    interpreter_seconds=10.0,
    library_seconds=1.5,
    compile_seconds=30.0,
    step_seconds=0.02,
    fp32_flops_per_second=10e12,
    bf16_flops_per_second=40e12,
    fp16_flops_per_second=40e12,
    fp32_share_of_peak=0.7,
    half_share_of_peak=0.35,
    link_bytes_per_second=20e9,
    moved_bytes_per_second=1.5e9,
    compared_bytes_per_second=3e9,
)
"""Source: estimates for PCIe 4, no NVLink, one NVMe disk, and a card of 2020 if unknown."""


NVLINK_SHARE = 0.3
"""Estimated fraction of NVLink's data sheet rate (both directions) in a collective."""


CONTEXT_SECONDS = 2.5
"""Estimate for CUDA context, library kernels and NCCL's first connections."""


CONTROL_SHARE = 0.12
"""Time of controls relative to that of steps, in `full`."""


LIMIT_FACTOR = 8.0
"""Time limit over predicted time, for slow machines."""


LEAST_LIMIT_SECONDS = 120.0


def inputs_of(cell: Cell) -> Inputs:
    return GPU if cell.device == "cuda" else CPU


def has_control(cell: Cell) -> bool:
    """Returns whether a control can run between steps: not on GPUs, where it needs memory, nor on
    several nodes."""
    return cell.device == "cpu" and cell.nodes == 1


def trial_seconds(
    cell: Cell, cores: int | None, gpu: str | None = None, timed_seconds: float = 0.0
) -> float:
    """Returns one trial's predicted seconds. `cores`: a node's; None: enough. `gpu`: NVML's name.
    `timed_seconds`: see Plan."""
    known, strategy = inputs_of(cell), make_strategy(cell)
    workload = make_workload(cell.workload)
    facts = model_facts(workload, cell.sequence_length)
    try:
        layout = strategy.layout(cell.devices)
    except Refused:
        return known.launch_seconds
    started = (
        known.launch_seconds
        + known.rank_seconds * layout.processes
        + known.library_seconds * bool(strategy.requires)
    )
    started += CONTEXT_SECONDS * (cell.device == "cuda")
    started += known.compile_seconds * (cell.compile != "none")
    if cell.launcher == "spawn" or strategy.own_launcher:
        started += known.interpreter_seconds
    started *= 2 if cell.checkpoint != "none" else 1  # killed, and launched again
    busy, crowded = cell.devices, 1.0
    if cell.device == "cpu":
        busy *= cell.threads_per_device
        if cores is not None:  # Ranks that share a core wait for each other.
            cores *= 1 if cell.links else cell.nodes
            busy, crowded = min(cores, busy), max(1.0, layout.processes / cores)
    rate = _flops_per_second(cell, workload.arithmetic or cell.precision, gpu)
    # Counting the FLOPs of recomputation takes seconds; full recomputation is a second forward.
    again = 1 / 3 if cell.recompute == "full" else 0.0
    flops = facts.flops_per_sample * cell.global_batch * (1 + again)
    computed = flops / (busy * rate)
    sent = (strategy.costs.traffic(cell, layout, facts) or 0.0) / _link_bytes_per_second(cell, gpu)
    if cell.links:
        messages = strategy.costs.messages(cell, layout, facts) or 1.0
        sent += messages * Link.of(cell.links).delay_seconds
    moved = strategy.costs.disk_or_host_bytes(cell, layout, facts) / known.moved_bytes_per_second
    overhead = known.step_seconds * cell.micro_batches
    compared = facts.trained_bytes / known.compared_bytes_per_second
    # A GPU computes while its kernels are launched.
    worked = max(computed, overhead) if cell.device == "cuda" else computed + overhead
    steps = cell.total_steps * (worked + sent + moved)
    if timed_seconds and has_control(cell):
        untimed = (cell.total_steps - cell.timed_steps) / cell.total_steps * steps
        steps = max(steps, untimed + timed_seconds) * (1 + CONTROL_SHARE)
    return (started + steps) * crowded + compared


def _link_bytes_per_second(cell: Cell, gpu: str | None) -> float:
    rate = inputs_of(cell).link_bytes_per_second
    model = gpu_model(gpu) if cell.device == "cuda" else None
    if model and model.nvlink_bytes_per_second:
        rate = NVLINK_SHARE * model.nvlink_bytes_per_second
    emulated = Link.of(cell.links).bits_per_second if cell.links else None
    return min(rate, emulated / 8) if emulated else rate


def _flops_per_second(cell: Cell, precision: str, gpu: str | None) -> float:
    known = inputs_of(cell)
    peak = peak_flops_per_second(gpu, precision) if cell.device == "cuda" else None
    if peak is not None:
        return peak * (
            known.fp32_share_of_peak if precision == "fp32" else known.half_share_of_peak
        )
    return {
        "fp32": known.fp32_flops_per_second,
        "bf16": known.bf16_flops_per_second,
        "fp16": known.fp16_flops_per_second,
    }[precision]


def time_limit_seconds(cell: Cell, gpu: str | None) -> float:
    """Returns the time limit of a GPU cell that sets none."""
    return max(LEAST_LIMIT_SECONDS, round(LIMIT_FACTOR * trial_seconds(cell, 1, gpu)))


@dataclass(frozen=True)
class References:
    number: int
    seconds: float
    kept_bytes: int


def references_of(cells: Sequence[Cell], cores: int | None, gpu: str | None) -> References:
    """Returns the number, total time and disk space of references; noisy ones run twice."""
    from harness.parity.reference_runs import is_noisy, kept_bytes, reference_cell, reference_key
    from harness.parity.verdict import in_fp32

    twins = [in_fp32(cell) for cell in cells]
    every = {reference_key(cell): cell for cell in (*cells, *twins) if cell}
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
    """Returns median seconds by cell id, each from the newest run with any. Interleaved trials also
    wait for others, so they count only for cells without separate ones."""
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


GIB = 2**30


def device_bytes(cell: Cell) -> float:
    """Returns the approximate bytes that a trial holds per GPU from its first step on: the
    formula's states and temporary memory, a micro-batch's activations (torch's allocator keeps
    them), and the CUDA context."""
    from harness.workloads.operators import activation_bytes

    workload = make_workload(cell.workload)
    strategy, layout = validate(cell, workload)
    facts = model_facts(workload, cell.sequence_length)
    states = strategy.costs.states(cell, layout, facts) or model_states(cell, facts)
    samples = max(1, cell.global_batch // cell.micro_batches)
    held = activation_bytes(workload, samples, cell.sequence_length, cell.recompute)
    activations = held / cell.devices
    return states.total + states.transient + activations + CONTEXT_BYTES
