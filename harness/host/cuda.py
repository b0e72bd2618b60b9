"""What torch can use on this host: CUDA in forked ranks, and a compiler."""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Sequence

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
    """Returns the packages that the fork server may import: with GPUs, those in
    LEAVE_CUDA_ALONE."""
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
    """Returns which C++ compiler torch.compile lacks, and how to install it; else empty."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler):
        return ""
    return (
        f"torch.compile needs a C++ compiler, but {compiler} is not installed: install the Debian"
        " package g++, or name another compiler in the environment variable CXX"
    )
