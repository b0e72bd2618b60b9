"""How much does autograd keep between forward and backward?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from harness.workloads import Workload


def activation_bytes(workload: Workload, samples: int, sequence_length: int) -> int:
    """Distinct storages that forward and loss save for backward, parameters and buffers aside;
    fp32, counted without memory."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    def give(tensor: Any) -> Any:
        return tensor

    with FakeTensorMode(), torch.autograd.graph.saved_tensors_hooks(keep, give):
        model = workload.build(seed=0, saved_weights=False)
        inputs = workload.sample_inputs(samples, sequence_length)
        labels = (
            torch.zeros(samples, dtype=torch.long)
            if workload.num_labels
            else torch.zeros_like(inputs)
        )
        loss = workload.loss(workload.logits(model, inputs), labels)
        own = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
        total = sum(t.untyped_storage().nbytes() for where, t in kept.items() if where not in own)
        del loss
    return total
