"""fairscale's FullyShardedDataParallel on a CPU, with faked CUDA streams and pinned memory.

It has the strategy's mathematics, not its speed.
"""

import contextlib
from typing import Any

from harness.seam import Cell, Job, TrainStep, Workload
from harness.strategies.fairscale_fsdp import FairscaleFsdp


class Stream:
    """A device's stream that runs operations in order."""

    def wait_stream(self, other: Any) -> None: ...
    def synchronize(self) -> None: ...


ONLY = Stream()


class Cuda:
    """The part of torch.cuda that FullyShardedDataParallel uses."""

    Stream = staticmethod(lambda: ONLY)
    current_stream = staticmethod(lambda: ONLY)
    is_available = staticmethod(lambda: True)
    synchronize = staticmethod(lambda: None)
    stream = staticmethod(lambda stream: contextlib.nullcontext())


class Torch:
    """torch with `Cuda` in place of torch.cuda."""

    cuda = Cuda

    def __getattr__(self, name: str) -> Any:
        import torch

        return getattr(torch, name)


class FairscaleOnCpu(FairscaleFsdp):
    """fairscale's fully sharded strategy with CUDA faked."""

    def check(self, cell: Cell, workload: Workload) -> None: ...

    def setup(self, job: Job) -> TrainStep:
        import torch
        from fairscale.internal import reduce_scatter_bucketer
        from fairscale.nn.data_parallel import fully_sharded_data_parallel as module

        module.torch = Torch()
        # gloo requires both tensors to have one shape; NCCL only counts elements.
        reduce_scatter_bucketer.enable_nccl_base_collectives = False
        torch.Tensor.record_stream = lambda self, stream: None
        torch.Tensor.pin_memory = lambda self: self
        torch.Tensor.cuda = lambda self, *device, **more: self
        return super().setup(job)
