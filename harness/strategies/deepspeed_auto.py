from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from harness.cell.errors import Refused
from harness.cell.training import Layout, States
from harness.seam import Cell, Export, Job, ModelFacts
from harness.seam.formulas import facts_of_part
from harness.strategies._deepspeed_engine import full_parameters
from harness.strategies._deepspeed_zero import ZeroOptions
from harness.strategies._distributed import plans_of
from harness.strategies.deepspeed import Deepspeed
from harness.workloads import Workload, make_workload

if TYPE_CHECKING:
    from pathlib import Path

    from deepspeed import DeepSpeedEngine
    from torch import Tensor, nn
    from torch.optim import Optimizer


class DeepspeedAuto(Deepspeed):
    """DeepSpeed's AutoTP or AutoEP: weights or experts divided among ranks, with ZeRO 0 to 2.

    DeepSpeed checks only the first batch of ranks that split a weight; later ones must be the same
    too. AutoEP replaces experts, which ZeRO wants in groups of their own, so the optimizer is made
    after that. Version 0.19.8 clips by the mean of the ranks' norms, although their experts differ,
    so such cells with `clip_norm` are `diverged`.
    """

    capabilities = dataclasses.replace(ZeroOptions.capabilities, precisions=("fp32",))

    stage: Literal[0, 1, 2] = 0
    """ZeRO stage among ranks that hold the same part of the model."""
    split: Literal["weights", "experts"] = "weights"
    """Split weights by transformers' plan (AutoTP), or divide each layer's experts (AutoEP)."""
    ranks: int = Field(default=2, ge=2)
    """Neighbouring ranks that hold a whole model together (`autotp_size`, `autoep_size`)."""

    @property
    def tensor(self) -> int:
        return self.ranks if self.split == "weights" else 1

    @property
    def expert(self) -> int:
        return self.ranks if self.split == "experts" else 1

    def layout(self, devices: int) -> Layout:
        if devices % self.tensor:
            raise Refused(f"{devices} devices are not divisible by ranks {self.tensor}")
        return Layout(data=devices // self.tensor, tensor=self.tensor)

    def check(self, cell: Cell, workload: Workload) -> None:
        super().check(cell, workload)
        if self.expert > 1 and (not workload.mixture_path or workload.suffixes):
            raise Refused(
                f"{workload.name} has no experts that DeepSpeed could divide; use a mixtral or"
                " qwen3-moe workload without a suffix"
            )
        plain = not (workload.suffixes or workload.experts or workload.kind == "image")
        if self.tensor > 1 and not (plain and not workload.tied and plans_of(workload).tensor):
            raise Refused(
                f"transformers has no plan to split {workload.name}, or one that DeepSpeed is not"
                " known to follow; use a llama workload without a suffix"
            )
        if cell.balance_weight:
            raise Refused(
                "DeepSpeed's router does not return the scores that transformers' loss balances;"
                " use distributed_config, or balance_weight 0"
            )
        for what, count in (("devices", cell.devices), ("experts", workload.experts)):
            if count % self.expert:
                raise Refused(
                    f"{count} {what} are not divisible by ranks {self.expert}; use a divisor of"
                    f" {count}"
                )

    def ddp_equivalent_of(self, cell: Cell) -> str | None:
        return None

    def export(self, cell: Cell, to: str) -> Export | None:
        """Returns a script, except with tensor parallelism: its ranks all train other samples."""
        return None if to == "accelerate" or self.tensor > 1 else super().export(cell, to)

    def config(
        self, cell: Cell, layout: Layout, sizes: Sequence[int], folder: Path | str = ""
    ) -> dict[str, object]:
        config = super().config(cell, layout, sizes, folder)
        if self.tensor > 1:
            del config["train_batch_size"]  # DeepSpeed would compare it with that of all ranks
            return config | {"tensor_parallel": {"autotp_size": self.tensor}}
        return config | {"expert_parallel": {"enabled": True, "autoep_size": self.expert}}

    def optimizer(self, job: Job, model: nn.Module) -> Optimizer | Callable[..., Optimizer]:
        from harness.strategies import _deepspeed_auto

        if self.split == "weights":
            return super().optimizer(job, model)
        _deepspeed_auto.record_no_scores()
        return functools.partial(_deepspeed_auto.optimizer_of_experts, job)

    def register(self, job: Job, engine: DeepSpeedEngine, folder: Path | None = None) -> None:
        from harness.strategies import _deepspeed_auto

        super().register(job, engine, folder)
        assert job.train_state is not None
        job.train_state.moments = lambda: _deepspeed_auto.whole_moments(engine)
        if self.split == "experts":
            job.train_state.routers = _deepspeed_auto.routers(engine)

    def whole(self, engine: DeepSpeedEngine) -> Iterator[tuple[str, Tensor]]:
        from harness.strategies import _deepspeed_auto

        return _deepspeed_auto.whole_parts(engine, full_parameters(engine))

    def states(self, cell: Cell, layout: Layout, facts: ModelFacts) -> States | None:
        """Returns ZeRO's states of a rank's part of the model; None for experts under ZeRO, which
        are sharded over other ranks than the rest."""
        workload = make_workload(cell.workload)
        if self.expert > 1 and self.stage > 0:
            return None

        def share(name: str) -> float:
            if self.tensor > 1:
                # DeepSpeed splits no embedding, unless it is tied to the head.
                style = plans_of(workload).style(name) or "embedding"
                return 1 if style.startswith("embedding") else 1 / self.tensor
            return 1 / self.expert if f"{workload.mixture_path}.experts." in name else 1

        part = facts_of_part(facts, share)
        return None if part is None else super().states(cell, layout, part)

    def traffic(self, cell: Cell, layout: Layout, facts: ModelFacts) -> float | None:
        return None
