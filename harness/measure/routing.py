"""Tokens per expert."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from harness.strategy.job import Router

if TYPE_CHECKING:
    from torch import Tensor, nn

    from harness.workloads import Workload

ExpertTokens = dict[int, tuple[int, ...]]


def routers_of(model: nn.Module, workload: Workload) -> dict[int, Router]:
    """Returns the routers of transformers' mixtures by block number, even in wrapped models.

    Their last output holds the chosen experts: (tokens, experts per token).
    """
    ends = re.compile(
        rf"(?:^|\.){re.escape(workload.block_path)}\.(\d+)\."
        rf"(?:\w+\.)*?{re.escape(workload.mixture_path)}\.(?:\w+\.)*?gate$"
    )

    def tokens(output: tuple[Tensor, ...]) -> Tensor:
        return output[-1].flatten().bincount(minlength=workload.experts)

    return {
        int(match[1]): Router(module, tokens)
        for name, module in model.named_modules()
        if (match := ends.search(name))
    }


@contextlib.contextmanager
def counted(routers: Mapping[int, Router], counts: ExpertTokens) -> Iterator[None]:
    """Adds each expert's tokens on this rank to `counts`, without backward's recomputations."""
    import torch

    def count(block: int, router: Router) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: object, output: Any) -> None:
            if torch._C._current_graph_task_id() != -1:  # within backward
                return
            new = router.tokens(output).tolist()
            before = counts.get(block, (0,) * len(new))
            counts[block] = tuple(int(a + b) for a, b in zip(before, new, strict=True))

        return hook

    with contextlib.ExitStack() as stack:
        for block, router in routers.items():
            handle = router.module.register_forward_hook(count(block, router))
            stack.callback(handle.remove)
        yield


def imbalance_of_experts(counts: ExpertTokens) -> float:
    """Returns the busiest expert's tokens over its block's mean, in the most uneven block."""
    return max(max(tokens) * len(tokens) / sum(tokens) for tokens in counts.values())
