"""State of a rank between steps."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from harness.measure.states import retained, state_bytes
from harness.strategy.job import TrainState
from harness.worker.answer import RankStates
from harness.workloads import Workload


def states_of(train_state: TrainState, workload: Workload, device_type: str) -> RankStates:
    import torch
    from torch.distributed.tensor import DTensor

    def names(tensors: Iterable[object]) -> tuple[str, ...]:
        dtypes = {str(t.dtype) for t in tensors if isinstance(t, torch.Tensor)}
        return tuple(sorted(dtype.removeprefix("torch.") for dtype in dtypes))

    parameters = list(train_state.model.parameters())
    state = [
        v
        for o in train_state.optimizers
        for s in o.state.values()
        if isinstance(s, dict)
        for k, v in s.items()
        if k != "step"
    ]
    gradients = [p.grad for p in parameters if p.grad is not None]
    kinds, buffers = state_bytes(
        itertools.chain(retained(train_state), workload.retained(train_state.model)), device_type
    )
    return RankStates(
        parameter_dtypes=names(parameters),
        # Gradients are gone after zero_grad; autograd accumulates them in their parameter's dtype.
        gradient_dtypes=names(gradients) or names(p for p in parameters if p.requires_grad),
        optimizer_state_dtypes=names(state),
        held_parameters=sum(
            (p.to_local() if isinstance(p, DTensor) else p).numel() for p in parameters
        ),
        state_bytes=kinds,
        library_buffers=buffers,
    )
