from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.moe.layer import MoE
from deepspeed.utils import groups
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F

from harness.seam.job import Router
from harness.strategies._deepspeed_engine import full_parameters
from harness.workloads import Workload

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

PARTS = ("gate_up_proj", "down_proj")


class Expert(nn.Module):
    def __init__(self, gate_up: Tensor, down: Tensor, activation: Callable[[Tensor], Tensor]):
        """Takes `gate_up` (2 x intermediate, hidden) and `down` (hidden, intermediate)."""
        super().__init__()
        self.gate_up_proj = nn.Parameter(gate_up.detach().clone())
        self.down_proj = nn.Parameter(down.detach().clone())
        self.activation = activation

    def forward(self, rows: Tensor) -> Tensor:
        gate, up = F.linear(rows, self.gate_up_proj).chunk(2, dim=-1)
        return F.linear(self.activation(gate) * up, self.down_proj)


class Mixture(nn.Module):
    """DeepSpeed's `MoE` layer with the interface of transformers' layer.

    Drops no tokens and does not sample the second expert, which would change training.
    """

    def __init__(self, mixture: nn.Module, ranks: int, first: int, experts_per_token: int) -> None:
        """Copies `mixture`'s weights; `ranks` share its experts; this rank's start at `first`."""
        super().__init__()
        experts: Any = mixture.get_submodule("experts")
        router = mixture.get_submodule("gate").get_parameter("weight")
        whole = [experts.get_parameter(part) for part in PARTS]
        count, hidden = router.shape
        self.moe = MoE(
            hidden,
            Expert(whole[0][0], whole[1][0], copy.deepcopy(experts.act_fn)),
            num_experts=count,
            ep_size=ranks,
            k=experts_per_token,
            min_capacity=0,
            drop_tokens=False,
            use_rts=False,
            top2_2nd_expert_sampling=False,
        ).to(router.device)
        self.first = first
        with torch.no_grad():
            self.router.copy_(router)
            for number, expert in enumerate(self.local_experts, first):
                for part, tensor in zip(PARTS, whole, strict=True):
                    expert.get_parameter(part).copy_(tensor[number])

    @property
    def router(self) -> nn.Parameter:
        """Router weight (experts, hidden)."""
        return self.moe.deepspeed_moe.gate.wg.weight  # type: ignore[no-any-return]

    @property
    def local_experts(self) -> Sequence[nn.Module]:
        experts: Sequence[nn.Module] = self.moe.deepspeed_moe.experts.deepspeed_experts
        return experts

    def forward(self, hidden: Tensor) -> Tensor:
        """Maps (samples, tokens, hidden) to the same shape."""
        output: Tensor = self.moe(hidden)[0]
        return output


def replace_mixtures(
    model: nn.Module, workload: Workload, ranks: int, rank: int
) -> dict[str, Mixture]:
    """Replaces mixtures of experts by DeepSpeed's layer, in place; returns the layers by path.
    DeepSpeed divides the experts among neighbouring ranks, so a rank's experts are known before
    `deepspeed.initialize` makes the group (see `check_groups`)."""
    first = rank % ranks * (workload.experts // ranks)
    made = {}
    for path in workload.mixtures_of(model):
        mixture = Mixture(model.get_submodule(path), ranks, first, workload.experts_per_token)
        model.set_submodule(path, mixture)
        made[path] = mixture
    return made


def check_groups(mixtures: Mapping[str, Mixture]) -> None:
    """Raises RuntimeError if DeepSpeed's group orders the ranks differently."""
    for path, mixture in mixtures.items():
        group_rank = groups._get_expert_parallel_rank(mixture.moe.expert_group_name)
        if group_rank * mixture.moe.num_local_experts != mixture.first:
            raise RuntimeError(
                f"this rank was given the experts from {mixture.first} on in {path}, but its"
                f" position in DeepSpeed's expert group is {group_rank}"
            )


def routers(mixtures: Mapping[str, Mixture]) -> dict[int, Router]:
    """Returns DeepSpeed's routers by block; their last output counts each expert's tokens."""
    layers = [mixture.moe.deepspeed_moe.gate for mixture in mixtures.values()]
    return {block: Router(gate, lambda output: output[-1]) for block, gate in enumerate(layers)}


def whole_parameters(
    engine: DeepSpeedEngine, mixtures: Mapping[str, Mixture]
) -> Iterator[tuple[str, Tensor]]:
    """Yields whole parameters by name, with all ranks' experts; call on all ranks."""
    parameters = dict(full_parameters(engine))
    inside = tuple(f"{path}." for path in mixtures)
    yield from ((name, p) for name, p in parameters.items() if not name.startswith(inside))
    for path, mixture in mixtures.items():
        layer = f"{path}.moe.deepspeed_moe"
        yield f"{path}.gate.weight", parameters[f"{layer}.gate.wg.weight"]
        group = groups._get_expert_parallel_group(mixture.moe.expert_group_name)
        for part in PARTS:
            experts = f"{layer}.experts.deepspeed_experts"
            shards = [
                parameters[f"{experts}.{i}.{part}"] for i in range(len(mixture.local_experts))
            ]
            mine = torch.stack([tensor.detach() for tensor in shards])
            every = [torch.empty_like(mine) for _ in range(mixture.moe.ep_size)]
            dist.all_gather(every, mine, group=group)
            yield f"{path}.experts.{part}", torch.cat(every)
