from __future__ import annotations

import ast
import functools
import importlib.util
import logging
import math
import os
import resource
import tempfile
from pathlib import Path
from typing import Any

from harness.cell.errors import Refused, Unavailable
from harness.host.folders import cache_folder
from harness.host.packages import unbuilt

_SHARED_MEMORY = "deepspeed_shm_comm"
_CAP_IPC_LOCK = 14
"""Number of the capability's bit (linux/capability.h)."""
DISKS = "PARALLELISM_BENCH_DISKS"
"""Environment variable with allowed folders for offloaded states, separated by colons."""


@functools.cache
def prebuilt() -> dict[str, Any]:
    """Reads DeepSpeed's build information (`installed_ops`, ...) without importing it."""
    spec = importlib.util.find_spec("deepspeed")
    file = (
        Path(spec.submodule_search_locations[0]) / "git_version_info_installed.py"
        if spec and spec.submodule_search_locations
        else None
    )
    parts = {}
    for node in ast.parse(file.read_text() if file and file.exists() else "").body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            parts[node.targets[0].id] = ast.literal_eval(node.value)
    return parts


def fp16_on_cpu() -> bool:
    """Returns whether DeepSpeed considers fp16 supported on this CPU."""
    import torch

    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def is_in_memory(folder: str) -> bool:
    """Returns whether a folder, even one not yet made, is on tmpfs or ramfs."""
    mounts = (
        [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
        if Path("/proc/mounts").exists()
        else []
    )
    above = [
        (len(mount), kind) for mount, kind in mounts if Path(folder).resolve().is_relative_to(mount)
    ]
    return max(above, default=(0, ""))[1] in ("tmpfs", "ramfs")


def require_disk(folder: str) -> None:
    """Raises Refused outside the temporary folder, the cache and $PARALLELISM_BENCH_DISKS. A matrix
    may come from somebody else, and must not choose where files are written and removed."""
    allowed = [tempfile.gettempdir(), str(cache_folder()), *os.environ.get(DISKS, "").split(":")]
    path = Path(folder).resolve()
    if folder and not any(
        path.is_relative_to(Path(parent).resolve()) for parent in allowed if parent
    ):
        raise Refused(
            f"states may not be offloaded to folder {folder!r} on this host; to allow it, add it to"
            f" the environment variable {DISKS}"
        )


def lockable_bytes() -> float:
    """Returns how many bytes a process may lock; unlimited with CAP_IPC_LOCK (root)."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    capabilities = next(
        (int(line.split()[1], 16) for line in lines if line.startswith("CapEff:")), 0
    )
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return (
        math.inf if capabilities >> _CAP_IPC_LOCK & 1 or limit == resource.RLIM_INFINITY else limit
    )


def check_prebuilt(*parts: str) -> None:
    """Raises Unavailable if a compiled op is missing, which DeepSpeed would compile for minutes."""
    for part in parts:
        if lacks := missing(part):
            raise Unavailable(lacks)


def missing(part: str) -> str:
    """Returns how to install a compiled op; empty if it is installed."""
    if part in compiled_parts():
        return ""
    if failure := unbuilt("deepspeed"):
        return f"DeepSpeed's part {part} is not compiled: {failure.reason}"
    needs = "; async_io needs Debian's libaio-dev" if part == "async_io" else ""
    return f"DeepSpeed's part {part} is not compiled: `make setup` builds it{needs}"


def compiled_parts() -> set[str]:
    """Returns the names of compiled ops. They run on the host, so CPU builds also serve GPUs."""
    return {name for name, built in prebuilt().get("installed_ops", {}).items() if built}


def settle(device: str, local_processes: int) -> None:
    """Sets up DeepSpeed in a rank, whichever device the fork server imported it for.

    Declares compiled ops compatible, because probing starts compilers. Omits shared-memory
    collectives, which leave 66 MiB per rank in /dev/shm.
    """
    os.environ |= {"DS_ACCELERATOR": device, "LOCAL_SIZE": str(local_processes)}
    import deepspeed
    import torch
    from deepspeed import git_version_info
    from deepspeed.accelerator import get_accelerator

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    if get_accelerator()._name != device:
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
        from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

        _switch_to(CPU_Accelerator() if device == "cpu" else CUDA_Accelerator())
    # Otherwise ops built for another accelerator or CUDA version are recompiled or rejected.
    git_version_info.accelerator_name = device
    cuda = ".".join((torch.version.cuda or "0.0").split(".")[:2])
    git_version_info.torch_info = {**git_version_info.torch_info, "cuda_version": cuda}
    deepspeed.ops.__compatible_ops__ = dict.fromkeys(compiled_parts() - {_SHARED_MEMORY}, True)
    keep_dtype(device)


def _switch_to(accelerator: Any) -> None:
    """Sets the accelerator, also where version 0.19.8 cached it."""
    from deepspeed.accelerator import set_accelerator

    set_accelerator(accelerator)
    from deepspeed.runtime import utils

    utils.torch_memory_reserved = accelerator.memory_reserved
    utils.torch_max_memory_reserved = accelerator.max_memory_reserved
    utils.PartitionedTensor.from_meta.__func__.__defaults__ = (accelerator.device_name(),)


def keep_dtype(device: str) -> None:
    """Keeps fp32 parameters in fp32 when offloaded to disk.

    Python parses DeepSpeed's `dtype or fp16 if fp16 is supported else bf16` as `(dtype or fp16) if
    ... else bf16`. Without fp16, large parameters would return in bf16, which layers reject, so the
    CPU claims fp16 support.
    """
    if device == "cpu":
        from deepspeed.accelerator import get_accelerator

        get_accelerator().is_fp16_supported = lambda: True
