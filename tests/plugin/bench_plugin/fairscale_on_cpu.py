"""fairscale's FullyShardedDataParallel on a CPU, with CUDA's streams and pinned memory pretended:
its mathematics, not its speed."""

import contextlib
from typing import Any

from harness.strategies.fairscale_fsdp import FairscaleFsdp
from harness.strategy import Cell, Job, TrainStep, Workload


class Stream:
    """A stream of a device that does one thing after the other."""

    def wait_stream(self, other: Any) -> None: ...
    def synchronize(self) -> None: ...


ONLY = Stream()


class Cuda:
    """What FullyShardedDataParallel asks of torch.cuda."""

    Stream = staticmethod(lambda: ONLY)
    current_stream = staticmethod(lambda: ONLY)
    is_available = staticmethod(lambda: True)
    synchronize = staticmethod(lambda: None)
    stream = staticmethod(lambda stream: contextlib.nullcontext())


class Torch:
    """torch, with that in the place of torch.cuda."""

    cuda = Cuda

    def __getattr__(self, name: str) -> Any:
        import torch

        return getattr(torch, name)


class FairscaleOnCpu(FairscaleFsdp):
    """The strategy with CUDA pretended."""

    def check(self, cell: Cell, workload: Workload) -> None: ...

    def setup(self, job: Job) -> TrainStep:
        import torch
        from fairscale.internal import reduce_scatter_bucketer
        from fairscale.nn.data_parallel import fully_sharded_data_parallel as module

        module.torch = Torch()
        reduce_scatter_bucketer.enable_nccl_base_collectives = (
            False  # gloo wants both tensors of one shape, NCCL counts elements
        )
        torch.Tensor.record_stream = lambda self, stream: None
        torch.Tensor.pin_memory = lambda self: self
        torch.Tensor.cuda = lambda self, *device, **more: self
        return super().setup(job)
