"""Columns of `trials`: memory and traffic."""

from __future__ import annotations

from dataclasses import dataclass

from harness.record.table import Int64, Record, since


@dataclass(frozen=True, kw_only=True)
class TrialStates(Record):
    """States kept by each rank between steps, and the strategy's formulas."""

    parameters: Int64 | None = None
    """number of parameters of the unsplit model"""
    trained_parameters: Int64 | None = since(2, None)
    """number of these that are trained"""
    held_parameters: tuple[Int64, ...] = ()
    """number of elements held by each rank between steps"""
    parameter_dtypes: tuple[str, ...] = ()
    gradient_dtypes: tuple[str, ...] = ()
    optimizer_state_dtypes: tuple[str, ...] = ()
    parameter_bytes: tuple[Int64, ...] = since(2, ())
    """parameters on each rank's device between steps, distinct storages"""
    gradient_bytes: tuple[Int64, ...] = since(2, ())
    """gradients on each rank's device between steps"""
    optimizer_bytes: tuple[Int64, ...] = since(2, ())
    """optimizer state on each rank's device between steps"""
    library_bytes: tuple[Int64, ...] = since(2, ())
    """library copies and buffers, and model buffers, on each rank's device between steps"""
    library_buffers: str | None = since(2, None)
    """JSON: bytes of these by name, fullest rank"""
    host_state_bytes: tuple[Int64, ...] = since(2, ())
    """states in each rank's host memory while it trains on another device"""
    formula_parameter_bytes: float | None = since(2, None)
    """the formula's value for the fullest rank; null: no formula"""
    formula_gradient_bytes: float | None = since(2, None)
    formula_optimizer_bytes: float | None = since(2, None)
    formula_library_bytes: float | None = since(2, None)
    formula_transient_bytes: float | None = since(3, None)
    """temporary memory of a step in addition to these: gradients, gathered parameters"""


@dataclass(frozen=True, kw_only=True)
class TrialTraffic(Record):
    sent_bytes_per_step: tuple[float, ...] = since(2, ())
    """payload that each rank sent over TCP in a timed step, control messages included"""
    offload_read_bytes_per_step: float | None = since(2, None)
    """bytes read from block devices in a timed step, all ranks; only with states on a disk"""
    offload_written_bytes_per_step: float | None = since(2, None)
    """bytes written to block devices in a timed step, all ranks"""
    offload_kept_bytes: Int64 | None = since(2, None)
    """size of the files in the offload folder"""


@dataclass(frozen=True, kw_only=True)
class TrialMemory(Record):
    """Peak memory, or the memory held when none was left."""

    peak_memory_bytes: Int64 | None = None
    """largest of the ranks' peaks"""
    peak_memory_bytes_by_rank: tuple[Int64, ...] = ()
    reserved_memory_bytes: Int64 | None = None
    """memory reserved by the CUDA caching allocator, largest rank"""
    reserved_memory_bytes_by_rank: tuple[Int64, ...] = since(7, ())
    """the same by rank, for the device on which it is largest"""
    nvml_memory_bytes_by_rank: tuple[Int64, ...] = since(7, ())
    """memory of each rank's process by NVML after the timed steps; empty: unknown"""
    context_memory_bytes_by_rank: tuple[Int64, ...] = since(7, ())
    """NVML memory minus what the allocator had reserved: CUDA context, communication buffers,
    libraries; empty: unknown"""
    host_peak_memory_bytes_by_rank: tuple[Int64, ...] = since(7, ())
    """for cells on GPUs: peak host memory by rank (resident, not file-backed, above imports)"""
    memory_imbalance: float | None = None
    """largest peak of the ranks over their mean peak"""
    memory_method: str | None = None
    """how memory was measured"""
    setup_peak_memory_bytes: Int64 | None = since(3, None)
    """largest of the ranks' peaks during set-up, before the first step"""
    failed_in: str | None = since(3, None)
    """phase in which a rank ran out of memory: set-up, forward, backward, update, verification"""
    failed_holding: str | None = since(3, None)
    """JSON: bytes that this rank held by kind, library buffers by name, other tensors, stacks;
    in_use: total"""
