"""Columns of `trials` about memory and about bytes on the way."""

from __future__ import annotations

from dataclasses import dataclass

from harness.record.table import Int64, Record, since


@dataclass(frozen=True, kw_only=True)
class TrialStates(Record):
    """What each rank kept between steps, and what the strategy's formula gives for it."""

    parameters: Int64 | None = None
    """of the unsplit model"""
    trained_parameters: Int64 | None = since(2, None)
    """of these, the ones that are trained"""
    held_parameters: tuple[Int64, ...] = ()
    """elements held by each rank between steps"""
    parameter_dtypes: tuple[str, ...] = ()
    gradient_dtypes: tuple[str, ...] = ()
    optimizer_state_dtypes: tuple[str, ...] = ()
    parameter_bytes: tuple[Int64, ...] = since(2, ())
    """kept by each rank on its device between steps, distinct storages"""
    gradient_bytes: tuple[Int64, ...] = since(2, ())
    """the same of gradients"""
    optimizer_bytes: tuple[Int64, ...] = since(2, ())
    """the same of optimizer state"""
    library_bytes: tuple[Int64, ...] = since(2, ())
    """the same of the library's own copies and buffers, and the model's buffers"""
    library_buffers: str | None = since(2, None)
    """JSON: bytes of these by name, fullest rank"""
    host_state_bytes: tuple[Int64, ...] = since(2, ())
    """kept by each rank in host memory while its device is another"""
    formula_parameter_bytes: float | None = since(2, None)
    """what the formula gives for the fullest rank; null: no formula"""
    formula_gradient_bytes: float | None = since(2, None)
    formula_optimizer_bytes: float | None = since(2, None)
    formula_library_bytes: float | None = since(2, None)
    formula_transient_bytes: float | None = since(3, None)
    """what a step needs beside these for a while: gradients, gathered parameters"""


@dataclass(frozen=True, kw_only=True)
class TrialTraffic(Record):
    """What ranks sent to each other, and read from and wrote to disks."""

    sent_bytes_per_step: tuple[float, ...] = since(2, ())
    """payload that each rank sent over TCP in a timed step, control messages included"""
    offload_read_bytes_per_step: float | None = since(2, None)
    """read from block devices in a timed step, all ranks; where states lie on a disk"""
    offload_written_bytes_per_step: float | None = since(2, None)
    """written to them"""
    offload_kept_bytes: Int64 | None = since(2, None)
    """size of the files in the offload folder"""


@dataclass(frozen=True, kw_only=True)
class TrialMemory(Record):
    """The peak of memory, or what was held when there was none left."""

    peak_memory_bytes: Int64 | None = None
    """largest of the ranks' peaks"""
    peak_memory_bytes_by_rank: tuple[Int64, ...] = ()
    reserved_memory_bytes: Int64 | None = None
    """CUDA caching allocator, largest rank"""
    reserved_memory_bytes_by_rank: tuple[Int64, ...] = since(7, ())
    """the same of each rank, on its device where it is largest"""
    nvml_memory_bytes_by_rank: tuple[Int64, ...] = since(7, ())
    """memory of each rank's process by NVML after the timed steps; empty: unknown"""
    context_memory_bytes_by_rank: tuple[Int64, ...] = since(7, ())
    """that without what the allocator had reserved then: CUDA's context, communication buffers,
    libraries; empty: unknown"""
    host_peak_memory_bytes_by_rank: tuple[Int64, ...] = since(7, ())
    """of cells on GPUs: peak of each rank's host memory (resident, no file, above imports)"""
    memory_imbalance: float | None = None
    """largest over mean peak of the ranks"""
    memory_method: str | None = None
    """how memory was measured"""
    setup_peak_memory_bytes: Int64 | None = since(3, None)
    """largest of the ranks' peaks during set-up, before the first step"""
    failed_in: str | None = since(3, None)
    """of a rank that ran out of memory: set-up, forward, backward, update, verification"""
    failed_holding: str | None = since(3, None)
    """JSON: bytes that it held then by kind, library buffers by name, other tensors, stacks;
    in_use: in all"""
