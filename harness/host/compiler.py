"""What torch.compile needs of this host."""

from __future__ import annotations

import os
import shutil


def missing_compiler() -> str:
    """What is missing, and what would install it; empty where the compiler is there.

    torch.compile writes C++ and lets $CXX, or g++, compile it: the kernels of CPUs, and what
    launches those of GPUs.
    """
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler):
        return ""
    return (
        f"torch.compile needs a C++ compiler, and there is no {compiler}: install Debian's package"
        " g++, or name another compiler in the environment variable CXX"
    )
