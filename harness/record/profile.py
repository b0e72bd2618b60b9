"""The table `explained`: one row per launch that profiles a cell."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from harness.record.table import Int32, Int64, Record, since

SPLIT = ("parameters", "gradients", "optimizer", "activations", "library", "other")
"""Kinds of tensors that the peak of a step's memory is broken down into."""
COMPONENTS = ("compute", "communication", "optimizer", "data", "bubble", "offload", "other")
"""Parts that a step's time is broken down into; they sum to it. `communication` is the exposed one.
"""
GPU_PARTS = ("matmul", "attention", "optimizer", "kernels", "communication", "copy", "idle")
"""Parts that a step on a GPU is broken down into by what the device does; they sum to it, and each
wins over those after it. `kernels` are the other ones."""


@dataclass(frozen=True, kw_only=True)
class ProfileRecord(Record):
    """A launch of a cell whose ranks were profiled: where its time, bytes and memory went."""

    run_id: str
    """run that the launch belongs to"""
    cell_id: str
    """cell that it explains"""
    cell_name: str
    """the cell in words"""
    attempt: Int32 = 1
    """1, more where an interrupted attempt came before"""
    started_at: datetime
    """UTC"""
    status: str
    """ok, or how the launch ended, as in trials"""
    reason: str = ""
    """what happened; empty when ok"""
    profiled_steps: Int32 | None = None
    """steps under the profiler of which the median one, by its slowest rank, is broken down"""
    plain_step_seconds: float | None = None
    """median step before the profiler was on, slowest rank"""
    profiled_step_seconds: float | None = None
    """the step that is broken down, slowest rank"""
    compute_seconds: tuple[float, ...] = ()
    """of each rank in that step: forward, backward and what prepares them"""
    communication_seconds: tuple[float, ...] = ()
    """exposed: in flight or waited for while nothing computes"""
    optimizer_seconds: tuple[float, ...] = ()
    """update and clearing of gradients"""
    data_seconds: tuple[float, ...] = ()
    """getting the batch"""
    bubble_seconds: tuple[float, ...] = ()
    """waiting for another stage of a pipeline"""
    offload_seconds: tuple[float, ...] = ()
    """waiting for states on their way to or from a host or disk"""
    other_seconds: tuple[float, ...] = ()
    """what remains of the rank's step"""
    overlapped_seconds: tuple[float, ...] = ()
    """communication in flight during the others, not part of the sum; empty: unknown"""
    operators_seconds: tuple[float, ...] = ()
    """part of the step in which an operator or a kernel ran"""
    gpu_matmul_seconds: tuple[float, ...] = since(12, ())
    """of each rank on a GPU in that step: a kernel of matrix products or convolutions runs"""
    gpu_attention_seconds: tuple[float, ...] = since(12, ())
    """a fused kernel of attention runs"""
    gpu_optimizer_seconds: tuple[float, ...] = since(12, ())
    """a kernel of the optimizer's step runs"""
    gpu_kernels_seconds: tuple[float, ...] = since(12, ())
    """any other kernel runs that computes"""
    gpu_communication_seconds: tuple[float, ...] = since(12, ())
    """a collective's kernel runs, and nothing overlaps it"""
    gpu_copy_seconds: tuple[float, ...] = since(12, ())
    """nothing runs but a copy between host and device"""
    gpu_idle_seconds: tuple[float, ...] = since(12, ())
    """nothing runs: the device waits for the host, such as for the next launch"""
    own_seconds: tuple[float, ...] = ()
    """the step without communication and bubble"""
    straggler: Int32 | None = None
    """rank whose own time is the longest in every profiled step, by more than 15 % over the median
    of the others'"""
    straggler_excess: float | None = None
    """share by which it does"""
    collectives: str | None = None
    """JSON: per rank a list of [operation, bytes of the whole tensor, group size, count per step]
    """
    logical_bytes: tuple[float, ...] = ()
    """what each rank must send per step for these by theory"""
    theory_bytes: float | None = None
    """what the strategy's formula gives for that, mean of the ranks; null: no formula"""
    algorithm_bytes: tuple[float, ...] = ()
    """what the backend's algorithm sends for them, headers aside"""
    sent_bytes: tuple[float, ...] = ()
    """payload that each rank sent over TCP per step before the profiler was on"""
    peak_tracked_bytes: tuple[Int64, ...] = ()
    """tensors of each rank when they are most; the sum of the following"""
    peak_parameters_bytes: tuple[Int64, ...] = ()
    """parameters at that moment, gathered ones that a module holds included"""
    peak_gradients_bytes: tuple[Int64, ...] = ()
    """gradients"""
    peak_optimizer_bytes: tuple[Int64, ...] = ()
    """optimizer state, temporaries of the update included"""
    peak_activations_bytes: tuple[Int64, ...] = ()
    """made by forward"""
    peak_library_bytes: tuple[Int64, ...] = ()
    """the library's copies and buffers, and the model's buffers"""
    peak_other_bytes: tuple[Int64, ...] = ()
    """made by backward and freed in it"""
    unseen_buffers: str | None = None
    """JSON: bytes by name of the library's buffers that live in C++, fullest rank"""
    memory_reason: str | None = None
    """why there is no split of the peak; empty where there is one"""
    private_bytes: tuple[Int64, ...] = ()
    """peak memory of each rank in that step as trials measure it, above the baseline after imports
    """
    formula_parameter_bytes: float | None = None
    """what the strategy's formula gives for the fullest rank; null: no formula"""
    formula_gradient_bytes: float | None = None
    formula_optimizer_bytes: float | None = None
    formula_library_bytes: float | None = None
    formula_activation_bytes: float | None = None
    """what forward and backward hold at most in a rank beside model and gradients, in fp32: of a
    micro-batch, in a pipeline of all that are in flight; null: no formula"""
