"""The table `runs`: one row per run."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from harness.record.table import Int32, Int64, Record, since


@dataclass(frozen=True, kw_only=True)
class RunRecord(Record):
    """A run: what was asked for, and the host that it ran on."""

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
    """JSON: of each GPU its UUID, bus id, compute capability, NUMA node, cores near it, MIG, ECC,
    persistence, power limits"""
    gpu_topology: str | None = since(7, None)
    """JSON: how each pair of GPUs is connected: NVLink with version and links, else the PCIe
    ancestor"""
    gpus_unused: str | None = since(7, None)
    """why GPUs that are there are not used; null: they are, or there are none"""
    device_speed: str | None = since(12, None)
    """JSON: what GPU 0 reached before the first trial: FLOP/s of matrix products by precision,
    bytes per second of copies, seconds of a kernel launch; or the reason why that was not measured;
    null without GPU cells"""
    numa: str | None = since(7, None)
    """JSON: CPU cores of each NUMA node of the host"""
    driver_version: str | None = since(7, None)
    """NVIDIA driver"""
    driver_cuda_version: str | None = since(7, None)
    """newest CUDA that this driver runs"""
    torch_cuda_version: str | None = since(7, None)
    """CUDA that torch is built for"""
    nccl_version: str | None = since(7, None)
    """NCCL that torch uses"""
    cudnn_version: str | None = since(7, None)
    """cuDNN that torch uses"""
    git_commit: str | None = None
    """commit of the suite, with + where the tree was changed"""
    suite_version: str
    allocation: str | None = since(4, None)
    """JSON: the SLURM job that the run was started in"""
