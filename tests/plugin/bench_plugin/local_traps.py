"""Strategies that differ from one process by design, each with one mistake."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from harness.seam import Cell, Job, Strategy, Tolerance, TrainStep, Workload
from harness.strategies.collectives import Collectives
from harness.strategies.ddp import Ddp
from harness.strategies.diloco import DiLoCo
from harness.strategies.post_local_sgd import PostLocalSgd

RIGHT: dict[str, Strategy] = {
    "post_local_sgd": PostLocalSgd(start_step=2, period=3),
    "collectives": Collectives(average="parameters", period=3),
    "diloco": DiLoCo(period=3),
    "powersgd": Ddp(comm_hook="powersgd"),
}
WRONG: dict[str, Strategy] = {
    "post_local_sgd longer_period": PostLocalSgd(start_step=2, period=4),
    "post_local_sgd later_start": PostLocalSgd(start_step=3, period=3),
    "collectives longer_period": Collectives(average="parameters", period=4),
    "diloco longer_period": DiLoCo(period=4),
    "diloco no_momentum": DiLoCo(period=3, outer_momentum=0.0),
    "diloco other_rate": DiLoCo(period=3, outer_learning_rate=0.701),
    "powersgd uncompressed": Ddp(),
}
"""Mistakes made by configuring the strategy differently."""


class LocalTraps(Strategy):
    """Declares a correct strategy and trains by a version with one mistake."""

    right: Literal["post_local_sgd", "collectives", "diloco", "powersgd"]
    mistake: str = "none"
    from_step: int = 0
    """Number of correct calls before the patched function goes wrong."""

    @property
    def declared(self) -> Strategy:
        return RIGHT[self.right]

    @property
    def cycle(self) -> int:
        return self.declared.cycle

    def tolerance(self, cell: Cell, workload: Workload) -> Tolerance:
        return self.declared.tolerance(cell, workload)

    def reference(self, cell: Cell) -> Cell:
        return self.declared.reference(cell)

    def setup(self, job: Job) -> TrainStep:
        if patch := PATCHES.get(self.mistake):
            patch(self.from_step)
        return WRONG.get(f"{self.right} {self.mistake}", self.declared).setup(job)


def _from_call(owner: Any, name: str, first: int, instead: Callable[..., Any]) -> None:
    """Replaces a function after its first `first` calls."""
    right, calls = getattr(owner, name), 0

    def replaced(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        return (right if calls <= first else instead)(*arguments, **named)

    setattr(owner, name, replaced)


def _no_average(first: int) -> None:
    from torch.distributed.algorithms.model_averaging import averagers

    def count(averager: Any, params: Any) -> None:
        averager.step += 1

    _from_call(averagers.PeriodicModelAverager, "average_parameters", first, count)


def _no_sum(first: int) -> None:
    from harness.strategies import collectives

    _from_call(collectives, "average", first, lambda tensors: None)


def _one_tensor_apart(first: int) -> None:
    from harness.strategies import collectives

    right = collectives.average
    _from_call(collectives, "average", first, lambda tensors: right(tensors[1:]))


def _no_outer_step(first: int) -> None:
    from torchft import local_sgd

    fragment = local_sgd._StreamingDiLoCoFragment
    _from_call(fragment, "prepare_sync", first, lambda self: None)
    _from_call(fragment, "perform_sync", first, lambda self: True)


def _plain_momentum(first: int) -> None:
    import torch

    made = torch.optim.SGD

    def without_nesterov(*arguments: Any, nesterov: bool, **named: Any) -> Any:
        return made(*arguments, **named)

    torch.optim.SGD = without_nesterov  # type: ignore[assignment, misc]


def _state_with(**options: object) -> Callable[[int], None]:
    def patch(first: int) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        made = powerSGD_hook.PowerSGDState

        def other(group: object, **named: Any) -> Any:
            return made(group, **{**named, **options})

        powerSGD_hook.PowerSGDState = other  # type: ignore[assignment, misc]

    return patch


def _hook_astray(alone: bool) -> Callable[[int], None]:
    def patch(first: int) -> None:
        import torch
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        right, calls = powerSGD_hook.powerSGD_hook, 0

        def hook(state, bucket):  # type: ignore[no-untyped-def]
            nonlocal calls
            calls += 1
            if calls <= first:
                return right(state, bucket)
            if not alone:
                state.error_dict.clear()
                return right(state, bucket)
            future: Any = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        powerSGD_hook.powerSGD_hook = hook

    return patch


PATCHES: dict[str, Callable[[int], None]] = {
    "no_average": _no_average,
    "no_sum": _no_sum,
    "one_tensor_apart": _one_tensor_apart,
    "no_outer_step": _no_outer_step,
    "plain_momentum": _plain_momentum,
    "no_feedback": _state_with(use_error_feedback=False),
    "lower_rank": _state_with(matrix_approximation_rank=3),
    "cold_start": _state_with(warm_start=False),
    "no_exchange": _hook_astray(alone=True),
    "feedback_lost": _hook_astray(alone=False),
}
