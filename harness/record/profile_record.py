"""The table `explained`: one row per profile of a cell."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from harness.record.table import Int32, Int64, Record

SPLIT = ("parameters", "gradients", "optimizer", "activations", "library", "other")
"""Kinds of tensors into which a step's peak memory is broken down."""
COMPONENTS = ("compute", "communication", "optimizer", "data", "bubble", "offload", "other")
"""Parts that a step's time sums to. `communication` is the exposed one."""
GPU_PARTS = ("matmul", "attention", "optimizer", "kernels", "communication", "copy", "idle")
"""Parts that a GPU step sums to, by device activity. If several overlap, the first one counts."""


@dataclass(frozen=True, kw_only=True)
class ProfileRecord(Record):
    """A profiled launch of a cell: where its time, bytes and memory went."""

    run_id: str
    """run that the profile belongs to"""
    cell_id: str
    """the profiled cell"""
    cell_name: str
    """readable name of the cell"""
    attempt: Int32 = 1
    """1; higher if earlier attempts were interrupted"""
    started_at: datetime
    """UTC"""
    status: str
    """ok, or how the launch ended, as in trials"""
    reason: str = ""
    """what happened; empty when ok"""
    profiled_steps: Int32 | None = None
    """number of profiled steps, of which the median one (by its slowest rank) is broken down"""
    plain_step_seconds: float | None = None
    """median step before the profiler was on, slowest rank"""
    profiled_step_seconds: float | None = None
    """duration of the step that is broken down, slowest rank"""
    compute_seconds: tuple[float, ...] = ()
    """by rank: forward, backward and preparation for them"""
    communication_seconds: tuple[float, ...] = ()
    """by rank: exposed, i.e. in flight or waited for while nothing computes"""
    optimizer_seconds: tuple[float, ...] = ()
    """by rank: updating parameters and clearing gradients"""
    data_seconds: tuple[float, ...] = ()
    """by rank: getting the batch"""
    bubble_seconds: tuple[float, ...] = ()
    """by rank: waiting for another pipeline stage"""
    offload_seconds: tuple[float, ...] = ()
    """by rank: waiting for states moving to or from host or disk"""
    other_seconds: tuple[float, ...] = ()
    """by rank: the remainder of the step"""
    overlapped_seconds: tuple[float, ...] = ()
    """by rank: communication that overlaps the other parts, not part of the sum; empty: unknown"""
    operators_seconds: tuple[float, ...] = ()
    """by rank: part of the step in which an operator or a kernel ran"""
    gpu_matmul_seconds: tuple[float, ...] = ()
    """by GPU rank: a matrix product or convolution kernel runs"""
    gpu_attention_seconds: tuple[float, ...] = ()
    """by GPU rank: a fused attention kernel runs"""
    gpu_optimizer_seconds: tuple[float, ...] = ()
    """by GPU rank: a kernel of the optimizer step runs"""
    gpu_kernels_seconds: tuple[float, ...] = ()
    """by GPU rank: any other compute kernel runs"""
    gpu_communication_seconds: tuple[float, ...] = ()
    """by GPU rank: a collective's kernel runs with nothing overlapping it"""
    gpu_copy_seconds: tuple[float, ...] = ()
    """by GPU rank: only a copy between host and device runs"""
    gpu_idle_seconds: tuple[float, ...] = ()
    """by GPU rank: nothing runs, e.g. the device waits for a kernel launch"""
    own_seconds: tuple[float, ...] = ()
    """by rank: the step without communication and bubble"""
    straggler: Int32 | None = None
    """rank whose own time is the longest in every profiled step, by more than 15 % over the others'
    median"""
    straggler_excess: float | None = None
    """fraction by which its own time exceeds that median"""
    collectives: str | None = None
    """JSON: per rank a list of [operation, bytes of the whole tensor, group size, count per
    step]"""
    logical_bytes: tuple[float, ...] = ()
    """by rank: bytes per step that these collectives must send in theory"""
    theory_bytes: float | None = None
    """bytes per step by the strategy's formula, mean of the ranks; null: no formula"""
    algorithm_bytes: tuple[float, ...] = ()
    """by rank: bytes that the backend's algorithm sends for these collectives, without headers"""
    sent_bytes: tuple[float, ...] = ()
    """by rank: payload sent over TCP per step before the profiler was on"""
    peak_tracked_bytes: tuple[Int64, ...] = ()
    """by rank: peak of tracked tensors; the sum of the columns below"""
    peak_parameters_bytes: tuple[Int64, ...] = ()
    """parameters at the peak, including gathered ones that a module holds"""
    peak_gradients_bytes: tuple[Int64, ...] = ()
    """gradients at the peak"""
    peak_optimizer_bytes: tuple[Int64, ...] = ()
    """optimizer state at the peak, including temporaries of the update"""
    peak_activations_bytes: tuple[Int64, ...] = ()
    """tensors made by forward, at the peak"""
    peak_library_bytes: tuple[Int64, ...] = ()
    """library copies and buffers, and model buffers, at the peak"""
    peak_other_bytes: tuple[Int64, ...] = ()
    """tensors made and freed within backward, at the peak"""
    unseen_buffers: str | None = None
    """JSON: bytes by name of the library's C++ buffers, fullest rank"""
    memory_reason: str | None = None
    """why the peak is not broken down; empty if it is"""
    private_bytes: tuple[Int64, ...] = ()
    """by rank: peak memory of that step as trials measure it, above the baseline after imports"""
    formula_parameter_bytes: float | None = None
    """the strategy's formula for the fullest rank; null: no formula"""
    formula_gradient_bytes: float | None = None
    formula_optimizer_bytes: float | None = None
    formula_library_bytes: float | None = None
    formula_activation_bytes: float | None = None
    """formula for the most that a rank's forward and backward hold in addition to model and
    gradients, in fp32: of one micro-batch, or all in flight in a pipeline; null: no formula"""
