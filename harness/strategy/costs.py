"""Cost formulas of a step, shown next to measurements and used for predictions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from harness.spec.cell import Cell
from harness.spec.training import Layout, States

if TYPE_CHECKING:
    from harness.workloads import Workload
    from harness.workloads.counts import ModelFacts

StrategyT_co = TypeVar("StrategyT_co", covariant=True)


@dataclass(frozen=True)
class CostModel(Generic[StrategyT_co]):
    """Cost formulas of one strategy and its options."""

    strategy: StrategyT_co

    @property
    def backend_library(self) -> str:
        """Name of the strategy whose library does most of the work; empty: its own."""
        return ""

    @property
    def shards_parameters(self) -> bool:
        """Whether parameters are sharded, and gathered when their layer runs."""
        return False

    @property
    def copies_to_flat_buffers(self) -> bool:
        """Whether the library copies all parameters or gradients to and from flat buffers."""
        return self.shards_parameters

    @property
    def zero_stage(self) -> int:
        """ZeRO stage of the data axis (arXiv 1910.02054): 0 shards nothing, 1 optimizer states, 2
        gradients too, 3 parameters too."""
        return 3 if self.shards_parameters else 0

    @property
    def recomputes_whole_blocks(self) -> bool:
        """Whether recomputation runs whole blocks; torch's stops at the last tensor that backward
        needs."""
        return False

    @property
    def uses_shared_memory(self) -> bool:
        """Whether ranks of a node exchange tensors in memory rather than over TCP."""
        return False

    def states(self, cell: Cell, layout: Layout, facts: ModelFacts) -> States | None:
        """Returns bytes the fullest rank keeps between steps, including the library's copies; None:
        no formula."""
        return None

    def activation_bytes(self, cell: Cell, layout: Layout, workload: Workload) -> float | None:
        """Returns peak fp32 bytes of a micro-batch's forward, loss and backward in a rank, without
        states and gradients.

        See harness/workloads/activations.py. None: no formula, for instance if model parts per rank
        are unknown.
        """
        if layout.tensor > 1 or layout.pipeline > 1:
            return None
        return self.counted_activations(cell, layout, workload)

    def counted_activations(
        self, cell: Cell, layout: Layout, workload: Workload, sequence_parallel: bool = False
    ) -> float:
        """Returns activation bytes of a rank's tokens and layers (see
        harness/workloads/activations.py)."""
        from harness.workloads.activations import activation_bytes

        samples = max(1, cell.global_batch // layout.shares // cell.micro_batches)
        tokens = cell.sequence_length // layout.sequence
        split = {"tensor_ranks": layout.tensor, "sequence_parallel": sequence_parallel}
        return float(activation_bytes(workload, samples, tokens, cell.recompute, **split))

    def traffic(self, cell: Cell, layout: Layout, facts: ModelFacts) -> float | None:
        """Returns bytes a rank must send per step for its library's collectives, averaged over
        ranks; None: no formula.

        An all-reduce of S bytes over N ranks is 2(N-1)/N S, a reduce-scatter or all-gather (N-1)/N
        S, as in harness/measure/collectives.py.
        """
        return None

    def messages(self, cell: Cell, layout: Layout, facts: ModelFacts) -> float | None:
        """Returns sequential collectives and transfers per step that a rank waits for, averaged
        over a cycle; None: no formula.

        Those overlapping backward count `BESIDE_BACKWARD` each.
        """
        return None

    def recomputed_flops(self, cell: Cell, workload: Workload) -> float:
        """Returns FLOPs of recomputation per step, over all ranks (see
        harness/workloads/activations.py)."""
        if cell.recompute == "none":
            return 0.0
        from harness.workloads.activations import recomputed_flops

        per_sample = recomputed_flops(
            workload, cell.sequence_length, cell.recompute, self.recomputes_whole_blocks
        )
        return float(cell.global_batch * per_sample)

    def disk_or_host_bytes(self, cell: Cell, layout: Layout, facts: ModelFacts) -> float:
        """Returns approximate bytes per step to and from disk, or through one process in host
        memory, over all ranks."""
        return 0.0
