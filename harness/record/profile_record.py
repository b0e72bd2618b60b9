from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from harness.record.table import Int32, Int64, Record

SPLIT = ("parameters", "gradients", "optimizer", "activations", "library", "other")
"""Kinds of tensors into which a step's peak memory is broken down."""
COMPONENTS = ("compute", "communication", "optimizer", "data", "bubble", "offload", "other")
"""Parts that add up to a step's time. `communication` is the exposed part."""
GPU_PARTS = ("matmul", "attention", "optimizer", "kernels", "communication", "copy", "idle")
"""Parts that add up to a step's time on a GPU. If several overlap, the first one counts."""


@dataclass(frozen=True, kw_only=True)
class ProfileRecord(Record):
    """A profile of a cell: where its time, bytes and memory went."""

    run_id: str
    cell_id: str
    cell_name: str
    attempt: Int32 = 1
    """1, or higher if earlier attempts were interrupted"""
    started_at: datetime
    """UTC"""
    status: str
    """ok, or how the launch ended (values as in trials)"""
    reason: str = ""
    """what went wrong; empty if ok"""
    profiled_steps: Int32 | None = None
    """number of profiled steps; the median one (by its slowest rank) is broken down"""
    plain_step_seconds: float | None = None
    """median step time without the profiler, slowest rank"""
    profiled_step_seconds: float | None = None
    """duration of the profiled step, slowest rank"""
    compute_seconds: tuple[float, ...] = ()
    """by rank: forward and backward, including Python"""
    communication_seconds: tuple[float, ...] = ()
    """by rank: exposed communication, not overlapped by compute"""
    optimizer_seconds: tuple[float, ...] = ()
    """by rank: updating parameters and clearing gradients"""
    data_seconds: tuple[float, ...] = ()
    """by rank: getting and copying the batch"""
    bubble_seconds: tuple[float, ...] = ()
    """by rank: waiting for another pipeline stage"""
    offload_seconds: tuple[float, ...] = ()
    """by rank: waiting for transfers to or from host memory or disk"""
    other_seconds: tuple[float, ...] = ()
    """by rank: rest of the step"""
    overlapped_seconds: tuple[float, ...] = ()
    """by rank: communication overlapped by other parts, thus not in the sum; empty if unknown"""
    operators_seconds: tuple[float, ...] = ()
    """by rank: time in which an operator or kernel ran"""
    gpu_matmul_seconds: tuple[float, ...] = ()
    """by GPU rank: matrix-product or convolution kernels"""
    gpu_attention_seconds: tuple[float, ...] = ()
    """by GPU rank: fused attention kernels"""
    gpu_optimizer_seconds: tuple[float, ...] = ()
    """by GPU rank: kernels of the optimizer step"""
    gpu_kernels_seconds: tuple[float, ...] = ()
    """by GPU rank: other compute kernels"""
    gpu_communication_seconds: tuple[float, ...] = ()
    """by GPU rank: communication kernels without compute kernels"""
    gpu_copy_seconds: tuple[float, ...] = ()
    """by GPU rank: copies between host and device with nothing else running"""
    gpu_idle_seconds: tuple[float, ...] = ()
    """by GPU rank: idle, e.g. waiting for a kernel launch"""
    own_seconds: tuple[float, ...] = ()
    """by rank: step time without communication and bubble"""
    straggler: Int32 | None = None
    """rank with the longest own_seconds in every profiled step, by more than 15% over the other
    ranks' median; null if there is none"""
    straggler_excess: float | None = None
    """fraction by which the straggler's own_seconds exceed that median"""
    collectives: str | None = None
    """JSON: per rank a list of [operation, bytes of the whole tensor, group size, count per
    step]"""
    logical_bytes: tuple[float, ...] = ()
    """by rank: bytes per step that these collectives must send in theory"""
    theory_bytes: float | None = None
    """bytes per step by the strategy's formula, mean of the ranks; null if it has no formula"""
    algorithm_bytes: tuple[float, ...] = ()
    """by rank: bytes that the backend's algorithm sends for these collectives, without headers"""
    sent_bytes: tuple[float, ...] = ()
    """by CPU rank: TCP payload sent per step, without the profiler"""
    peak_tracked_bytes: tuple[Int64, ...] = ()
    """by rank: peak bytes of tracked tensors, sum of the next six columns"""
    peak_parameters_bytes: tuple[Int64, ...] = ()
    """parameters at the peak, including gathered parameters"""
    peak_gradients_bytes: tuple[Int64, ...] = ()
    peak_optimizer_bytes: tuple[Int64, ...] = ()
    """optimizer state at the peak, including temporaries of the update"""
    peak_activations_bytes: tuple[Int64, ...] = ()
    """tensors created by forward, at the peak"""
    peak_library_bytes: tuple[Int64, ...] = ()
    """library copies and buffers, and model buffers, at the peak"""
    peak_other_bytes: tuple[Int64, ...] = ()
    """temporary tensors of backward, at the peak"""
    unseen_buffers: str | None = None
    """JSON: bytes of the library's C++ buffers by name, fullest rank"""
    memory_reason: str | None = None
    """why there is no breakdown of the peak; empty if there is one"""
    private_bytes: tuple[Int64, ...] = ()
    """by rank: peak memory of the tracked steps, as in trials"""
    formula_parameter_bytes: float | None = None
    """value of the strategy's formula for parameters on the fullest rank; null if it has no
    formula"""
    formula_gradient_bytes: float | None = None
    formula_optimizer_bytes: float | None = None
    formula_library_bytes: float | None = None
    formula_activation_bytes: float | None = None
    """value of the strategy's formula for a rank's peak activation bytes in fp32: of one
    micro-batch, or of all in flight in a pipeline; null if it has no formula"""
