from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from harness.cell.cell import Cell
from harness.cell.errors import plural
from harness.cell.yaml_text import parsed
from harness.record.table import Int32, Int64, Record


@dataclass(frozen=True, kw_only=True)
class TrialRecord(Record):
    """A trial of a cell, launched or not."""

    schema_version: Int32
    run_id: str
    cell_id: str
    """id of the cell, identical on every host"""
    cell_name: str
    label: str
    """readable name of the strategy with its options"""
    cell: str
    """JSON: the whole cell"""
    trial: Int32
    """number within its cell, from 0"""
    attempt: Int32 = 1
    """1, or more after an interruption, missing nodes or a failed probe"""
    position: Int32
    """position in the run's order; -1 if the cell was left out"""

    # How it ended.

    status: str
    """ok, unavailable, refused, skipped, out_of_memory, failed, timeout, interrupted, diverged"""
    reason: str = ""
    """what went wrong; empty if ok and verified"""
    expected: bool = False
    """whether the status is expected: known to diverge, or not verifiable despite a reference"""
    log_tail: str = ""
    """log tail of the first failed rank, or rank 0"""
    stacks: str = ""
    """stacks of the ranks after a timeout"""
    started_at: datetime
    """UTC"""
    wall_seconds: float | None = None
    """time from launch to the end of the last process; null if the trial was not launched"""
    startup_seconds: float | None = None
    """time from launch until the last rank has imported torch"""
    setup_seconds: float | None = None
    """time to make process group and model and to wrap it; slowest rank"""
    first_step_seconds: float | None = None
    """duration of step 0, slowest rank"""
    compile_seconds: float | None = None
    """torch.compile's time during warm-up, slowest rank; null if nothing is compiled"""

    # What is trained.

    system: str | None = None
    """system that the matrix lists the cell under"""
    strategy: str
    options: str
    """JSON: options the cell sets"""
    workload: str
    data: str
    data_fingerprint: str | None = None
    """digest of the data"""
    sequence_length: Int32
    """tokens per sample"""

    # Devices, nodes and ranks.

    devices: Int32
    nodes: Int32 | None = None
    node_names: tuple[str, ...] = ()
    """node names of a multi-node cell, in rank order"""
    node_facts: str | None = None
    """JSON: by node, hardware, address, interface, nominal and measured link, switches, NUMA and
    GPU topology"""
    links: str | None = None
    """requested emulated link between nodes: none (unshaped), or rate and one-way delay; null on
    the real network"""
    link_bits_per_second: float | None = None
    """emulated link's TCP payload rate between the first two nodes, before its first trial"""
    link_latency_seconds: float | None = None
    """half the median round-trip time of one byte between them"""
    link_emulation: str | None = None
    """emulation method: network namespaces, tbf for the rate, netem or a user-space relay for the
    delay"""
    device: str
    """cpu or cuda"""
    processes: Int32 | None = None
    """number of ranks"""
    data_parallel: Int32 | None = None
    pipeline_parallel: Int32 | None = None
    tensor_parallel: Int32 | None = None
    sequence_parallel: Int32 | None = None
    """number of ranks that share each sample's tokens"""

    # Settings of the training.

    precision: str
    regime: str
    """strong or weak"""
    global_batch: Int32
    """samples per step"""
    micro_batches: Int32
    clip_norm: float | None = None
    """2-norm that gradients are clipped to; null if they are not clipped"""
    schedule: str = "constant"
    """learning-rate schedule: constant, warmup, warmup_cosine"""
    decay: str = "all"
    """parameters with weight decay: all, matrices"""
    labels: str = "all"
    """tokens with a label: all, padded"""
    recompute: str = "none"
    """what blocks recompute during backward: none, selective (all but matrix products and
    attention), full"""
    compile: str = "none"
    """what torch.compile compiles: none, block (each block separately), block_cudagraphs (also
    replayed as CUDA graphs)"""
    loss: str = "plain"
    """how the loss is computed: plain (fp32 logits), torch_linear or liger_linear (no whole
    logits), deepspeed_chunked (no fp32 copies)"""
    activations: str = "device"
    """where blocks keep tensors for backward: device, host (torch's save_on_cpu)"""
    checkpoint: str = "none"
    """how the state is saved before all ranks are killed and new ones load it: none, full (one
    file), sharded (by rank), async (sharded, during training)"""
    checkpoint_from: str | None = None
    """strategy and devices that saved the checkpoint; null if the cell saved its own"""
    optimizer: str
    seed: Int64
    launcher: str
    """elastic (torchrun's agent), spawn, or a library's command, such as mpirun"""
    packages: tuple[str, ...] = ()
    """packages needed in addition to torch"""
    differences: tuple[str, ...] = ()
    """settings that differ from what the library's documentation starts with, as NAME=VALUE
    (documented: VALUE); those of all strategies are in docs/reference/strategies.md"""
    wraps_ddp: str | None = None
    """library or launcher by which plain DDP runs"""
    threads_per_device: Int32
    """cores, and intra-op threads, per CPU device"""
    memory_limit_bytes: Int64 | None = None
    stand_in: str | None = None
    """what was emulated or replaced; null if nothing was"""
    oversubscribed: bool
    """whether ranks lack hardware threads, so times say nothing about real hardware"""
    rank_cores: tuple[str, ...] = ()
    """by rank: CPU numbers, such as 0-7,16"""

    # States that each rank keeps between steps, and the strategy's formulas.

    parameters: Int64 | None = None
    """number of parameters of the unsplit model"""
    trained_parameters: Int64 | None = None
    held_parameters: tuple[Int64, ...] = ()
    """by rank: parameter elements held between steps"""
    parameter_dtypes: tuple[str, ...] = ()
    gradient_dtypes: tuple[str, ...] = ()
    optimizer_state_dtypes: tuple[str, ...] = ()
    parameter_bytes: tuple[Int64, ...] = ()
    """by rank: parameters on its device between steps, counting each storage once"""
    gradient_bytes: tuple[Int64, ...] = ()
    """by rank: gradients on its device between steps"""
    optimizer_bytes: tuple[Int64, ...] = ()
    """by rank: optimizer state on its device between steps"""
    library_bytes: tuple[Int64, ...] = ()
    """by rank: library copies and buffers, and model buffers, on its device between steps"""
    library_buffers: str | None = None
    """JSON: library_bytes by name, fullest rank"""
    host_state_bytes: tuple[Int64, ...] = ()
    """by rank: states in host memory while training on another device"""
    formula_parameter_bytes: float | None = None
    """value of the strategy's formula for parameters on the fullest rank; null if it has no
    formula"""
    formula_gradient_bytes: float | None = None
    formula_optimizer_bytes: float | None = None
    formula_library_bytes: float | None = None
    formula_transient_bytes: float | None = None
    """further temporary memory within a step: gradients, gathered parameters"""

    # Traffic.

    sent_bytes_per_step: tuple[float, ...] = ()
    """by CPU rank: TCP payload sent per timed step, headers of libraries included"""
    collectives: tuple[str, ...] = ()
    """a step's collectives of floating-point tensors with their dtypes, such as
    all_reduce bfloat16; empty if unknown"""
    offload_read_bytes_per_step: float | None = None
    """bytes read from block devices per timed step, all ranks; only with states offloaded to
    disk"""
    offload_written_bytes_per_step: float | None = None
    """bytes written to block devices per timed step, all ranks"""
    offload_kept_bytes: Int64 | None = None
    """size of the files in the offload folder"""

    # Speed.

    step_seconds_p50: float | None = None
    """median step time of the timed steps: from the slowest rank finishing the previous step to it
    finishing this one"""
    step_seconds_p95: float | None = None
    step_seconds_mean: float | None = None
    data_seconds_p50: float | None = None
    """median time to get the batch, slowest rank"""
    samples_per_second: float | None = None
    """global_batch / step_seconds_p50; over whole cycles if a strategy communicates only every few
    steps"""
    tokens_per_second: float | None = None
    """tokens per second, counted like samples_per_second; null if samples have no tokens"""
    window_step_seconds: tuple[float, ...] = ()
    """mean step time of each window of consecutive timed steps, with equal weight for each position
    of the strategy's cycle; empty without a control"""
    window_control_seconds: tuple[float, ...] = ()
    """mean time of the control, over ranks, in each window and the pause before it"""
    window_slowest_control_seconds: tuple[float, ...] = ()
    """the slowest rank's control time in each window, mean over pauses"""
    turn_began: tuple[float, ...] = ()
    """start of each turn of an interleaved trial, in seconds since the epoch"""
    turn_samples_per_second: tuple[float, ...] = ()

    # Other load on the host, and the state of its GPUs.

    idle_before: float | None = None
    """idle fraction of node 0's cores before the trial"""
    idle_after: float | None = None
    """idle fraction of these cores just after"""
    foreign_load_cores: float | None = None
    """mean number of cores that other programs kept busy in timed steps, on the busiest host"""
    gpu_before: str | None = None
    """JSON: state of the first node's GPUs just before the trial: clocks, throttling, temperature,
    power, errors, processes"""
    gpu_after: str | None = None
    """JSON: state of the same GPUs just after the trial"""
    gpu_use: str | None = None
    """JSON: by rank, GPU UUIDs, seconds of power or thermal throttling in timed steps, state at the
    end"""

    # The checkpoint that new ranks resumed from.

    checkpoint_step: Int32 | None = None
    """number of training steps before the checkpoint"""
    checkpoint_ranks: Int32 | None = None
    checkpoint_bytes: Int64 | None = None
    checkpoint_files: Int32 | None = None
    checkpoint_save_seconds: float | None = None
    """time to save the checkpoint, slowest rank; for async, including the training meanwhile"""
    checkpoint_blocked_seconds: float | None = None
    """part of checkpoint_save_seconds in which the slowest rank could not train"""
    checkpoint_load_seconds: float | None = None
    """time to load the checkpoint, slowest rank; null if it was loaded during set-up"""
    checkpoint_restores_random: bool | None = None
    """whether loading restored each rank's CPU random state; null with checkpoint_from"""
    checkpoint_restores_bits: bool | None = None
    """whether loading restored parameters and optimizer states bit for bit; null with
    checkpoint_from"""

    # Efficiency.

    energy_joules_per_sample: float | None = None
    """energy of the GPUs (NVML) or the nodes' CPU packages (RAPL); null without counters
    """
    trend: float | None = None
    """relative change of step time over the timed steps; 0 unless significant (Kendall, p < 0.01),
    null for fewer than 8 steps"""
    flops_per_step: float | None = None
    """model FLOPs, all ranks, without recomputation"""
    hardware_flops_per_step: float | None = None
    """flops_per_step plus recomputation"""
    mfu: float | None = None
    """model FLOPs utilisation; null on CPUs and for unknown peaks"""
    matmul_utilization: float | None = None
    """model FLOPs over what the GPU could do at its measured rate (`device_speed` of the run); null
    if not measured"""
    bubble_fraction: float | None = None
    """share of stage time without computation, in a separate pass"""
    expert_tokens: str | None = None
    """JSON: tokens per expert in each mixture-of-experts block, counted in the last warm-up step"""
    expert_imbalance: float | None = None
    """tokens of the busiest expert over its block's mean, in the most imbalanced block"""

    # Peak memory, or the memory held when it ran out.

    peak_memory_bytes: Int64 | None = None
    """largest peak of a rank"""
    peak_memory_bytes_by_rank: tuple[Int64, ...] = ()
    """by rank, or by GPU if one process drives several"""
    reserved_memory_bytes: Int64 | None = None
    """peak reserved by the CUDA caching allocator, largest rank"""
    reserved_memory_bytes_by_rank: tuple[Int64, ...] = ()
    """by rank: peak reserved by the CUDA caching allocator, on the rank's fullest device"""
    nvml_memory_bytes_by_rank: tuple[Int64, ...] = ()
    """by rank: its memory by NVML after the timed steps; empty if unknown"""
    context_memory_bytes_by_rank: tuple[Int64, ...] = ()
    """by rank: NVML memory beyond what the allocator reserved: CUDA context, communication buffers,
    libraries; empty if unknown"""
    host_peak_memory_bytes_by_rank: tuple[Int64, ...] = ()
    """for cells on GPUs: peak host memory by rank (resident, not file-backed, above imports)"""
    memory_imbalance: float | None = None
    """largest peak of a rank over the mean peak"""
    memory_method: str | None = None
    setup_peak_memory_bytes: Int64 | None = None
    """largest peak of a rank before the first step"""
    failed_in: str | None = None
    """phase in which a rank ran out of memory: set-up, forward, backward, update, verification"""
    failed_holding: str | None = None
    """JSON: bytes that this rank held: in_use (total), states by kind, library buffers by name,
    other tensors, thread stacks"""

    # Losses, and deviations of losses and parameters from the reference run.

    restarts: Int32 | None = None
    losses: tuple[float, ...] = ()
    """mean loss of each training step, including warm-up but not retrained steps"""
    reference_losses: tuple[float, ...] = ()
    """losses of the reference run in the parity segment"""
    fp32_loss_deviation: float | None = None
    """for low-precision weights: largest relative loss deviation from fp32 training"""
    parity_steps: Int32
    parity_verdict: str | None = None
    """exact, within tolerance, diverged, unknown"""
    parity_reason: str | None = None
    parity_max_loss_deviation: float | None = None
    """largest |loss - reference| / |reference|"""
    parity_max_norm_deviation: float | None = None
    """largest |gradient norm - reference| / reference"""
    gradient_norms: tuple[float, ...] = ()
    """norm of all gradients before clipping, by step; empty if they are not clipped"""
    parity_max_update_deviation: float | None = None
    """|parameters - reference| / |reference's update| of parity_worst_tensor"""
    parity_max_element_deviation: float | None = None
    """largest |parameter - reference| of an element / root mean square of its tensor's update"""
    parity_max_decay_deviation: float | None = None
    """largest component of a deviation along the weights / |reference's update|"""
    parity_max_buffer_deviation: float | None = None
    """largest |buffer - reference| / |reference's change|, e.g. of running statistics; null if no
    buffer changes"""
    parity_max_moment_deviation: float | None = None
    """largest |optimizer state - reference| / |reference| of a tensor's first or second moment"""
    parity_max_replica_deviation: float | None = None
    """largest estimated difference between ranks after the last step / |reference's update|"""
    parity_moments_skipped_reason: str | None = None
    """why some or all optimizer states were not compared"""
    later_steps_verified: Int32 | None = None
    """steps after the parity segment with a compared loss"""
    later_loss_deviation: float | None = None
    """largest |loss - reference| / |reference| of these later steps"""
    verified_steps: Int32 | None = None
    """number of steps, from the first one, that were compared with a reference: the trial's, or
    those of the long training if it took more; null if parity does not hold"""
    long_sketched_after: tuple[Int64, ...] = ()
    """numbers of steps, drawn at random, after which the parameters of a long training of this
    strategy were compared; empty without a long training"""
    long_update_deviation: float | None = None
    """largest estimated |parameters - reference| after these steps / |reference's update| in the
    first 20"""
    steps_taken: Int32 | None = None
    """number of steps of each rank, including retrained steps"""
    rewinds: Int32 | None = None
    """number of rewinds between timed steps"""
    rewind_skipped_reason: str | None = None
    """why the state was never rewound"""
    rewind_loss_deviation: float | None = None
    """largest parity_max_loss_deviation with retrained steps"""
    rewind_update_deviation: float | None = None
    """largest parity_max_update_deviation after retrained steps"""
    parity_worst_tensor: str | None = None
    """tensor whose update deviation is closest to its limit"""
    reference_loss_noise: float | None = None
    """largest loss deviation between two reference runs that round differently"""
    reference_update_noise: float | None = None
    """largest deviation of a tensor's update between these two runs"""
    parity_loss_tolerance: float | None = None
    """limit of the loss deviation"""
    parity_update_tolerance: float | None = None
    """limit of the update deviation of parity_worst_tensor"""

    @classmethod
    def of(cls, cell: Cell, **columns: Any) -> TrialRecord:
        """Returns a trial of a cell. `columns`: values that do not follow from the cell."""
        return cls(**(cell_columns(cell) | columns))


def cell_columns(cell: Cell) -> dict[str, Any]:
    of_fields = {column.name: getattr(cell, column.name) for column in _OF_A_FIELD}
    unknown = {c.name: None for c in _OF_A_FIELD if c.nullable and of_fields[c.name] == ""}
    return {
        **of_fields,
        **unknown,
        "options": json.dumps(cell.options, sort_keys=True),
        "cell_id": cell.id,
        "cell_name": cell.name,
        "label": cell.label,
        "cell": cell.model_dump_json(),
    }


_OF_A_FIELD = [column for column in TrialRecord.columns() if column.name in Cell.model_fields]
WORST_FIRST = (
    "failed",
    "timeout",
    "out_of_memory",
    "diverged",
    "interrupted",
    "unavailable",
    "refused",
    "skipped",
    "ok",
)
"""Statuses, worst first. A cell has the worst status of its trials."""
NOT_LAUNCHED = ("unavailable", "refused", "skipped")
"""Statuses of trials that were not launched: unavailable on this host, refused everywhere, or
skipped because a smaller cell ran out of memory."""
NO_RESULT = tuple(status for status in WORST_FIRST if status not in (*NOT_LAUNCHED, "ok"))
"""Statuses of launched trials that cannot be ranked."""
NOT_AGAIN = ("out_of_memory", "timeout", "skipped")
"""Statuses that would recur, so the cell's remaining trials are not launched."""


@dataclass(frozen=True)
class DeviceSpeed:
    matmul_flops_per_second: dict[str, float]
    """FLOP/s by precision: `fp32` (without TF32), `bf16`, `fp16`, and `fp8` (rowwise scales)."""
    copy_bytes_per_second: float
    """Bytes read plus written by a copy within the device's memory."""
    host_to_device_bytes_per_second: dict[str, float] = field(default_factory=dict)
    device_to_host_bytes_per_second: dict[str, float] = field(default_factory=dict)
    """Rates by type of host memory, `pinned` or `pageable`; empty on a CPU."""
    launch_seconds: float = 0.0
    """Time to enqueue a tiny kernel; on a CPU, to run a tiny operator."""


@dataclass(frozen=True)
class SpeedMeasurement:
    speed: DeviceSpeed | None
    """None if the measurement failed."""
    reason: str = ""

    @property
    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str | None) -> SpeedMeasurement | None:
        """Parses a run's `device_speed` column; None if it is null or invalid."""
        try:
            return parsed(cls, text) if text else None
        except ValueError:
            return None


def matmul_rate(column: str | None, precision: str) -> float | None:
    """Returns matrix-product FLOP/s; None if unknown."""
    measured = SpeedMeasurement.read(column)
    if measured is None or measured.speed is None:
        return None
    return measured.speed.matmul_flops_per_second.get(precision)


def distinct_cores(nodes: Sequence[Mapping[str, Any]]) -> int:
    """Counts the cores of all nodes. If nodes share a machine, its cores count once."""
    return len({(node["machine"], core) for node in nodes for core in node["cores"]})


def shared_machine(nodes: Sequence[Mapping[str, Any]], emulation: str | None = None) -> str | None:
    """Returns a note if nodes share a machine, else None."""
    machines = {node["machine"] for node in nodes}
    if len(machines) == len(nodes):
        return None
    between = (
        f"emulated links between them ({emulation})" if emulation else "no network between them"
    )
    return f"{plural(len(nodes), 'node')} on {plural(len(machines), 'machine')}: {between}"
