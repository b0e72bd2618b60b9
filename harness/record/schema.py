"""The parquet schema: four tables, one row per run, per trial, per step of a rank, per launch that
explains a cell.

History of the version:
  1  first version. 2  systems, wrappers around DDP, trained parameters, states between steps with
  their formula, bytes sent and offloaded,
     distance to fp32.
  3  table explained; idle time around a trial, foreign load, energy. 4  several nodes: their
  number, names and facts, and the job that a run was part of. 5  emulated links between nodes: as
  asked for, as measured, and how. 6  launches that train by turns: when each turn began, and its
  throughput. 7  what a GPU's number needs beside it: versions, topology and settings of a run's
  GPUs; their state around each trial, what
     held them back in the timed steps, memory by NVML and of the host; cores of each rank; noise of
     the reference.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

VERSION = 7

# name, type, meaning. `?` marks a column that may be null: unknown is null, never a guess.
RUNS = (
    ("schema_version", "int32", "version of this schema"),
    ("run_id", "string", "start time and four random characters"),
    ("started_at", "timestamp", "UTC"),
    ("matrix", "string", "name or file of the matrix"),
    (
        "plan",
        "string",
        "JSON: cells, trials, seed of the order, cells left out with status and reason",
    ),
    ("host", "string", "host name"),
    ("operating_system", "string", "kernel and distribution"),
    ("python_version", "string", ""),
    ("torch_version", "string", ""),
    ("libraries", "string", "JSON: version of each library that a strategy uses"),
    ("cpu_model", "string?", ""),
    ("cpu_cores", "int32", "cores this process may use, one hardware thread each"),
    ("memory_bytes", "int64", "memory of the host"),
    ("gpus", "list<string>", "name of each GPU"),
    ("gpu_memory_bytes", "int64?", "memory of one GPU"),
    (
        "gpu_facts",
        "string?",
        (
            "JSON: of each GPU its UUID, bus id, compute capability, NUMA node, cores near it, MIG,"
            " ECC, persistence, power limits"
        ),
    ),
    (
        "gpu_topology",
        "string?",
        (
            "JSON: how each pair of GPUs is connected: NVLink with version and links, else the PCIe"
            " ancestor"
        ),
    ),
    (
        "gpus_unused",
        "string?",
        "why GPUs that are there are not used; null: they are, or there are none",
    ),
    ("numa", "string?", "JSON: CPU cores of each NUMA node of the host"),
    ("driver_version", "string?", "NVIDIA driver"),
    ("driver_cuda_version", "string?", "newest CUDA that this driver runs"),
    ("torch_cuda_version", "string?", "CUDA that torch is built for"),
    ("nccl_version", "string?", "NCCL that torch uses"),
    ("cudnn_version", "string?", "cuDNN that torch uses"),
    ("git_commit", "string?", "commit of the suite, with + where the tree was changed"),
    ("suite_version", "string", ""),
    ("allocation", "string?", "JSON: the SLURM job that the run was started in"),
)
TRIALS = (
    ("schema_version", "int32", "version of this schema"),
    ("run_id", "string", "run that the trial belongs to"),
    ("cell_id", "string", "same measurement, same id, on every host"),
    ("cell_name", "string", "the cell in words"),
    ("label", "string", "the strategy with its options in words"),
    ("cell", "string", "JSON: the whole cell"),
    ("trial", "int32", "number of the trial of its cell, from 0"),
    ("attempt", "int32", "1, more where an interrupted attempt came before"),
    ("position", "int32", "place in the run's shuffled order"),
    (
        "status",
        "string",
        "ok, unavailable, refused, skipped, out_of_memory, failed, timeout, interrupted, diverged",
    ),
    ("reason", "string", "what happened and what to do; empty when ok"),
    ("expected", "bool", "the matrix expects this status (a cell that is known to diverge)"),
    ("log_tail", "string", "end of the log of the rank that had the first cause"),
    ("stacks", "string", "stacks of the ranks, after a timeout"),
    ("started_at", "timestamp", "UTC"),
    ("wall_seconds", "double?", "the whole trial, start and end of its processes included"),
    ("startup_seconds", "double?", "from the launch to the last rank's first instruction"),
    ("setup_seconds", "double?", "process group, model, wrapping; slowest rank"),
    ("first_step_seconds", "double?", "step 0, slowest rank"),
    ("system", "string?", "system under test that the matrix files the cell under"),
    ("strategy", "string", ""),
    ("options", "string", "JSON"),
    ("workload", "string", ""),
    ("data", "string", ""),
    ("data_fingerprint", "string?", "sha256 of the tokens"),
    ("sequence_length", "int32", "tokens per sample"),
    ("devices", "int32", "number of devices"),
    ("nodes", "int32?", "number of nodes that the devices are on"),
    ("node_names", "list<string>", "of a cell on several nodes, in the order of its ranks"),
    (
        "node_facts",
        "string?",
        (
            "JSON: hardware, address, interface, nominal and measured link, switches, NUMA and GPU"
            " topology of each of these"
        ),
    ),
    (
        "links",
        "string?",
        (
            "emulated link between nodes that was asked for: none, or rate and one-way delay; null:"
            " their own network"
        ),
    ),
    (
        "link_bits_per_second",
        "double?",
        (
            "payload of one TCP stream between the first two nodes, measured before the link's"
            " first trial"
        ),
    ),
    (
        "link_latency_seconds",
        "double?",
        "half the median round trip of a byte between them, measured then too",
    ),
    (
        "link_emulation",
        "string?",
        "how: network namespaces, tbf for the rate, netem or a user-space relay for the delay",
    ),
    ("device", "string", "cpu or cuda"),
    ("processes", "int32?", "number of ranks"),
    ("data_parallel", "int32?", ""),
    ("pipeline_parallel", "int32?", ""),
    ("tensor_parallel", "int32?", ""),
    ("precision", "string", ""),
    ("regime", "string", "strong or weak"),
    ("global_batch", "int32", "samples per step"),
    ("micro_batches", "int32", ""),
    ("optimizer", "string", ""),
    ("seed", "int64", ""),
    (
        "launcher",
        "string",
        "elastic (torchrun's agent), spawn, or the command of a library's own launcher",
    ),
    ("wraps_ddp", "string?", "library whose wrapper around DDP's mathematics this is"),
    ("threads_per_device", "int32", "CPU cores and intra-op threads of each device's rank"),
    ("memory_limit_bytes", "int64?", ""),
    ("stand_in", "string?", "what ran instead of the real thing"),
    ("oversubscribed", "bool", "more ranks than cores: its times say nothing of real hardware"),
    ("rank_cores", "list<string>", "CPU cores that each rank was pinned to, as 0-7,16"),
    ("parameters", "int64?", "of the unsplit model"),
    ("trained_parameters", "int64?", "of these, the ones that are trained"),
    ("held_parameters", "list<int64>", "elements held by each rank between steps"),
    ("parameter_dtypes", "list<string>", ""),
    ("gradient_dtypes", "list<string>", ""),
    ("optimizer_state_dtypes", "list<string>", ""),
    (
        "parameter_bytes",
        "list<int64>",
        "kept by each rank on its device between steps, distinct storages",
    ),
    ("gradient_bytes", "list<int64>", "the same of gradients"),
    ("optimizer_bytes", "list<int64>", "the same of optimizer state"),
    (
        "library_bytes",
        "list<int64>",
        "the same of the library's own copies and buffers, and the model's buffers",
    ),
    ("library_buffers", "string?", "JSON: bytes of these by name, fullest rank"),
    (
        "host_state_bytes",
        "list<int64>",
        "kept by each rank in host memory while its device is another",
    ),
    (
        "formula_parameter_bytes",
        "double?",
        "what the formula gives for the fullest rank; null: no formula",
    ),
    ("formula_gradient_bytes", "double?", ""),
    ("formula_optimizer_bytes", "double?", ""),
    ("formula_library_bytes", "double?", ""),
    (
        "formula_transient_bytes",
        "double?",
        "what a step needs beside these for a while: gradients, gathered parameters",
    ),
    (
        "sent_bytes_per_step",
        "list<double>",
        "payload that each rank sent over TCP in a timed step, control messages included",
    ),
    (
        "offload_read_bytes_per_step",
        "double?",
        "read from block devices in a timed step, all ranks; where states lie on a disk",
    ),
    ("offload_written_bytes_per_step", "double?", "written to them"),
    ("offload_kept_bytes", "int64?", "size of the files in the offload folder"),
    ("step_seconds_p50", "double?", "median over timed steps of the slowest rank's time"),
    ("step_seconds_p95", "double?", "95th percentile of the same"),
    ("step_seconds_mean", "double?", "mean of the same"),
    ("data_seconds_p50", "double?", "median share of the step for getting the batch, slowest rank"),
    (
        "samples_per_second",
        "double?",
        (
            "global batch / step_seconds_p50; of a strategy that communicates every few steps, /"
            " the median of whole cycles"
        ),
    ),
    ("tokens_per_second", "double?", "null for images"),
    (
        "turn_began",
        "list<double>",
        (
            "of a launch that trained by turns with its round's others: when each began, seconds"
            " after the epoch"
        ),
    ),
    ("turn_samples_per_second", "list<double>", "throughput in each of them"),
    ("idle_before", "double?", "share of the cores' time that was idle just before the launch"),
    ("idle_after", "double?", "the same just after its end"),
    (
        "foreign_load_cores",
        "double?",
        "cores that others than the ranks kept busy during the timed steps",
    ),
    (
        "gpu_before",
        "string?",
        (
            "JSON: of the first node's GPUs that it uses, just before the launch: clocks, what"
            " holds them back, heat, power, errors, processes"
        ),
    ),
    ("gpu_after", "string?", "JSON: the same just after its end"),
    (
        "gpu_use",
        "string?",
        (
            "JSON: by rank the UUIDs of its GPUs, seconds of the timed steps in which power or heat"
            " held them back, their state at the end"
        ),
    ),
    (
        "energy_joules_per_sample",
        "double?",
        (
            "of all its GPUs by NVML, or of the host's CPU packages by RAPL; null where these do"
            " not count"
        ),
    ),
    (
        "trend",
        "double?",
        (
            "relative change over the timed steps where significant (Kendall, p < 0.01), else 0:"
            " warm-up was too short"
        ),
    ),
    ("flops_per_step", "double?", "of the model, see `how it was measured`"),
    ("mfu", "double?", "model FLOPs utilisation; null where the device's peak is unknown"),
    (
        "bubble_fraction",
        "double?",
        "share of stage time spent waiting, measured in a pass of its own",
    ),
    ("peak_memory_bytes", "int64?", "largest of the ranks' peaks"),
    ("peak_memory_bytes_by_rank", "list<int64>", ""),
    ("reserved_memory_bytes", "int64?", "CUDA caching allocator, largest rank"),
    (
        "reserved_memory_bytes_by_rank",
        "list<int64>",
        "the same of each rank, on its device where it is largest",
    ),
    (
        "nvml_memory_bytes_by_rank",
        "list<int64>",
        "memory of each rank's process by NVML after the timed steps; empty: unknown",
    ),
    (
        "context_memory_bytes_by_rank",
        "list<int64>",
        (
            "that without what the allocator had reserved then: CUDA's context, communication"
            " buffers, libraries; empty: unknown"
        ),
    ),
    (
        "host_peak_memory_bytes_by_rank",
        "list<int64>",
        "of cells on GPUs: peak of each rank's host memory (resident, no file, above imports)",
    ),
    ("memory_imbalance", "double?", "largest over mean peak of the ranks"),
    ("memory_method", "string?", "how memory was measured"),
    (
        "setup_peak_memory_bytes",
        "int64?",
        "largest of the ranks' peaks during set-up, before the first step",
    ),
    (
        "failed_in",
        "string?",
        "of a rank that ran out of memory: set-up, forward, backward, update, verification",
    ),
    (
        "failed_holding",
        "string?",
        (
            "JSON: bytes that it held then by kind, library buffers by name, other tensors, stacks;"
            " in_use: in all"
        ),
    ),
    ("restarts", "int32?", "elastic restarts taken"),
    ("losses", "list<double>", "mean loss of each step, warm-up included"),
    ("reference_losses", "list<double>", "the reference run's, over the parity segment"),
    (
        "fp32_loss_deviation",
        "double?",
        "low-precision weights: largest relative loss deviation from the same training in fp32",
    ),
    ("parity_steps", "int32", "length of the parity segment"),
    ("parity_verdict", "string?", "exact, within tolerance, diverged, unknown"),
    ("parity_reason", "string?", ""),
    ("parity_max_loss_deviation", "double?", "largest |loss - reference| / |reference|"),
    (
        "parity_max_update_deviation",
        "double?",
        "largest |parameters - reference| / |reference's update| of a tensor",
    ),
    ("parity_worst_tensor", "string?", "the tensor that it was"),
    (
        "reference_loss_noise",
        "double?",
        "largest loss deviation between two reference runs that split the batch differently",
    ),
    ("reference_update_noise", "double?", "largest deviation of a tensor's update between these"),
    ("parity_loss_tolerance", "double?", "what the strategy declares"),
    ("parity_update_tolerance", "double?", "what the strategy declares"),
)
STEPS = (
    ("run_id", "string", ""),
    ("cell_id", "string", ""),
    ("trial", "int32", ""),
    ("attempt", "int32", ""),
    ("rank", "int32", ""),
    ("step", "int32", "from 0"),
    (
        "phase",
        "string",
        "warmup, settling (after the parity check, and at the begin of a turn), timed",
    ),
    ("data_seconds", "double", "getting the batch and moving it to the device"),
    ("step_seconds", "double", "the whole step between two device synchronisations, data included"),
    ("loss", "double?", "mean loss of this rank's samples; null where the rank has none"),
)
EXPLAINED = (
    ("run_id", "string", "run that the launch belongs to"),
    ("cell_id", "string", "cell that it explains"),
    ("cell_name", "string", "the cell in words"),
    ("attempt", "int32", "1, more where an interrupted attempt came before"),
    ("started_at", "timestamp", "UTC"),
    ("status", "string", "ok, or how the launch ended, as in trials"),
    ("reason", "string", "what happened; empty when ok"),
    (
        "profiled_steps",
        "int32?",
        "steps under the profiler of which the median one, by its slowest rank, is broken down",
    ),
    ("plain_step_seconds", "double?", "median step before the profiler was on, slowest rank"),
    ("profiled_step_seconds", "double?", "the step that is broken down, slowest rank"),
    (
        "compute_seconds",
        "list<double>",
        "of each rank in that step: forward, backward and what prepares them",
    ),
    (
        "communication_seconds",
        "list<double>",
        "exposed: in flight or waited for while nothing computes",
    ),
    ("optimizer_seconds", "list<double>", "update and clearing of gradients"),
    ("data_seconds", "list<double>", "getting the batch"),
    ("bubble_seconds", "list<double>", "waiting for another stage of a pipeline"),
    (
        "offload_seconds",
        "list<double>",
        "waiting for states on their way to or from a host or disk",
    ),
    ("other_seconds", "list<double>", "what remains of the rank's step"),
    (
        "overlapped_seconds",
        "list<double>",
        "communication in flight during the others, not part of the sum; empty: unknown",
    ),
    ("operators_seconds", "list<double>", "part of the step in which an operator or a kernel ran"),
    ("own_seconds", "list<double>", "the step without communication and bubble"),
    (
        "straggler",
        "int32?",
        (
            "rank whose own time is the longest in every profiled step, by more than 15 % over the"
            " median of the others'"
        ),
    ),
    ("straggler_excess", "double?", "share by which it does"),
    (
        "collectives",
        "string?",
        (
            "JSON: per rank a list of [operation, bytes of the whole tensor, group size, count per"
            " step]"
        ),
    ),
    ("logical_bytes", "list<double>", "what each rank must send per step for these by theory"),
    (
        "theory_bytes",
        "double?",
        "what the strategy's formula gives for that, mean of the ranks; null: no formula",
    ),
    (
        "algorithm_bytes",
        "list<double>",
        "what the backend's algorithm sends for them, headers aside",
    ),
    (
        "sent_bytes",
        "list<double>",
        "payload that each rank sent over TCP per step before the profiler was on",
    ),
    (
        "peak_tracked_bytes",
        "list<int64>",
        "tensors of each rank when they are most; the sum of the following",
    ),
    (
        "peak_parameters_bytes",
        "list<int64>",
        "parameters at that moment, gathered ones that a module holds included",
    ),
    ("peak_gradients_bytes", "list<int64>", "gradients"),
    ("peak_optimizer_bytes", "list<int64>", "optimizer state, temporaries of the update included"),
    ("peak_activations_bytes", "list<int64>", "made by forward"),
    (
        "peak_library_bytes",
        "list<int64>",
        "the library's copies and buffers, and the model's buffers",
    ),
    ("peak_other_bytes", "list<int64>", "made by backward and freed in it"),
    (
        "unseen_buffers",
        "string?",
        "JSON: bytes by name of the library's buffers that live in C++, fullest rank",
    ),
    ("memory_reason", "string?", "why there is no split of the peak; empty where there is one"),
    (
        "private_bytes",
        "list<int64>",
        (
            "peak memory of each rank in that step as trials measure it, above the baseline after"
            " imports"
        ),
    ),
    (
        "formula_parameter_bytes",
        "double?",
        "what the strategy's formula gives for the fullest rank; null: no formula",
    ),
    ("formula_gradient_bytes", "double?", ""),
    ("formula_optimizer_bytes", "double?", ""),
    ("formula_library_bytes", "double?", ""),
    (
        "formula_activation_bytes",
        "double?",
        "what autograd keeps of an unsplit model's micro-batch; null where the model is split",
    ),
)
TABLES = {"runs": RUNS, "trials": TRIALS, "steps": STEPS, "explained": EXPLAINED}


@functools.cache
def arrow_schema(table: str) -> pa.Schema:
    """The table's arrow schema, the version in its metadata."""
    import pyarrow as pa

    types = {
        "int32": pa.int32(),
        "int64": pa.int64(),
        "double": pa.float64(),
        "string": pa.string(),
        "bool": pa.bool_(),
        "timestamp": pa.timestamp("us", tz="UTC"),
        "list<string>": pa.list_(pa.string()),
        "list<int64>": pa.list_(pa.int64()),
        "list<double>": pa.list_(pa.float64()),
    }
    fields = [
        pa.field(name, types[kind.rstrip("?")], nullable=kind.endswith("?"))
        for name, kind, _ in TABLES[table]
    ]
    return pa.schema(fields, metadata={"parallelism_bench_schema_version": str(VERSION)})
