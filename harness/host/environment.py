"""What a measurement was taken on: versions, hardware, commit.

An allow-list, never the whole environment.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

LIBRARIES = (
    "numpy",
    "transformers",
    "safetensors",
    "triton",
    "bitsandbytes",
    "peft",
    "datasets",
    "pandas",
    "pyarrow",
    "psutil",
    "nvidia-ml-py",
)
"""Whose versions are recorded, beside those of the packages that strategies require."""
_DRIVERS = {11: 450, 12: 525, 13: 580}
"""First driver for Linux that runs each major version of CUDA (CUDA Toolkit Release Notes)."""
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


def gpus() -> tuple[tuple[str, int], ...]:
    """Name and memory in bytes of each GPU that CUDA_VISIBLE_DEVICES leaves, without touching
    CUDA."""
    from harness.host.gpu import visible_gpus

    return tuple((device.name, device.memory_bytes) for device in visible_gpus())


def device_type() -> str:
    """`cuda` where this torch can use the GPUs that are here, else `cpu`."""
    return "cuda" if gpus() and unused_gpus() is None else "cpu"


def unused_gpus() -> str | None:
    """Why GPUs that are here cannot be used, in a sentence; None where they can, or there are
    none."""
    from harness.host.gpu import driver, visible_gpus

    if not (devices := visible_gpus()):
        return None
    import torch

    torch_words, needed = f"torch {torch.__version__}", torch.version.cuda
    if not torch.backends.cuda.is_built() or needed is None:
        return (
            f"{torch_words} is built without CUDA; install a build for CUDA to use"
            f" {devices[0].name}"
        )
    major, installed = int(needed.split(".")[0]), driver()
    if installed.cuda and installed.cuda[0] < major:
        least = f"driver {_DRIVERS[major]} or newer" if major in _DRIVERS else "a newer driver"
        newest = ".".join(map(str, installed.cuda))
        return (
            f"driver {installed.version} runs CUDA up to {newest}, {torch_words} needs CUDA"
            f" {needed}; install {least}, or a torch that is built for CUDA {installed.cuda[0]}"
        )
    for device in devices:
        if device.capability and not _has_code_for(device.capability, torch.cuda.get_arch_list()):
            version = ".".join(map(str, device.capability))
            return (
                f"{torch_words} has no code for compute capability {version} of GPU {device.index}"
                f" ({device.name}); install a torch that has, or hide this GPU by"
                " CUDA_VISIBLE_DEVICES"
            )
    return None


def _has_code_for(capability: tuple[int, int], built: Sequence[str]) -> bool:
    """Whether a build runs there: machine code of the same major version and no newer minor one, or
    PTX of any older."""
    own = 10 * capability[0] + capability[1]
    for name in built:
        kind, _, number = name.partition("_")
        code = int("".join(c for c in number if c.isdigit()) or 0)
        exact = number.endswith("a")  # of one architecture, without any promise for later ones
        if kind == "sm" and code // 10 == own // 10 and (code == own if exact else code <= own):
            return True
        if kind == "compute" and not exact and code <= own:
            return True
    return not built


def cpu_model() -> str | None:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or None


def git_commit() -> str | None:
    """Commit of the suite's own checkout, with + where files that git tracks were changed."""
    checkout = Path(__file__).parents[2]

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(checkout), *words],
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        ).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) != checkout:
            return None  # installed into an environment that lies in another checkout
        return git("rev-parse", "HEAD") + (
            "+" if git("status", "--porcelain", "--untracked-files=no") else ""
        )
    except (OSError, subprocess.SubprocessError):
        return None


def allocation() -> dict[str, str]:
    """The SLURM job that this process runs in; empty outside one."""
    return {name: value for name, variable in SLURM.items() if (value := os.environ.get(variable))}


def numa_nodes(sys: Path = Path("/sys")) -> list[str]:
    """CPUs of each NUMA node, as the kernel writes them: ["0-15", "16-31"]."""
    lists = (sys / "devices/system/node").glob("node[0-9]*/cpulist")
    return [
        file.read_text().strip()
        for file in sorted(lists, key=lambda file: int(file.parent.name[4:]))
    ]


def _gpu_columns() -> dict[str, Any]:
    """What a run's row says of the GPUs that are here, used or not."""
    from harness.host.gpu import driver
    from harness.host.gpu_facts import gpu_facts, gpu_topology

    if not gpus():
        return {}
    import torch

    installed = driver()
    built = torch.backends.cuda.is_built()
    return {
        "gpu_facts": json.dumps([dataclasses.asdict(one) for one in gpu_facts()]),
        "gpu_topology": json.dumps(gpu_topology()),
        "gpus_unused": unused_gpus(),
        "driver_version": installed.version,
        "driver_cuda_version": ".".join(map(str, installed.cuda)) if installed.cuda else None,
        "torch_cuda_version": torch.version.cuda,
        "nccl_version": ".".join(map(str, torch.cuda.nccl.version())) if built else None,
        "cudnn_version": cudnn_version() if built else None,
    }


def cudnn_version() -> str | None:
    """cuDNN that torch loads, as 9.12.0; asking for it does not initialise CUDA."""
    import torch

    number = torch.backends.cudnn.version()
    if number is None:
        return None
    major, rest = divmod(
        number, 10000 if number >= 90000 else 1000
    )  # cudnnGetVersion, cudnn_version.h
    return f"{major}.{rest // 100}.{rest % 100}"


def environment(more_libraries: Sequence[str] = ()) -> dict[str, Any]:
    """The environment's columns of a run's row.

    `more_libraries`: packages whose version is recorded beside LIBRARIES, where they are installed.
    """
    libraries = (*LIBRARIES, *more_libraries)
    from harness.host.cores import allowed_cores

    used = gpus() if device_type() == "cuda" else ()
    return {
        "host": platform.node(),
        "operating_system": platform.platform(),
        "python_version": platform.python_version(),
        "torch_version": version_of("torch") or "",
        "libraries": json.dumps({name: v for name in libraries if (v := version_of(name))}),
        "cpu_model": cpu_model(),
        "cpu_cores": len(allowed_cores()),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": [name for name, _ in used],
        "gpu_memory_bytes": used[0][1] if used else None,
        **_gpu_columns(),
        "numa": json.dumps(numa_nodes()),
        "git_commit": git_commit(),
        "allocation": json.dumps(found_job) if (found_job := allocation()) else None,
        "suite_version": version_of("parallelism-bench") or "0",
    }
