"""The parquet schema: three tables, one row per run, per trial, per step of a rank.

History of the version:
  1  first version.
  2  systems, wrappers around DDP, trained parameters, states between steps with their formula, bytes sent and offloaded,
     distance to fp32.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

VERSION = 2

# name, type, meaning. `?` marks a column that may be null: unknown is null, never a guess.
RUNS = (
    ("schema_version", "int32", "version of this schema"),
    ("run_id", "string", "start time and four random characters"),
    ("started_at", "timestamp", "UTC"),
    ("matrix", "string", "name or file of the matrix"),
    ("plan", "string", "JSON: cells, trials, seed of the order, cells left out with status and reason"),
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
    ("git_commit", "string?", "commit of the suite, with + where the tree was changed"),
    ("suite_version", "string", ""),
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
    ("status", "string", "ok, unavailable, refused, out_of_memory, failed, timeout, interrupted, diverged"),
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
    ("launcher", "string", "elastic (torchrun's agent), spawn, or the command of a library's own launcher"),
    ("wraps_ddp", "string?", "library whose wrapper around DDP's mathematics this is"),
    ("threads_per_device", "int32", "CPU cores and intra-op threads of each device's rank"),
    ("memory_limit_bytes", "int64?", ""),
    ("stand_in", "string?", "what ran instead of the real thing"),
    ("oversubscribed", "bool", "more ranks than cores: its times say nothing of real hardware"),
    ("parameters", "int64?", "of the unsplit model"),
    ("trained_parameters", "int64?", "of these, the ones that are trained"),
    ("held_parameters", "list<int64>", "elements held by each rank between steps"),
    ("parameter_dtypes", "list<string>", ""),
    ("gradient_dtypes", "list<string>", ""),
    ("optimizer_state_dtypes", "list<string>", ""),
    ("parameter_bytes", "list<int64>", "kept by each rank on its device between steps, distinct storages"),
    ("gradient_bytes", "list<int64>", "the same of gradients"),
    ("optimizer_bytes", "list<int64>", "the same of optimizer state"),
    ("library_bytes", "list<int64>", "the same of the library's own copies and buffers, and the model's buffers"),
    ("library_buffers", "string?", "JSON: bytes of these by name, fullest rank"),
    ("host_state_bytes", "list<int64>", "kept by each rank in host memory while its device is another"),
    ("formula_parameter_bytes", "double?", "what the formula gives for the fullest rank; null: no formula"),
    ("formula_gradient_bytes", "double?", ""),
    ("formula_optimizer_bytes", "double?", ""),
    ("formula_library_bytes", "double?", ""),
    ("formula_transient_bytes", "double?", "what a step needs beside these for a while: gradients, gathered parameters"),
    ("sent_bytes_per_step", "list<double>", "payload that each rank sent over TCP in a timed step, control messages included"),
    ("offload_read_bytes_per_step", "double?", "read from block devices in a timed step, all ranks; where states lie on a disk"),
    ("offload_written_bytes_per_step", "double?", "written to them"),
    ("offload_kept_bytes", "int64?", "size of the files in the offload folder"),
    ("step_seconds_p50", "double?", "median over timed steps of the slowest rank's time"),
    ("step_seconds_p95", "double?", "95th percentile of the same"),
    ("step_seconds_mean", "double?", "mean of the same"),
    ("data_seconds_p50", "double?", "median share of the step for getting the batch, slowest rank"),
    ("samples_per_second", "double?", "global batch / step_seconds_p50"),
    ("tokens_per_second", "double?", "null for images"),
    ("trend", "double?", "relative change over the timed steps where significant (Kendall, p < 0.01), else 0: warm-up was too short"),
    ("flops_per_step", "double?", "of the model, see `how it was measured`"),
    ("mfu", "double?", "model FLOPs utilisation; null where the device's peak is unknown"),
    ("bubble_fraction", "double?", "share of stage time spent waiting, measured in a pass of its own"),
    ("peak_memory_bytes", "int64?", "largest of the ranks' peaks"),
    ("peak_memory_bytes_by_rank", "list<int64>", ""),
    ("reserved_memory_bytes", "int64?", "CUDA caching allocator, largest rank"),
    ("memory_imbalance", "double?", "largest over mean peak of the ranks"),
    ("memory_method", "string?", "how memory was measured"),
    ("setup_peak_memory_bytes", "int64?", "largest of the ranks' peaks during set-up, before the first step"),
    ("failed_in", "string?", "of a rank that ran out of memory: set-up, forward, backward, update, verification"),
    ("failed_holding", "string?", "JSON: bytes that it held then by kind, library buffers by name, other tensors, stacks; in_use: in all"),
    ("restarts", "int32?", "elastic restarts taken"),
    ("losses", "list<double>", "mean loss of each step, warm-up included"),
    ("reference_losses", "list<double>", "the reference run's, over the parity segment"),
    ("fp32_loss_deviation", "double?", "low-precision weights: largest relative loss deviation from the same training in fp32"),
    ("parity_steps", "int32", "length of the parity segment"),
    ("parity_verdict", "string?", "exact, within tolerance, diverged, unknown"),
    ("parity_reason", "string?", ""),
    ("parity_max_loss_deviation", "double?", "largest |loss - reference| / |reference|"),
    ("parity_max_update_deviation", "double?", "largest |parameters - reference| / |reference's update| of a tensor"),
    ("parity_worst_tensor", "string?", "the tensor that it was"),
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
    ("phase", "string", "warmup, settling (after the parity check), timed"),
    ("data_seconds", "double", "getting the batch and moving it to the device"),
    ("step_seconds", "double", "the whole step between two device synchronisations, data included"),
    ("loss", "double?", "mean loss of this rank's samples; null where the rank has none"),
)
TABLES = {"runs": RUNS, "trials": TRIALS, "steps": STEPS}


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
    fields = [pa.field(name, types[kind.rstrip("?")], nullable=kind.endswith("?")) for name, kind, _ in TABLES[table]]
    return pa.schema(fields, metadata={"parallelism_bench_schema_version": str(VERSION)})
