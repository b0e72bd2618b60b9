"""DeepSpeed's compiled parts, and what a rank sets up before it uses the library."""

from __future__ import annotations

import ast
import functools
import importlib.util
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

from harness.host.cache import cache_folder
from harness.host.unbuilt import unbuilt
from harness.spec.errors import Refused, Unavailable

_SHARED_MEMORY = "deepspeed_shm_comm"


@functools.cache
def prebuilt() -> dict[str, Any]:
    """What DeepSpeed's installation says of its compiled parts, without importing it:
    `installed_ops`, `accelerator_name`, ..."""
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
    """Whether this CPU computes in fp16, as DeepSpeed asks before it accepts it."""
    import torch

    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def in_memory(folder: str) -> bool:
    """Whether a folder, or the nearest one above it that exists, is on a file system that keeps
    files in memory."""
    mounts = (
        [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
        if Path("/proc/mounts").exists()
        else []
    )
    above = [
        (len(place), kind) for place, kind in mounts if Path(folder).resolve().is_relative_to(place)
    ]
    return max(above, default=(0, ""))[1] in ("tmpfs", "ramfs")


DISKS = "PARALLELISM_BENCH_DISKS"
"""Environment variable with folders to which states may be offloaded, separated by colons."""


def require_disk(folder: str) -> None:
    """Raises Refused for a folder that is not below the one for temporary files, the suite's cache,
    or those of $PARALLELISM_BENCH_DISKS: a matrix, which may be somebody else's, does not choose
    where on this host files are written and removed."""
    allowed = [tempfile.gettempdir(), str(cache_folder()), *os.environ.get(DISKS, "").split(":")]
    path = Path(folder).resolve()
    if folder and not any(path.is_relative_to(Path(own).resolve()) for own in allowed if own):
        raise Refused(
            f"folder {folder!r} is not one to which states may be offloaded on this host; name it"
            f" in the environment variable {DISKS}"
        )


def check_prebuilt(*parts: str) -> None:
    """Raises Unavailable where a compiled part is missing: DeepSpeed would compile it in the middle
    of a trial, for minutes."""
    for part in parts:
        if lacks := missing(part):
            raise Unavailable(lacks)


def missing(part: str) -> str:
    """What to do for a compiled part that is missing; empty where it is there."""
    if part in compiled_parts():
        return ""
    if failure := unbuilt("deepspeed"):
        return f"DeepSpeed's part {part} is not compiled: {failure.reason}"
    needs = "; async_io needs Debian's libaio-dev" if part == "async_io" else ""
    return f"DeepSpeed's part {part} is not compiled: `make setup` builds it{needs}"


def compiled_parts() -> set[str]:
    """Names of the compiled parts.

    They run on the host, so that those built for CPUs serve beside GPUs too.
    """
    return {name for name, built in prebuilt().get("installed_ops", {}).items() if built}


def settle(device: str, local_processes: int) -> None:
    """Prepares the library in a rank, whichever device it saw where the fork server imported it.

    It reads two variables that its own launcher would have set. It takes for usable what is
    compiled already: looking for what could be compiled starts compilers. The shared-memory
    collectives of its CPU accelerator, which serve inference, are left out: they leave 66 MiB a
    rank in /dev/shm for good.
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
    # A part that was built for another accelerator or CUDA is compiled anew, or refused, by these
    # two.
    git_version_info.accelerator_name = device
    cuda = ".".join((torch.version.cuda or "0.0").split(".")[:2])
    git_version_info.torch_info = {**git_version_info.torch_info, "cuda_version": cuda}
    deepspeed.ops.__compatible_ops__ = dict.fromkeys(compiled_parts() - {_SHARED_MEMORY}, True)
    keep_dtype(device)


def _switch_to(accelerator: Any) -> None:
    """Sets DeepSpeed's accelerator, also in the three places of version 0.19.8 that keep what the
    former one said when they were imported."""
    from deepspeed.accelerator import set_accelerator

    set_accelerator(accelerator)
    from deepspeed.runtime import utils

    utils.torch_memory_reserved = accelerator.memory_reserved
    utils.torch_max_memory_reserved = accelerator.max_memory_reserved
    utils.PartitionedTensor.from_meta.__func__.__defaults__ = (accelerator.device_name(),)


def keep_dtype(device: str) -> None:
    """Keeps fp32 parameters fp32 on their way to a disk, as DeepSpeed means to.

    Asked for a dtype, it takes `dtype or fp16 if fp16 is supported else bf16`, which Python reads
    as `(dtype or fp16) if ... else bf16`: on a CPU without fp16 those below 2 MiB would stay in
    memory, and others come back in bf16, which no layer takes. So the CPU is said to have it;
    `check_zero` sees to fp16.
    """
    if device == "cpu":
        from deepspeed.accelerator import get_accelerator

        get_accelerator().is_fp16_supported = lambda: True
