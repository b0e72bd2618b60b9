from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from pydantic import Field

from harness.cell.training import Layout, TrainStep
from harness.seam import Cell, Export, Job, ModelFacts
from harness.strategies import _deepspeed_engine as engines
from harness.strategies import _sequence
from harness.strategies._deepspeed_zero import ZeroOptions
from harness.strategies.deepspeed import Deepspeed
from harness.workloads import Workload

if TYPE_CHECKING:
    from types import ModuleType

    from deepspeed import DeepSpeedEngine
    from torch import nn


class UlyssesZero(Deepspeed):
    """DeepSpeed-Ulysses (UlyssesSPAttentionHF) with ZeRO over all ranks.

    Attention exchanges tokens for heads (arXiv 2309.14509).
    """

    capabilities = dataclasses.replace(ZeroOptions.capabilities, precisions=("fp32", "bf16"))

    sequence_ranks: int | None = Field(default=None, ge=1)
    """Number of neighbouring ranks that share each sample's tokens; by default all ranks. Groups
    are data parallel."""

    def layout(self, devices: int) -> Layout:
        return _sequence.sequence_layout(devices, self.sequence_ranks)

    def check(self, cell: Cell, workload: Workload) -> None:
        super().check(cell, workload)
        _sequence.check_config(workload)
        ranks = self.layout(cell.devices).sequence
        _sequence.check_heads(workload, ranks, repeats_keys=True)

    def ddp_equivalent_of(self, cell: Cell) -> str | None:
        return None

    def export(self, cell: Cell, to: str) -> Export | None:
        plain, layout = super().export(cell, to), self.layout(cell.devices)
        if to == "accelerate" or plain is None or layout.sequence == 1:
            return None if to == "accelerate" else plain
        values = {
            "sequence": layout.sequence,
            "samples": cell.global_batch // layout.data // cell.micro_batches,
            "mpu": ", mpu=groups",
            "called": "model_at_positions",
            "trained_loss": "loss / parts" if self.gradient_factor(layout) > 1 else "loss",
        }
        return dataclasses.replace(
            plain, template="ulysses_zero.py.j2", values=plain.values | values
        )

    def groups(self, job: Job, model: nn.Module) -> ModuleType | None:
        if job.layout.sequence == 1:
            return None
        import deepspeed
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

        deepspeed.init_distributed(verbose=False)
        groups: ModuleType = UlyssesSPAttentionHF.register_with_transformers(
            model_name_or_path=model,
            core_attn_implementation="sdpa",
            sequence_parallel_size=job.layout.sequence,
            micro_batch_size=job.cell.global_batch // job.layout.data // job.cell.micro_batches,
            seq_length_is_variable=True,
        )
        return groups

    def train_step(self, job: Job, engine: DeepSpeedEngine) -> TrainStep:
        part = _sequence.SequencePart.of(job)
        model = _sequence.at_positions(engine, part.positions(job))
        step = engines.engine_step(job, engine, model, self.gradient_factor(job.layout))
        return lambda batch: step(part.cut(batch))

    def gradient_factor(self, layout: Layout) -> int:
        """Returns the factor by which DeepSpeed's averaged gradients are too large.

        Stages 0 to 2 divide the sum over all ranks by the data-parallel ranks, stage 3 by all
        ranks.
        """
        return layout.sequence if self.stage < 3 else 1

    def traffic(self, cell: Cell, layout: Layout, facts: ModelFacts) -> float | None:
        of_zero = super().traffic(cell, layout, facts)
        exchanged = _sequence.exchanged_for_heads(cell, layout, gathers_positions=True)
        return None if of_zero is None or exchanged is None else of_zero + exchanged
