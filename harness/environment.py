"""What a measurement was taken on: versions, hardware, commit. An allow-list, never the whole environment."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import psutil

LIBRARIES = ("numpy", "transformers", "accelerate", "deepspeed", "fairscale", "horovod", "bitsandbytes", "peft", "pandas", "pyarrow")
SLURM = {
    "job": "SLURM_JOB_ID",
    "array_task": "SLURM_ARRAY_TASK_ID",
    "name": "SLURM_JOB_NAME",
    "cluster": "SLURM_CLUSTER_NAME",
    "partition": "SLURM_JOB_PARTITION",
    "account": "SLURM_JOB_ACCOUNT",
    "qos": "SLURM_JOB_QOS",
    "nodes": "SLURM_JOB_NODELIST",
    "restarts": "SLURM_RESTART_COUNT",
}
"""What of SLURM's variables is recorded of a job."""


@functools.cache
def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def gpus() -> tuple[tuple[str, int], ...]:
    """Name and memory in bytes of each GPU that CUDA_VISIBLE_DEVICES leaves, from NVML, without touching CUDA."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no library, no driver: pynvml has a class for each
        return ()
    try:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = (
            [str(i) for i in range(pynvml.nvmlDeviceGetCount())]
            if visible is None
            else [n for n in visible.split(",") if n not in ("", "-1")]
        )
        by_index, by_uuid = pynvml.nvmlDeviceGetHandleByIndex, pynvml.nvmlDeviceGetHandleByUUID
        handles = [by_index(int(name)) if name.isdigit() else by_uuid(name) for name in names]
        return tuple((str(pynvml.nvmlDeviceGetName(h)), int(pynvml.nvmlDeviceGetMemoryInfo(h).total)) for h in handles)
    finally:
        pynvml.nvmlShutdown()


def device_type() -> str:
    """`cuda` where this torch can use a GPU that is here, else `cpu`."""
    if not gpus():
        return "cpu"
    import torch

    return "cuda" if torch.backends.cuda.is_built() else "cpu"


def cpu_model() -> str | None:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or None


def git_commit() -> str | None:
    """Commit of the suite's own checkout, with + where files that git tracks were changed."""
    home = Path(__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(home), *words], capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        top = Path(git("rev-parse", "--show-toplevel"))
        if top != home.parent:
            return None
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def allocation() -> dict[str, str]:
    """The SLURM job that this process runs in; empty outside one."""
    return {name: value for name, variable in SLURM.items() if (value := os.environ.get(variable))}


def environment() -> dict[str, Any]:
    """The environment's columns of a run's row."""
    from harness.cores import allowed_cores

    found = gpus() if device_type() == "cuda" else ()
    return {
        "host": platform.node(),
        "operating_system": platform.platform(),
        "python_version": platform.python_version(),
        "torch_version": version_of("torch") or "",
        "libraries": json.dumps({name: v for name in LIBRARIES if (v := version_of(name))}),
        "cpu_model": cpu_model(),
        "cpu_cores": len(allowed_cores()),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": [name for name, _ in found],
        "gpu_memory_bytes": found[0][1] if found else None,
        "git_commit": git_commit(),
        "allocation": json.dumps(found_job) if (found_job := allocation()) else None,
        "suite_version": version_of("parallelism-bench") or "0",
    }
