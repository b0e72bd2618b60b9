"""The table `trials`: one row per trial."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from harness.record.table import Int32, Int64, Record
from harness.spec.cell import Cell


@dataclass(frozen=True, kw_only=True)
class TrialRecord(Record):
    """A trial of a cell, launched or not."""

    schema_version: Int32
    """version of this schema"""
    run_id: str
    """run that the trial belongs to"""
    cell_id: str
    """id of the measurement, identical on every host"""
    cell_name: str
    """readable name of the cell"""
    label: str
    """readable name of the strategy with its options"""
    cell: str
    """JSON: the whole cell"""
    trial: Int32
    """number of the trial within its cell, from 0"""
    attempt: Int32 = 1
    """1; higher if earlier attempts were interrupted"""
    position: Int32
    """position in the run's shuffled order"""

    # How it ended.

    status: str
    """ok, unavailable, refused, skipped, out_of_memory, failed, timeout, interrupted, diverged"""
    reason: str = ""
    """what happened and what to do; empty if ok"""
    expected: bool = False
    """whether this is expected: known to diverge, or declared to deviate too far to be verified"""
    log_tail: str = ""
    """end of the log of the rank that failed first"""
    stacks: str = ""
    """stacks of the ranks after a timeout"""
    started_at: datetime
    """UTC"""
    wall_seconds: float | None = None
    """the whole trial, including start and end of its processes"""
    startup_seconds: float | None = None
    """from the launch to the last rank's first instruction"""
    setup_seconds: float | None = None
    """process group, model, wrapping; slowest rank"""
    first_step_seconds: float | None = None
    """step 0, slowest rank"""
    compile_seconds: float | None = None
    """time of torch.compile before the timed steps, slowest rank; part of the first steps; null if
    nothing is compiled"""

    # What is trained.

    system: str | None = None
    """system under test under which the matrix lists the cell"""
    strategy: str
    options: str
    """JSON: options of the strategy"""
    workload: str
    data: str
    data_fingerprint: str | None = None
    """sha256 of the tokens"""
    sequence_length: Int32
    """tokens per sample"""

    # Devices, nodes and ranks.

    devices: Int32
    """number of devices"""
    nodes: Int32 | None = None
    """number of nodes with these devices"""
    node_names: tuple[str, ...] = ()
    """names of the nodes of a multi-node cell, in the order of its ranks"""
    node_facts: str | None = None
    """JSON: hardware, address, interface, nominal and measured link, switches, NUMA and GPU
    topology by node"""
    links: str | None = None
    """requested emulated link between nodes: none, or rate and one-way delay; null: the nodes' own
    network"""
    link_bits_per_second: float | None = None
    """payload rate of one TCP stream between the first two nodes, measured before the link's first
    trial"""
    link_latency_seconds: float | None = None
    """half the median round trip of a byte between them, measured at the same time"""
    link_emulation: str | None = None
    """method: network namespaces, tbf for the rate, netem or a user-space relay for the delay"""
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
    """2-norm that gradients are clipped to; null: not clipped"""
    schedule: str = "constant"
    """learning rate: constant, warmup_cosine"""
    decay: str = "all"
    """weight decay of all, or of matrices"""
    labels: str = "all"
    """all, padded"""
    recompute: str = "none"
    """what blocks recompute during backward: none, selective (all but matrix products and
    attention), full"""
    compile: str = "none"
    """what torch.compile compiles: none, block (each block separately), block_cudagraphs (also
    replayed as CUDA graphs)"""
    checkpoint: str = "none"
    """how the state is saved before all ranks are killed and new ones load it: none, full (one
    file), sharded (by rank), async (sharded, while training)"""
    checkpoint_from: str | None = None
    """strategy and devices that saved it, if not the cell's own"""
    optimizer: str
    seed: Int64
    launcher: str
    """elastic (torchrun's agent), spawn, or the command of a library's own launcher"""
    packages: tuple[str, ...] = ()
    """packages in addition to torch that the strategy needs"""
    wraps_ddp: str | None = None
    """library whose DDP-equivalent wrapper this is"""
    threads_per_device: Int32
    """CPU cores and intra-op threads of each device's rank"""
    memory_limit_bytes: Int64 | None = None
    stand_in: str | None = None
    """what ran as a substitute for the real thing"""
    oversubscribed: bool
    """more ranks than cores: its times tell you nothing about real hardware"""
    rank_cores: tuple[str, ...] = ()
    """CPU cores that each rank was pinned to, such as 0-7,16"""

    # States kept by each rank between steps, and the strategy's formulas.

    parameters: Int64 | None = None
    """number of parameters of the unsplit model"""
    trained_parameters: Int64 | None = None
    """number of these that are trained"""
    held_parameters: tuple[Int64, ...] = ()
    """number of elements held by each rank between steps"""
    parameter_dtypes: tuple[str, ...] = ()
    gradient_dtypes: tuple[str, ...] = ()
    optimizer_state_dtypes: tuple[str, ...] = ()
    parameter_bytes: tuple[Int64, ...] = ()
    """parameters on each rank's device between steps, distinct storages"""
    gradient_bytes: tuple[Int64, ...] = ()
    """gradients on each rank's device between steps"""
    optimizer_bytes: tuple[Int64, ...] = ()
    """optimizer state on each rank's device between steps"""
    library_bytes: tuple[Int64, ...] = ()
    """library copies and buffers, and model buffers, on each rank's device between steps"""
    library_buffers: str | None = None
    """JSON: bytes of these by name, fullest rank"""
    host_state_bytes: tuple[Int64, ...] = ()
    """states in each rank's host memory while it trains on another device"""
    formula_parameter_bytes: float | None = None
    """the formula's value for the fullest rank; null: no formula"""
    formula_gradient_bytes: float | None = None
    formula_optimizer_bytes: float | None = None
    formula_library_bytes: float | None = None
    formula_transient_bytes: float | None = None
    """temporary memory of a step in addition to these: gradients, gathered parameters"""

    # Traffic.

    sent_bytes_per_step: tuple[float, ...] = ()
    """payload that each rank sent over TCP in a timed step, control messages included"""
    offload_read_bytes_per_step: float | None = None
    """bytes read from block devices in a timed step, all ranks; only with states on a disk"""
    offload_written_bytes_per_step: float | None = None
    """bytes written to block devices in a timed step, all ranks"""
    offload_kept_bytes: Int64 | None = None
    """size of the files in the offload folder"""

    # Speed.

    step_seconds_p50: float | None = None
    """median step time of the timed steps: from the slowest rank finishing the previous step to it
    finishing this one"""
    step_seconds_p95: float | None = None
    """95th percentile of the step time"""
    step_seconds_mean: float | None = None
    """mean step time"""
    data_seconds_p50: float | None = None
    """median time for getting the batch, slowest rank"""
    samples_per_second: float | None = None
    """global batch / step_seconds_p50, or / the median of whole cycles if a strategy communicates
    every few steps"""
    tokens_per_second: float | None = None
    """null for images"""
    window_step_seconds: tuple[float, ...] = ()
    """mean step time of each window of consecutive timed steps, each position of a strategy's cycle
    counting alike; empty without a control. Control times cover the same windows and the last pause
    before each"""
    window_control_seconds: tuple[float, ...] = ()
    """mean time of the control per window, over all ranks"""
    window_slowest_control_seconds: tuple[float, ...] = ()
    """time of the slowest rank's control per window, mean over its pauses"""
    turn_began: tuple[float, ...] = ()
    """start of each turn of an interleaved trial, in seconds since the epoch"""
    turn_samples_per_second: tuple[float, ...] = ()
    """throughput in each turn"""

    # Other load on the host, and the state of its GPUs.

    idle_before: float | None = None
    """idle fraction of the cores' time just before the trial"""
    idle_after: float | None = None
    """idle fraction of the cores' time just after the trial"""
    foreign_load_cores: float | None = None
    """cores kept busy by other processes during the timed steps"""
    gpu_before: str | None = None
    """JSON: state of its GPUs on the first node just before the trial: clocks, throttling,
    temperature, power, errors, processes"""
    gpu_after: str | None = None
    """JSON: state of the same GPUs just after the trial"""
    gpu_use: str | None = None
    """JSON: by rank, GPU UUIDs, seconds of timed steps with power or thermal throttling, state at
    the end"""

    # The checkpoint from which new ranks went on.

    checkpoint_step: Int32 | None = None
    """number of training steps before the checkpoint"""
    checkpoint_ranks: Int32 | None = None
    """number of ranks that saved it"""
    checkpoint_bytes: Int64 | None = None
    """size of its files"""
    checkpoint_files: Int32 | None = None
    """number of its files"""
    checkpoint_save_seconds: float | None = None
    """from the call to the end of the save, slowest rank; async: with the steps meanwhile"""
    checkpoint_blocked_seconds: float | None = None
    """part of that in which the slowest rank could not train"""
    checkpoint_load_seconds: float | None = None
    """time to load it into a new model and optimizer, slowest rank"""
    checkpoint_restores_random: bool | None = None
    """whether loading restored torch's random state on every rank; null with checkpoint_from"""
    checkpoint_restores_bits: bool | None = None
    """whether loading restored every rank's parameters and optimizer states bit by bit; null with
    checkpoint_from"""

    # Efficiency.

    energy_joules_per_sample: float | None = None
    """energy of the trial's GPUs by NVML, or of the first node's CPU packages by RAPL; null without
    counters"""
    trend: float | None = None
    """relative change over the timed steps if significant (Kendall, p < 0.01): warm-up was too
    short; else 0"""
    flops_per_step: float | None = None
    """FLOPs of the model, see `how it was measured`"""
    hardware_flops_per_step: float | None = None
    """FLOPs including recomputation; null if the model's are unknown"""
    mfu: float | None = None
    """model FLOPs utilisation; null if the device's peak is unknown"""
    matmul_utilization: float | None = None
    """utilisation of the device's measured rate in a large matrix product (column `device_speed` of
    the run); null if not measured"""
    bubble_fraction: float | None = None
    """fraction of stage time spent waiting, measured in a separate pass"""
    expert_tokens: str | None = None
    """JSON: tokens of each expert by mixture-of-experts block, counted in the last warm-up step"""
    expert_imbalance: float | None = None
    """tokens of the busiest expert over the mean of its block, in the most imbalanced block"""

    # Peak memory, or the memory held when none was left.

    peak_memory_bytes: Int64 | None = None
    """largest of the ranks' peaks"""
    peak_memory_bytes_by_rank: tuple[Int64, ...] = ()
    reserved_memory_bytes: Int64 | None = None
    """memory reserved by the CUDA caching allocator, largest rank"""
    reserved_memory_bytes_by_rank: tuple[Int64, ...] = ()
    """the same by rank, for the device on which it is largest"""
    nvml_memory_bytes_by_rank: tuple[Int64, ...] = ()
    """memory of each rank's process by NVML after the timed steps; empty: unknown"""
    context_memory_bytes_by_rank: tuple[Int64, ...] = ()
    """NVML memory minus what the allocator had reserved: CUDA context, communication buffers,
    libraries; empty: unknown"""
    host_peak_memory_bytes_by_rank: tuple[Int64, ...] = ()
    """for cells on GPUs: peak host memory by rank (resident, not file-backed, above imports)"""
    memory_imbalance: float | None = None
    """largest peak of the ranks over their mean peak"""
    memory_method: str | None = None
    """how memory was measured"""
    setup_peak_memory_bytes: Int64 | None = None
    """largest of the ranks' peaks during set-up, before the first step"""
    failed_in: str | None = None
    """phase in which a rank ran out of memory: set-up, forward, backward, update, verification"""
    failed_holding: str | None = None
    """JSON: bytes that this rank held by kind, library buffers by name, other tensors, stacks;
    in_use: total"""

    # Losses, and deviations of losses and parameters from the reference run.

    restarts: Int32 | None = None
    """number of elastic restarts"""
    losses: tuple[float, ...] = ()
    """mean loss of each training step, warm-up included, without retrained steps"""
    reference_losses: tuple[float, ...] = ()
    """losses of the reference run over the parity segment"""
    fp32_loss_deviation: float | None = None
    """low-precision weights: largest relative loss deviation from the same training in fp32"""
    parity_steps: Int32
    """number of steps in the parity segment"""
    parity_verdict: str | None = None
    """exact, within tolerance, diverged, unknown"""
    parity_reason: str | None = None
    parity_max_loss_deviation: float | None = None
    """largest |loss - reference| / |reference|"""
    parity_max_norm_deviation: float | None = None
    """largest |gradient norm - reference| / reference"""
    gradient_norms: tuple[float, ...] = ()
    """before clipping, by step"""
    parity_max_update_deviation: float | None = None
    """largest |parameters - reference| / |reference's update| of a tensor"""
    parity_max_element_deviation: float | None = None
    """largest |parameter - reference| of an element / root mean square of its tensor's update"""
    parity_max_decay_deviation: float | None = None
    """largest part of a deviation in the direction of the weights / |reference's update|"""
    parity_max_buffer_deviation: float | None = None
    """largest |buffer - reference| / |reference's change|, such as BatchNorm's running statistics;
    null without buffers that training changes"""
    parity_max_moment_deviation: float | None = None
    """largest |optimizer state - reference| / |reference| of a tensor's first or second moment"""
    parity_max_replica_deviation: float | None = None
    """largest difference between ranks after the last step, estimated / |reference's update in the
    segment|"""
    parity_moments_skipped_reason: str | None = None
    """why optimizer states were not compared, or only some"""
    later_steps_verified: Int32 | None = None
    """number of steps after the parity segment whose loss was verified"""
    later_loss_deviation: float | None = None
    """largest |loss - reference| / |reference| of these steps"""
    steps_taken: Int32 | None = None
    """number of steps of a rank, including retrained ones"""
    rewinds: Int32 | None = None
    """number of rewinds to an earlier step between timed steps, to verify the steps again"""
    rewind_skipped_reason: str | None = None
    """why the state was never rewound"""
    rewind_loss_deviation: float | None = None
    """largest |loss - reference| / |reference| of a retrained step"""
    rewind_update_deviation: float | None = None
    """largest |parameters - reference| / |reference's update| of a tensor after retrained steps"""
    parity_worst_tensor: str | None = None
    """name of the tensor with the largest update deviation"""
    reference_loss_noise: float | None = None
    """largest loss deviation between two reference runs that split the batch differently"""
    reference_update_noise: float | None = None
    """largest deviation of a tensor's update between the two"""
    parity_loss_tolerance: float | None = None
    """tolerance that the strategy declares for losses"""
    parity_update_tolerance: float | None = None
    """tolerance that the strategy declares for updates"""

    @classmethod
    def of(cls, cell: Cell, **columns: Any) -> TrialRecord:
        """Returns a cell's trial; the cell's fields fill their columns. `columns`: all others."""
        return cls(**(cell_columns(cell) | columns))


def cell_columns(cell: Cell) -> dict[str, Any]:
    """Returns the columns that a cell alone determines, by name."""
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
"""Columns filled by a cell's field of that name."""
