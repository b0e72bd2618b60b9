from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from harness.record.table import Int32, Int64, Record


@dataclass(frozen=True, kw_only=True)
class RunRecord(Record):
    schema_version: Int32
    run_id: str
    """UTC time and 4 hex digits, or `--run`"""
    started_at: datetime
    """UTC"""
    matrix: str
    """name or file of the matrix"""
    plan: str
    """JSON: cells, trials, seed of the order, and cells left out, with status and reason"""
    host: str
    operating_system: str
    """kernel and C library"""
    python_version: str
    torch_version: str
    libraries: str
    """JSON: versions of libraries"""
    cpu_model: str | None = None
    cpu_cores: Int32
    """hardware threads that this process may use"""
    memory_bytes: Int64
    """memory for the run: the host's, or its container's or job's limit"""
    gpus: tuple[str, ...] = ()
    gpu_memory_bytes: Int64 | None = None
    """memory of GPU 0"""
    gpu_facts: str | None = None
    """JSON: for each GPU, its UUID, bus id, compute capability, NUMA node, nearby cores, MIG, ECC,
    persistence, power limits"""
    gpu_topology: str | None = None
    """JSON: connection of each pair of GPUs: NVLink (version, links) or common PCIe ancestor"""
    gpus_unused: str | None = None
    """why torch cannot use the host's GPUs; null if it can, or if there are none"""
    device_speed: str | None = None
    """JSON: rates of GPU 0 before the first trial: FLOP/s of matrix products by precision, bytes/s
    of copies, seconds per kernel launch; or the reason why they are missing; null if no cell needs
    a GPU"""
    numa: str | None = None
    """JSON: CPU numbers of each NUMA node"""
    driver_version: str | None = None
    driver_cuda_version: str | None = None
    """newest CUDA version that the driver supports"""
    torch_cuda_version: str | None = None
    """torch's CUDA version; `HIP 7.0` for ROCm, where nccl_version is RCCL's; null without GPUs"""
    nccl_version: str | None = None
    cudnn_version: str | None = None
    git_commit: str | None = None
    """commit of the suite, with + if the tree was modified"""
    suite_version: str
    allocation: str | None = None
    """JSON: the SLURM job that started the run"""
    command: str | None = None
    """command line that started the run, quoted for a shell; null if a Python program did"""


@dataclass(frozen=True, kw_only=True)
class ConclusionRecord(Record):
    """Precision and advice of a run, which follow from its trials."""

    schema_version: Int32
    run_id: str
    concluded_at: datetime
    """UTC"""
    wall_seconds: float
    """time from the command's start to its last trial or profile; for a resumed run, of the last
    command"""
    trials: Int32
    half_width: float | None = None
    """relative half width of the 95% interval of throughput over the baseline's: of the cell to use
    or, if that is the baseline, of the fastest other that may be as fast; null without an
    interval"""
    advised_cell_id: str | None = None
    """cell to use; null if none can be advised"""
    advice: str | None = None
    """advice as a sentence"""
    between_runs: str = ""
    """that cell's throughput over the baseline's in several runs of the results folder, as a
    sentence; empty if only this run has both cells"""


@dataclass(frozen=True, kw_only=True)
class RankStep(Record):
    step: Int32
    phase: str
    """warmup, settling (first step after a check, rewind, restart or wait), timed"""
    data_seconds: float
    """time to get the batch, without its copy to a GPU"""
    step_seconds: float
    """whole step, including data, between two device synchronisations"""
    loss: float | None = None
    """mean loss of this rank's samples; null if the rank has none"""
    control_seconds: float | None = None
    """duration of the control after the step (one sample's forward and backward in a separate
    process on the rank's cores); null if none followed"""
    left_over_seconds: float | None = None
    """CPU time per thread that the rank spends on leftover work after the step; part of
    step_seconds"""
    training_step: Int32 | None = None
    """training step from 0; less than step after a rewind"""
    gradient_norm: float | None = None
    """2-norm of all gradients before clipping; null if unknown"""


@dataclass(frozen=True, kw_only=True)
class StepRecord(RankStep):
    run_id: str
    cell_id: str
    trial: Int32
    attempt: Int32
    rank: Int32
