"""Engines shared by strategies that use Accelerate."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from harness.spec.errors import Refused, Unavailable
from harness.strategies._accelerate_config import fsdp2_settings
from harness.strategies.deepspeed import Deepspeed
from harness.strategy import (
    EXACT,
    Cell,
    CostModel,
    Layout,
    ModelFacts,
    States,
    Strategy,
    Tolerance,
    Workload,
)
from harness.strategy.formulas import model_states, whole_model_states
from harness.workloads import make_workload
from harness.workloads.counts import model_facts
from harness.workloads.recompute import checkpoint_arguments

if TYPE_CHECKING:
    from torch import nn

FSDP2_HALF = Tolerance(
    5e-2,
    1.0,
    "Accelerate has FSDP2 compute and reduce gradients in bf16, the residual stream and the"
    " norms too",
)


class AccelerateEngine(Strategy):
    """A strategy that trains through one of Accelerate's engines."""

    requires = ("accelerate",)

    engine: Literal["ddp", "zero2", "zero3", "fsdp2"] = "ddp"
    """Engine that wraps the model: DDP, DeepSpeed's ZeRO stage 2 or 3, or FSDP2."""

    @property
    def zero(self) -> Deepspeed | None:
        """Equivalent strategy without Accelerate, if DeepSpeed is the engine."""
        stages: dict[str, Literal[2, 3]] = {"zero2": 2, "zero3": 3}
        return Deepspeed(stage=stages[self.engine]) if self.engine in stages else None

    def check(self, cell: Cell, workload: Workload) -> None:
        if cell.precision == "fp16" and cell.device == "cpu" and not self.zero:
            raise Unavailable(
                "Accelerate has no fp16 on CPUs and would train in fp32 without a word: it needs a"
                " GPU, or bf16"
            )
        if self.engine == "fsdp2" and workload.kind == "image":
            raise Refused(
                "Accelerate's FSDP2 asks the model for its token embeddings, which image models do"
                " not have; use fsdp2"
            )
        if self.zero:
            if importlib.util.find_spec("deepspeed") is None:
                raise Unavailable(
                    "package deepspeed is not installed: pip install 'parallelism-bench[deepspeed]'"
                )
            self.zero.check(cell, workload)

    def tolerance(self, cell: Cell, workload: Workload) -> Tolerance:
        if self.zero:
            return self.zero.tolerance(cell, workload)
        return FSDP2_HALF if self.engine == "fsdp2" and cell.precision != "fp32" else EXACT

    def stand_in(self, cell: Cell) -> str | None:
        if self.engine != "fsdp2" or cell.device != "cpu":
            return None
        return (
            "Accelerate has FSDP2 on GPUs only: told to be on one, its own preparation then runs"
            " over gloo"
        )

    def fsdp2_settings(self, cell: Cell) -> dict[str, object] | None:
        return fsdp2_settings(make_workload(cell.workload)) if self.engine == "fsdp2" else None

    def deepspeed_config(self, cell: Cell) -> dict[str, object] | None:
        """Returns DeepSpeed's config with all three batch sizes; None for other engines."""
        if not self.zero:
            return None
        sizes = model_facts(make_workload(cell.workload), cell.sequence_length).sizes
        return self.zero.config(cell, self.layout(cell.devices), sizes)

    @property
    def costs(self) -> AccelerateEngineCosts:
        return AccelerateEngineCosts(self)


def recompute_by_transformers(
    model: nn.Module, blocks: Sequence[nn.Module], recompute: str
) -> None:
    """Enables transformers' activation checkpointing."""
    whole: Any = model
    whole.activation_checkpointing_enable(checkpoint_arguments(recompute))


class AccelerateEngineCosts(CostModel[AccelerateEngine]):
    @property
    def backend_library(self) -> str:
        return "deepspeed" if self.strategy.zero else self.strategy.engine

    @property
    def shards_parameters(self) -> bool:
        return self.strategy.engine in ("zero3", "fsdp2")

    @property
    def copies_to_flat_buffers(self) -> bool:
        return self.strategy.zero is not None or super().copies_to_flat_buffers

    @property
    def zero_stage(self) -> int:
        zero = self.strategy.zero
        return zero.stage if zero else super().zero_stage

    def states(self, cell: Cell, layout: Layout, facts: ModelFacts) -> States | None:
        if zero := self.strategy.zero:
            return zero.costs.states(cell, layout, facts)
        if self.strategy.engine == "ddp":
            return whole_model_states(cell, facts)
        return model_states(cell, facts, shards=cell.devices)

    def messages(self, cell: Cell, layout: Layout, facts: ModelFacts) -> float | None:
        zero = self.strategy.zero
        return zero.costs.messages(cell, layout, facts) if zero else None
