"""A run's environment: versions, hardware, commit."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
"""Recorded packages, in addition to strategies' requirements."""
_DRIVERS = {11: 450, 12: 525, 13: 580}
"""Oldest Linux driver by major CUDA version (CUDA Toolkit Release Notes)."""
_OLDER_CUDA = "PARALLELISM_BENCH_TORCH_CUDA=12 make setup"
"""Command that installs a torch for older drivers and GPUs."""
_VOLTA = 7
"""Major compute capability of the oldest GPUs of torch 2.10 for CUDA 12."""
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
"""Recorded environment variables of SLURM jobs, by column."""


@functools.cache
def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def gpus() -> tuple[tuple[str, int], ...]:
    """Returns each visible GPU's name and bytes of memory, without initialising CUDA."""
    from harness.host.gpu_inventory import visible_gpus

    return tuple((device.name, device.memory_bytes) for device in visible_gpus())


def device_type() -> str:
    """Returns `cuda` if this torch can use the GPUs, else `cpu`."""
    return "cuda" if gpus() and unused_gpus() is None else "cpu"


def unused_gpus() -> str | None:
    """Returns why this host's GPUs are unused, with a remedy; None if they are used."""
    from harness.host.amd import rocm_version
    from harness.host.gpu_inventory import driver, visible_gpus

    if not (devices := visible_gpus()):
        return _not_found()
    if rocm_version():
        return _without_code()
    import torch

    build, needed = f"torch {torch.__version__}", torch.version.cuda
    if not torch.backends.cuda.is_built() or needed is None:
        return f"{build} is built without CUDA; install a CUDA build to use {devices[0].name}"
    major, (installed, cuda) = int(needed.split(".")[0]), driver()
    if cuda and cuda[0] < major:
        least = f"driver {_DRIVERS[major]} or newer" if major in _DRIVERS else "a newer driver"
        newest = ".".join(map(str, cuda))
        instead = f", or run `{_OLDER_CUDA}`" if cuda[0] == 12 else ""
        return (
            f"driver {installed} supports CUDA up to {newest}, {build} needs CUDA"
            f" {needed}; install {least}{instead}"
        )
    for device in devices:
        if device.capability and not _has_code_for(device.capability, architectures()):
            version = ".".join(map(str, device.capability))
            instead = "install a torch that has"
            if device.capability[0] == _VOLTA and major > 12:
                instead = f"run `{_OLDER_CUDA}`"
            return (
                f"{build} has no code for compute capability {version} of GPU {device.index}"
                f" ({device.name}); {instead}, or hide this GPU with CUDA_VISIBLE_DEVICES"
            )
    return None


def _not_found() -> str | None:
    """Returns why the host's GPUs are not visible; None if it has none."""
    from harness.cell.cell import OTHER_DEVICES
    from harness.host.amd import amd_gpus, rocm_version, torch_build
    from harness.host.nvml import why_nvml_fails

    if amd := amd_gpus():
        found = ", ".join(f"{number} x {name}" for name, number in amd.items())
        if rocm_version():
            return (
                f"this host has AMD GPUs ({found}), but torch for ROCm shows none; let this user"
                " open /dev/kfd and /dev/dri (groups render and video), and check"
                " HIP_VISIBLE_DEVICES"
            )
        return (
            f"torch {version_of('torch')} is built without ROCm; install a ROCm build to use this"
            f" host's AMD GPUs ({found})"
        )
    if error := why_nvml_fails():
        return (
            f"the NVIDIA driver does not answer ({error}); check it with nvidia-smi, and restart"
            " the host after a driver update"
        )
    kind = "mps" if sys.platform == "darwin" else "xpu" if torch_build("xpu") else None
    return kind and f"torch is built for devices `{kind}`; {OTHER_DEVICES[kind]}"


def _without_code() -> str | None:
    from harness.host.gpu_inventory import rocm_gpus

    built = [name.partition(":")[0] for name in architectures()]
    needed = [gpu.architecture for gpu in rocm_gpus() if gpu.architecture]
    lacking = [name for name in needed if built and name not in built]
    if not lacking:
        return None
    return (
        f"torch {version_of('torch')} has code for {', '.join(built)}, but not for {lacking[0]};"
        " install a torch that has, or hide this GPU with HIP_VISIBLE_DEVICES"
    )


def _has_code_for(capability: tuple[int, int], built: Sequence[str]) -> bool:
    """Returns whether torch runs on a GPU of this compute capability.

    Machine code (sm_*) runs on equal or later minor versions of its major version, PTX (compute_*)
    on all equal or later versions (CUDA C++ Programming Guide, compute capability). `built`: the
    architectures; empty if unknown, which means True.
    """
    version = 10 * capability[0] + capability[1]
    for name in built:
        kind, _, number = name.partition("_")
        code = int("".join(c for c in number if c.isdigit()) or 0)
        exact = number.endswith("a")  # architecture-specific code runs on no other version
        if (
            kind == "sm"
            and code // 10 == version // 10
            and (code == version if exact else code <= version)
        ):
            return True
        if kind == "compute" and not exact and code <= version:
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
    """Returns the suite's commit, with `+` after changes; None outside its checkout."""
    checkout = Path(__file__).parents[2]

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(checkout), *arguments],
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        ).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) != checkout:
            return None  # installed into an environment inside another checkout
        return git("rev-parse", "HEAD") + (
            "+" if git("status", "--porcelain", "--untracked-files=no") else ""
        )
    except (OSError, subprocess.SubprocessError):
        return None


def allocation() -> dict[str, str]:
    return {name: value for name, variable in SLURM.items() if (value := os.environ.get(variable))}


def numa_nodes(sys: Path = Path("/sys")) -> list[str]:
    """Returns the CPUs of each NUMA node in the kernel's notation: ["0-15", "16-31"]."""
    lists = (sys / "devices/system/node").glob("node[0-9]*/cpulist")
    return [
        file.read_text().strip()
        for file in sorted(lists, key=lambda file: int(file.parent.name[4:]))
    ]


def _gpu_columns() -> dict[str, object]:
    from harness.host.amd import rocm_version
    from harness.host.gpu_inventory import driver, gpu_facts, gpu_topology

    if not gpus():
        return {"gpus_unused": unused_gpus()}
    import torch

    (installed, cuda), rocm = driver(), rocm_version()
    built = torch.backends.cuda.is_built()
    return {
        "gpu_facts": json.dumps([dataclasses.asdict(facts) for facts in gpu_facts()]),
        "gpu_topology": json.dumps(gpu_topology()),
        "gpus_unused": unused_gpus(),
        "driver_version": installed,
        "driver_cuda_version": ".".join(map(str, cuda)) if cuda else None,
        "torch_cuda_version": f"HIP {rocm}" if rocm else torch.version.cuda,
        "nccl_version": ".".join(map(str, torch.cuda.nccl.version())) if built else None,
        "cudnn_version": cudnn_version() if built and not rocm else None,
    }


def cudnn_version() -> str | None:
    """Returns the version of torch's cuDNN, such as `9.12.0`, without initialising CUDA.

    The number is major x 10000 (before version 9: x 1000) + minor x 100 + patch (cudnn_version.h).
    """
    import torch

    number = torch.backends.cudnn.version()
    if number is None:
        return None
    major, rest = divmod(number, 10000 if number >= 90000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


def environment(more_libraries: Sequence[str] = ()) -> dict[str, Any]:
    """Returns environment columns; `more_libraries`: recorded if installed."""
    from harness.host.cores import allowed_cores, memory_bytes

    libraries = (*LIBRARIES, *more_libraries)
    job, nodes = allocation(), numa_nodes()
    used = gpus() if device_type() == "cuda" else ()
    return {
        "host": platform.node(),
        "operating_system": platform.platform(),
        "python_version": platform.python_version(),
        "torch_version": version_of("torch") or "",
        "libraries": json.dumps({name: v for name in libraries if (v := version_of(name))}),
        "cpu_model": cpu_model(),
        "cpu_cores": len(allowed_cores()),
        "memory_bytes": memory_bytes(),
        "gpus": [name for name, _ in used],
        "gpu_memory_bytes": used[0][1] if used else None,
        **_gpu_columns(),
        "numa": json.dumps(nodes) if nodes else None,
        "git_commit": git_commit(),
        "allocation": json.dumps(job) if job else None,
        "suite_version": version_of("parallelism-bench") or "0",
    }


HIDE_GPUS = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "-1"}
"""Environment variables that hide all GPUs. ROCm prefers the second, and ignores empty values."""
LEAVE_CUDA_ALONE = frozenset(
    {
        "accelerate",
        "deepspeed",
        "fairscale",
        "fairscale.nn.data_parallel",
        "horovod",
        "horovod.torch",
    },
)
"""Packages whose import leaves CUDA alone, as tests/gpu/test_fork_server.py checks.

Not bitsandbytes, which queries the compute capability, nor peft and transformers.trainer, which
import it.
"""


def to_preload(names: Sequence[str], with_gpus: bool) -> list[str]:
    """Returns the packages that the fork server may import; ranks import the rest. With GPUs, these
    are only the packages in LEAVE_CUDA_ALONE, since plug-ins may require any package."""
    return [name for name in names if not with_gpus or name in LEAVE_CUDA_ALONE]


def architectures() -> list[str]:
    """Returns the architectures that this torch has GPU code for, such as `sm_90`.

    torch.cuda.get_arch_list() initialises CUDA before torch 2.12, and is empty without a GPU.
    """
    import torch

    flags = getattr(torch._C, "_cuda_getArchFlags", lambda: None)()
    return flags.split() if flags else []


def cuda_is_initialized() -> bool:
    """Returns whether any library has initialised CUDA in this process.

    The driver's `cuDeviceGetCount` fails only before `cuInit`. RTLD_NOLOAD avoids loading the
    driver.
    """
    import torch

    if torch.cuda.is_initialized():
        return True
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return False
    return int(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))) == 0


def missing_compiler() -> str:
    """Returns which C++ compiler torch.compile lacks, and how to install it; empty if it is there.
    torch.compile compiles C++ for CPU kernels and for what launches GPU kernels."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler):
        return ""
    return (
        f"torch.compile needs a C++ compiler, but {compiler} is not installed: install the Debian"
        " package g++, or name another compiler in the environment variable CXX"
    )
