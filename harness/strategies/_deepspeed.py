"""DeepSpeed's config for a cell, its compiled parts, and what a rank sets up before it uses the
library."""

from __future__ import annotations

import ast
import functools
import importlib.util
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from harness.host.unbuilt import unbuilt
from harness.spec.cell import Cell
from harness.spec.errors import Refused, Unavailable
from harness.spec.training import Layout

if TYPE_CHECKING:
    from harness.workloads import Workload

Place = Literal["none", "cpu", "nvme"]
LARGEST_BUCKET = 25 * 2**20 // 4
"""Elements: DDP's bucket of 25 MiB.

DeepSpeed's own 5e8 are 2 GB, allocated whatever the model's size.
"""
PERSISTENT_ELEMENTS = 1000
"""Norms and biases.

DeepSpeed's own 1e5 leaves a model of hidden size 256 almost whole on every rank.
"""
SWAPPED_BYTES = 2**20
"""DeepSpeed leaves tensors smaller than this in memory, whatever the config says."""
SWAP_ELEMENTS = 2**20
"""Elements of the optimizer that are read, updated and written at a time; DeepSpeed's own 1e9 keep
buffers for all of them in memory."""
ALIGNED_BYTES = 1024
LOSS_SCALE_POWER = 12
"""2^12, as harness.strategy.step.LOSS_SCALE: DeepSpeed's own 2^16 overflows in the first steps,
which are then skipped.
"""


def deepspeed_config(
    cell: Cell,
    layout: Layout,
    stage: int,
    *,
    offload_optimizer: Place = "none",
    offload_parameters: Place = "none",
    folder: Path | str | None = None,
    sizes: Sequence[int] = (),
    bucket_elements: int | None = None,
    persistent_elements: int = PERSISTENT_ELEMENTS,
) -> dict[str, Any]:
    """Content of DeepSpeed's JSON file that trains what the cell says.

    `folder` is where states offloaded to `nvme` lie; `sizes` are the elements of each trained
    parameter (ModelFacts.sizes), by which buckets and swap buffers are made to fit.
    `gradient_clipping` is written although it is 0: left out, DeepSpeed clips the gradient's norm
    at 1.0. All three batch sizes are given, or libraries on top of it compute one from a number of
    processes that they may not see. What DeepSpeed holds live, prefetches and reduces at a time is
    one bucket.
    """
    pinned = cell.device == "cuda"
    bucket = bucket_elements or default_bucket(sizes)
    config: dict[str, Any] = {
        "train_batch_size": cell.global_batch,
        "train_micro_batch_size_per_gpu": cell.global_batch // layout.data // cell.micro_batches,
        "gradient_accumulation_steps": cell.micro_batches,
        "gradient_clipping": 0.0,
        "steps_per_print": 2**31,
        "wall_clock_breakdown": False,
        "timers": {"throughput": {"enabled": False}},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if cell.precision == "bf16":
        config["bf16"] = {"enabled": True}
    if cell.precision == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": LOSS_SCALE_POWER}
    if stage == 0:
        return config
    zero: dict[str, Any] = {
        "stage": stage,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket + bucket % 2,
    }
    if offload_optimizer != "none":
        zero["offload_optimizer"] = {"device": offload_optimizer, "pin_memory": pinned}
    if stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": bucket,
            "stage3_max_live_parameters": bucket,
            "stage3_max_reuse_distance": bucket,
            "stage3_param_persistence_threshold": persistent_elements,
            "sub_group_size": SWAP_ELEMENTS,
        }
    if offload_parameters != "none":
        zero["offload_param"] = {"device": offload_parameters, "pin_memory": pinned}
    if offload_optimizer == "nvme":
        zero["offload_optimizer"]["nvme_path"] = str(folder)
    if offload_parameters == "nvme":
        largest = max((-(-size // layout.data) for size in sizes), default=10**8)
        zero["offload_param"] |= {
            "nvme_path": str(folder),
            "max_in_cpu": 0,
            "buffer_size": largest,
            "buffer_count": 5,
        }
    return config | {"zero_optimization": zero}


def default_bucket(sizes: Sequence[int]) -> int:
    """An eighth of the model, at most DDP's bucket: small beside the states at any size."""
    return min(LARGEST_BUCKET, sum(sizes) // 8) or LARGEST_BUCKET


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
    said: dict[str, Any] = {}
    for node in ast.parse(file.read_text() if file and file.exists() else "").body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            said[node.targets[0].id] = ast.literal_eval(node.value)
    return said


def check_zero(
    cell: Cell,
    workload: Workload,
    stage: int,
    offload_optimizer: Place,
    offload_parameters: Place,
    folder: str,
) -> None:
    """Raises Refused where DeepSpeed would do something else and not say so, Unavailable where it
    cannot do it on this host."""
    if cell.precision == "fp16" and stage == 0:
        raise Refused(
            "without ZeRO, DeepSpeed divides fp16 gradients by a loss scale that it never applied;"
            " use stage 1, 2 or 3, or bf16"
        )
    if cell.precision == "fp16" and cell.device == "cpu" and not fp16_on_cpu():
        raise Unavailable(
            "DeepSpeed has no fp16 on a CPU without arithmetic for it: use one with AVX512-FP16 or"
            " AMX-FP16, a GPU, or bf16"
        )
    if cell.precision != "fp32" and workload.kind == "image":
        raise Refused(
            "DeepSpeed leaves images and BatchNorm's statistics in fp32 beside half weights, which"
            " torch does not mix; use amp"
        )
    if offload_optimizer != "none" and stage == 0:
        raise Refused("stage 0 offloads nothing; use stage 1, 2 or 3")
    if stage < 3 and (offload_parameters != "none" or offload_optimizer == "nvme"):
        raise Refused(
            f"DeepSpeed offloads parameters, and to disks, in stage 3 only; stage {stage} would"
            " keep them in memory"
        )
    if offload_optimizer != "none" and cell.optimizer != "adamw":
        raise Refused(
            "offloaded states are updated by DeepSpeed's own AdamW; use optimizer adamw, not"
            f" {cell.optimizer}"
        )
    on_disk = "nvme" in (offload_optimizer, offload_parameters)
    if on_disk:
        _require_swapped(cell, workload, offload_optimizer, offload_parameters)
    check_prebuilt(*["cpu_adam"] * (offload_optimizer != "none"), *["async_io"] * on_disk)
    if on_disk and in_memory(folder):
        raise Unavailable(
            f"{folder} is in memory (tmpfs), which nothing would leave; give a folder on a disk,"
            " option folder"
        )


def _require_swapped(
    cell: Cell, workload: Workload, offload_optimizer: Place, offload_parameters: Place
) -> None:
    """Raises Refused where every tensor is so small that DeepSpeed would keep it in memory."""
    from harness.workloads.counts import model_facts

    sizes = model_facts(workload, cell.sequence_length).sizes
    width = 4 if cell.precision == "fp32" else 2
    largest = (
        {"optimizer state": 4 * sum(sizes) / cell.devices} if offload_optimizer == "nvme" else {}
    )
    largest |= (
        {"parameter": width * max(sizes) / cell.devices} if offload_parameters == "nvme" else {}
    )
    for what, size in largest.items():
        if size < SWAPPED_BYTES:
            raise Refused(
                f"the largest {what} of {workload.name} has {size / 2**20:.2g} MiB on each of"
                f" {cell.devices} ranks, and DeepSpeed keeps all below 1 MiB in memory; use a"
                " larger model or fewer devices"
            )


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
    from deepspeed.accelerator import get_accelerator, set_accelerator

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    if get_accelerator()._name != device:
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
        from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

        set_accelerator(CPU_Accelerator() if device == "cpu" else CUDA_Accelerator())
    # A part that was built for another accelerator or CUDA is compiled anew, or refused, by these
    # two.
    git_version_info.accelerator_name = device
    cuda = ".".join((torch.version.cuda or "0.0").split(".")[:2])
    git_version_info.torch_info = {**git_version_info.torch_info, "cuda_version": cuda}
    deepspeed.ops.__compatible_ops__ = dict.fromkeys(compiled_parts() - {_SHARED_MEMORY}, True)
    keep_dtype(device)


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
