"""Checks of `make setup-cuda-check` in an environment with torch's CUDA build, with or without a
GPU."""

from __future__ import annotations

import os
import sys

import torch


def main() -> int:
    assert torch.version.cuda, (
        f"torch {torch.__version__} has no CUDA: the package index serves another build, or a local"
        " source shadows it"
    )
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    print(f"torch {torch.__version__} with CUDA {torch.version.cuda} and NCCL {nccl}")
    print("Horovod: NCCL", horovod())
    print("DeepSpeed with CUDA:", ", ".join(deepspeed()))
    assert not torch.cuda.is_initialized(), "an import initialised CUDA"
    return 0


def horovod() -> int:
    """Loads Horovod's extension with all symbols resolved; returns its NCCL version's code."""
    before = sys.getdlopenflags()
    sys.setdlopenflags(os.RTLD_NOW)
    import horovod.torch as hvd

    from harness.strategies import _horovod

    sys.setdlopenflags(before)
    version = int(hvd.nccl_built())
    assert version, "Horovod was built without NCCL"
    assert _horovod.built(b"NCCLAllreduce")
    assert not _horovod.missing("gloo", "cuda")
    return version


def deepspeed() -> list[str]:
    """Loads DeepSpeed's host parts, built for a CPU, as a rank on a GPU does; raises AssertionError
    if one would be compiled."""
    from harness.strategies import _deepspeed

    _deepspeed.settle("cuda", 1)
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder
    from deepspeed.ops.op_builder.builder import OpBuilder

    def compiles(self: OpBuilder, *_: object) -> None:
        raise AssertionError(f"{self.name} would be compiled again")

    OpBuilder.jit_load = compiles
    assert get_accelerator()._name == "cuda"
    parts = _deepspeed.compiled_parts()
    builders = (CPUAdamBuilder(), AsyncIOBuilder())
    return [builder.load().__name__ for builder in builders if builder.name in parts]


if __name__ == "__main__":
    sys.exit(main())
