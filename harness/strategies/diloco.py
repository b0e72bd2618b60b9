"""DiLoCo by torchft."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from pydantic import Field

from harness.spec.errors import Refused
from harness.spec.training import EXACT, Layout, States, Tolerance, TrainStep
from harness.strategies._outer import outer_optimizer, outer_tolerance
from harness.strategy import Capabilities, Cell, CostModel, Job, Strategy
from harness.strategy.formulas import model_states
from harness.strategy.step import standard_step
from harness.workloads import Workload
from harness.workloads.counts import ModelFacts


class DiLoCo(Strategy):
    """DiLoCo (torchft): local training with periodic steps of an outer optimizer.

    arXiv 2311.08105: the outer gradient is a rank's starting point minus its current parameters;
    the outer optimizer is SGD with Nesterov momentum. outer_learning_rate=1 and outer_momentum=0
    average the parameters. Each rank is a replica with a manager and a store; they find each other
    through a lighthouse in rank 0.
    """

    requires: ClassVar[tuple[str, ...]] = ("torchft",)
    # fp16 loss scaling would skip a step, and thus shift the period, on one rank only.
    capabilities = Capabilities(precisions=("fp32", "bf16"))

    period: int = Field(default=4, ge=1)
    """Inner steps between outer steps."""
    outer_learning_rate: float = Field(default=0.7, gt=0)
    """Learning rate of the outer optimizer."""
    outer_momentum: float = Field(default=0.9, ge=0, lt=1)
    """Momentum of the outer optimizer; Nesterov if it is not 0."""

    @property
    def cycle(self) -> int:
        return self.period

    def check(self, cell: Cell, workload: Workload) -> None:
        if self.period > cell.parity_steps:
            compared = f"the {cell.parity_steps} steps that are compared with the reference"
            raise Refused(
                f"period={self.period} is longer than {compared}: no outer step would be verified"
            )

    def tolerance(self, cell: Cell, workload: Workload) -> Tolerance:
        mean = self.outer_learning_rate == 1 and self.outer_momentum == 0
        linear = cell.optimizer == "sgd" and self.period == 1
        if mean and (linear or cell.devices == 1):
            return EXACT
        periods = cell.parity_steps // self.period
        return outer_tolerance(self.outer_learning_rate, self.outer_momentum, periods)

    @property
    def costs(self) -> DiLoCoCosts:
        return DiLoCoCosts(self)

    def setup(self, job: Job) -> TrainStep:
        from torchft.local_sgd import DiLoCo as TorchftDiLoCo

        from harness.strategies._torchft import manager_of

        model = job.model()
        inner = job.optimizer(model.parameters())
        outer = outer_optimizer(model, self.outer_learning_rate, self.outer_momentum)
        manager = manager_of(job)
        diloco = TorchftDiLoCo(manager, [model], inner, outer, sync_every=self.period)
        diloco.__enter__()  # hooks the inner optimizer until the trial ends
        began = diloco._fragments[0].original_parameters
        job.register(
            model,
            inner,
            outer,
            library=lambda: [("library", f"began.{name}", t) for name, t in began.items()],
            waits=[(manager, name, "communication") for name in ("start_quorum", "should_commit")],
        )
        return standard_step(job, model, inner)


class DiLoCoCosts(CostModel[DiLoCo]):
    def states(self, cell: Cell, layout: Layout, facts: ModelFacts) -> States:
        """Returns inner states, the period's starting point (in host memory) and outer momentum.

        The outer step temporarily adds outer gradients and a copy of the parameters.
        """
        inner = model_states(cell, facts)
        momentum = facts.parameter_bytes if self.strategy.outer_momentum else 0
        return dataclasses.replace(
            inner,
            optimizer=inner.optimizer + momentum,
            library=inner.library + facts.parameter_bytes,
            transient=inner.transient + 2 * facts.parameter_bytes,
        )
