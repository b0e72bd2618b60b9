"""The table `runs`: one row per run."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from harness.record.table import Int32, Int64, Record, since


@dataclass(frozen=True, kw_only=True)
class RunRecord(Record):
    schema_version: Int32
    """version of this schema"""
    run_id: str
    """start time and four random characters"""
    started_at: datetime
    """UTC"""
    matrix: str
    """name or file of the matrix"""
    plan: str
    """JSON: cells, trials, seed of the order, cells left out with status and reason"""
    host: str
    """host name"""
    operating_system: str
    """kernel and distribution"""
    python_version: str
    torch_version: str
    libraries: str
    """JSON: version of each library that a strategy uses"""
    cpu_model: str | None = None
    cpu_cores: Int32
    """cores this process may use, one hardware thread each"""
    memory_bytes: Int64
    """memory this run may use: the host's, or the limit of its container or job"""
    gpus: tuple[str, ...] = ()
    """name of each GPU"""
    gpu_memory_bytes: Int64 | None = None
    """memory of one GPU"""
    gpu_facts: str | None = since(7, None)
    """JSON: for each GPU, its UUID, bus id, compute capability, NUMA node, nearby cores, MIG, ECC,
    persistence, power limits"""
    gpu_topology: str | None = since(7, None)
    """JSON: connection of each pair of GPUs: NVLink with version and links, else the PCIe
    ancestor"""
    gpus_unused: str | None = since(7, None)
    """why existing GPUs are not used; null if they are, or if there are none"""
    device_speed: str | None = since(12, None)
    """JSON: rates of GPU 0 before the first trial: FLOP/s of matrix products by precision, bytes
    per second of copies, seconds per kernel launch; or why they were not measured; null without GPU
    cells"""
    numa: str | None = since(7, None)
    """JSON: CPU cores of each NUMA node of the host"""
    driver_version: str | None = since(7, None)
    """version of the NVIDIA driver"""
    driver_cuda_version: str | None = since(7, None)
    """newest CUDA version that the driver supports"""
    torch_cuda_version: str | None = since(7, None)
    """CUDA version that torch is built for"""
    nccl_version: str | None = since(7, None)
    """NCCL version that torch uses"""
    cudnn_version: str | None = since(7, None)
    """cuDNN version that torch uses"""
    git_commit: str | None = None
    """commit of the suite, with + if the tree was modified"""
    suite_version: str
    allocation: str | None = since(4, None)
    """JSON: the SLURM job that started the run"""
