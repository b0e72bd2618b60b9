"""DiLoCo by torchft: ranks train alone; an outer optimizer steps along the mean of their ways."""

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
    """DiLoCo (torchft): ranks train alone for a period, then an outer optimizer steps along the
    mean of their ways.

    arXiv 2311.08105: the outer gradient is where a rank began the period minus where it is now; the
    outer optimizer is SGD with Nesterov's momentum, and ranks go on from where it gets to. With
    outer_learning_rate=1 and outer_momentum=0 that is the mean of the parameters. Each rank is a
    replica with a manager and a store; a lighthouse in rank 0 is where they find each other.
    """

    requires: ClassVar[tuple[str, ...]] = ("torchft",)
    # fp16's loss scaling would skip a step on one rank only, and that rank's period.
    capabilities = Capabilities(precisions=("fp32", "bf16"))

    period: int = Field(default=4, ge=1)
    """Steps between two outer ones."""
    outer_learning_rate: float = Field(default=0.7, gt=0)
    """Of the outer optimizer."""
    outer_momentum: float = Field(default=0.9, ge=0, lt=1)
    """Of the outer optimizer; Nesterov's where it is not 0."""

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
        diloco.__enter__()  # its hooks on the inner optimizer stay to the end of the trial
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
        """Beside those of the inner optimizer: where the period began, in host memory, and the
        outer momentum. At the outer step there are the inner gradients, the outer ones and a copy
        of the parameters."""
        inner = model_states(cell, facts)
        momentum = facts.parameter_bytes if self.strategy.outer_momentum else 0
        return dataclasses.replace(
            inner,
            optimizer=inner.optimizer + momentum,
            library=inner.library + facts.parameter_bytes,
            transient=inner.transient + 2 * facts.parameter_bytes,
        )
