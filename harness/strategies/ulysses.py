from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from harness.cell.training import Layout, States, TrainStep
from harness.seam import Cell, Export, Job, ModelFacts, Strategy
from harness.seam.formulas import all_reduced, model_states
from harness.strategies import _sequence
from harness.strategies._accelerate_config import deepspeed_variables
from harness.strategies._deepspeed import settle
from harness.workloads import Workload

if TYPE_CHECKING:
    from torch import Tensor, nn


class Ulysses(Strategy):
    """DeepSpeed-Ulysses by hand (DistributedAttention): attention exchanges tokens for heads.

    Outside attention, a rank computes its part of the tokens (arXiv 2309.14509). Every rank keeps
    the whole model and averages gradients.
    """

    requires = ("deepspeed",)

    sequence_ranks: int | None = Field(default=None, ge=1)
    """Number of neighbouring ranks that share each sample's tokens; by default all ranks. Groups
    are data parallel."""

    def layout(self, devices: int) -> Layout:
        return _sequence.sequence_layout(devices, self.sequence_ranks)

    def check(self, cell: Cell, workload: Workload) -> None:
        _sequence.check_heads(workload, self.layout(cell.devices).sequence)

    def export(self, cell: Cell, to: str) -> Export | None:
        """Returns a script, except in fp16, whose gradients stay scaled until after averaging."""
        if to not in ("torchrun", "slurm") or cell.precision == "fp16":
            return None
        parts = self.layout(cell.devices).sequence
        return Export("ulysses.py.j2", {"sequence": parts}, variables=deepspeed_variables(cell))

    def setup(self, job: Job) -> TrainStep:
        settle(job.device.type, job.local_processes)
        import deepspeed
        from deepspeed.sequence.layer import DistributedAttention

        deepspeed.init_distributed(verbose=False)
        model, whole = job.model(), _sequence.whole_attention()

        def local(
            query: Tensor, key: Tensor, value: Tensor, module: nn.Module, options: dict[str, Any]
        ) -> Tensor:
            """Applies attention to all tokens and some of the heads. Takes query, key and value of
            shape (samples, tokens, heads, head width)."""
            heads_first = (tensor.transpose(1, 2) for tensor in (query, key, value))
            return whole(module, *heads_first, None, **options)[0]

        exchange = DistributedAttention(local, _sequence.sequence_group(job), 2, 1)

        def attention(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, **options: Any
        ) -> tuple[Tensor, None]:
            tokens_first = (tensor.transpose(1, 2) for tensor in (query, key, value))
            return exchange(*tokens_first, 0, None, module, options), None

        if job.layout.sequence > 1:
            _sequence.attend_by(model, "distributed_attention", attention)
        part = _sequence.SequencePart.of(job)
        step = _sequence.averaging_step(job, model, part.positions(job))
        return lambda batch: step(part.cut(batch))

    def states(self, cell: Cell, layout: Layout, facts: ModelFacts) -> States:
        return model_states(cell, facts)

    def traffic(self, cell: Cell, layout: Layout, facts: ModelFacts) -> float | None:
        exchanged = _sequence.exchanged_for_heads(cell, layout)
        return (
            None
            if exchanged is None
            else exchanged + all_reduced(layout.replicas, facts.trained_bytes)
        )
