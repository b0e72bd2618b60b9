"""What torch.compile needs on this host."""

from __future__ import annotations

import os
import shutil


def missing_compiler() -> str:
    """Returns what is missing and how to install it; empty if nothing is.

    torch.compile compiles generated C++ (CPU kernels, GPU launchers) with $CXX or g++.
    """
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler):
        return ""
    return (
        f"torch.compile needs a C++ compiler, and there is no {compiler}: install Debian's package"
        " g++, or name another compiler in the environment variable CXX"
    )
