"""torch's ring attention on CPUs, for which torch has no handlers."""

from __future__ import annotations

from typing import Any

from harness.seam import Cell, Job, TrainStep, Workload
from harness.strategies.context_parallel import ContextParallel


class RingOnCpu(ContextParallel):
    """Ring attention on CPUs, with the two handlers that torch lacks."""

    def check(self, cell: Cell, workload: Workload) -> None: ...

    def setup(self, job: Job) -> TrainStep:
        _serve_cpus()
        return super().setup(job)


def _serve_cpus() -> None:
    import torch
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring

    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    attend_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

    def local(tensor: Any) -> Any:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def sharded(tensors: Any, mesh: Any) -> Any:
        return tuple(DTensor.from_local(t, mesh, [Shard(2)], run_check=False) for t in tensors)

    def forward(operator: Any, args: Any, kwargs: Any) -> Any:
        mesh, tensors = args[0].device_mesh, [local(arg).contiguous() for arg in args[:3]]
        assert args[4]
        output = ring._templated_ring_attention(
            mesh.get_group(), 2, attend, *tensors, is_causal=True, scale=kwargs.get("scale")
        )
        return sharded(output, mesh)

    def backward(operator: Any, args: Any, kwargs: Any) -> Any:
        mesh, tensors = args[1].device_mesh, [local(arg).contiguous() for arg in args[:6]]
        gradients = ring._templated_ring_attention_backward(
            mesh.get_group(),
            2,
            attend_backward,
            tensors[0],
            "grad_out",
            *tensors[1:],
            is_causal=True,
            dropout_p=0.0,
            scale=kwargs.get("scale"),
        )
        return sharded(gradients, mesh)

    ring.custom_ops |= {attend: forward, attend_backward: backward}
