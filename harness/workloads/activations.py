"""How many bytes does autograd keep between forward and backward?"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from harness.workloads import Workload


def activation_bytes(workload: Workload, samples: int, sequence_length: int) -> int:
    """Bytes of the distinct storages that forward and loss save for backward, without those of
    parameters and buffers.

    `samples` and `sequence_length` are those of one pass, in fp32. The tensors have no memory
    (FakeTensorMode), so that models of any size can be counted.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    saved: dict[int, Tensor] = {}

    def save(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with FakeTensorMode(), torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        model = workload.build(seed=0, saved_weights=False)
        inputs = workload.sample_inputs(samples, sequence_length)
        labels = (
            torch.zeros(samples, dtype=torch.long)
            if workload.num_labels
            else torch.zeros_like(inputs)
        )
        loss = workload.loss(workload.logits(model, inputs), labels)
        own = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
        total = sum(t.untyped_storage().nbytes() for key, t in saved.items() if key not in own)
        del loss  # which keeps the graph, and with it the storages, alive until here
    return total
