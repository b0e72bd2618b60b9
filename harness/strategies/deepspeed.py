"""DeepSpeed ZeRO."""

from __future__ import annotations

from harness.spec.training import EXACT, Layout, States, Tolerance
from harness.strategies import _deepspeed_formulas as formulas
from harness.strategies._deepspeed_engine import HALF
from harness.strategies._deepspeed_export import zero_export
from harness.strategies._deepspeed_training import ZeroTraining
from harness.strategies._deepspeed_zero import ZeroOptionsCosts
from harness.strategy import Cell, Export
from harness.workloads import Workload
from harness.workloads.counts import ModelFacts


class Deepspeed(ZeroTraining):
    """DeepSpeed ZeRO stages 0 to 3: shard nothing, the optimizer, gradients too, parameters too.

    fp16 and bf16 are DeepSpeed's own: half weights, gradients summed and sent in half, and fp32
    masters of the rounded weights. Only stages 1 to 3 scale the fp16 loss. Offloaded states use
    DeepSpeed's CPU Adam, which matches torch's AdamW up to rounding. Stages 1 to 3 keep fp32 master
    partitions even for fp32 parameters. Stage 3 could share them, but compares a device with its
    name, which never matches.
    """

    def tolerance(self, cell: Cell, workload: Workload) -> Tolerance:
        return HALF if cell.precision == "bf16" else EXACT

    def ddp_equivalent_of(self, cell: Cell) -> str | None:
        plain = self.stage == 0 and self.model_fields_set <= {"stage"}
        return "DeepSpeed stage 0" if plain else None

    def export(self, cell: Cell, to: str) -> Export | None:
        return zero_export(self, cell, to)

    @property
    def costs(self) -> DeepspeedCosts:
        return DeepspeedCosts(self)


class DeepspeedCosts(ZeroOptionsCosts):
    def states(self, cell: Cell, layout: Layout, facts: ModelFacts) -> States:
        return formulas.zero_states(self.strategy, cell, layout, facts)

    def traffic(self, cell: Cell, layout: Layout, facts: ModelFacts) -> float | None:
        return formulas.zero_traffic(self.strategy, cell, layout, facts)

    def messages(self, cell: Cell, layout: Layout, facts: ModelFacts) -> float | None:
        return formulas.zero_messages(self.strategy, cell, facts)

    def disk_or_host_bytes(self, cell: Cell, layout: Layout, facts: ModelFacts) -> float:
        return formulas.zero_moves(self.strategy, facts)
