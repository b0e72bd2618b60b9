"""Which packages the fork server may import for all ranks.

A rank that is forked from a process that has initialised CUDA cannot use CUDA itself.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

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
"""Packages whose import does not initialise CUDA where a GPU is visible;
tests/gpu/test_fork_server.py imports each of them.

Others do: bitsandbytes asks for the GPU's compute capability, and peft and transformers.trainer
import bitsandbytes.
"""


def to_preload(names: Sequence[str], with_gpus: bool) -> list[str]:
    """Those of these packages that the fork server may import; a rank imports the others itself.

    With GPUs only packages that are known to leave CUDA alone are imported before the fork: a
    plug-in may require any package.
    """
    return [name for name in names if not with_gpus or name in LEAVE_CUDA_ALONE]


def architectures() -> list[str]:
    """Returns what this torch has GPU code for, such as `sm_90`; empty in a build without CUDA.

    torch.cuda.get_arch_list() initialises CUDA before torch 2.12, and returns nothing without a
    visible GPU.
    """
    import torch

    flags = getattr(torch._C, "_cuda_getArchFlags", lambda: None)()
    return flags.split() if flags else []


def cuda_is_initialized() -> bool:
    """Whether this process has initialised CUDA, by torch or by any other library that calls the
    driver.

    The driver's `cuDeviceGetCount` only returns an error before `cuInit` was called. A driver that
    is not loaded has not been initialised; RTLD_NOLOAD keeps this check from loading it.
    """
    import torch

    if torch.cuda.is_initialized():
        return True
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return False
    return int(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))) == 0
