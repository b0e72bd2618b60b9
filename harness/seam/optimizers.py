from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.cell.cell import Cell
from harness.cell.training import EXACT, Tolerance
from harness.seam.recipe import parameter_groups
from harness.workloads import Workload, make_workload

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from harness.workloads.counts import ModelFacts

PACKAGES = {"adamw_8bit": "bitsandbytes"}
EXTRA_OPTIMIZERS = ("adamw_8bit", "muon")
"""Optimizers that a strategy must support explicitly (`Capabilities.extra_optimizers`)."""
MUON = Tolerance(
    1e-3,
    0.2,
    "Muon orthogonalises each update in bf16, which amplifies the rounding of gradients",
    minimum_by_noise=0.02,
    other_kinds=0.02,
)
EIGHT_BITS = Tolerance(
    1e-4,
    0.02,
    "a moment halfway between two 8-bit values may be rounded to either",
)
TOLERANCES = {"muon": MUON, "adamw_8bit": EIGHT_BITS}
"""Tolerances of optimizers that amplify gradient rounding: 8-bit AdamW by up to 2.9e-3 of an
update."""
OVER_SHARDS = {
    "muon": Tolerance(
        EXACT.loss,
        0.03,
        "ranks multiply parts of Muon's matrices, and each rounds its sums to bf16",
        minimum_by_noise=0.1,
        other_kinds=0.02,
    )
}
"""Further tolerances of optimizers that update DTensors. On a CPU without bf16 instructions, Muon's
updates were off by up to 0.066 in 11 trainings."""
QUANTISED_ELEMENTS = 4096
"""Elements below which bitsandbytes keeps moments in fp32."""
QUANTISED_BLOCK = 256
"""Elements of a moment that share a scale."""
CODES = 256
"""Values that eight bits encode, in one fp32 table per moment."""


def optimizer_class(cell: Cell) -> tuple[type[Optimizer], dict[str, Any]]:
    """Returns the optimizer as (class, keyword arguments). For Muon, this is the AdamW that updates
    what Muon does not."""
    import torch

    if cell.optimizer == "sgd":
        return torch.optim.SGD, {
            "lr": cell.learning_rate,
            "momentum": 0.9,
            "weight_decay": cell.weight_decay,
        }
    kwargs = {
        "lr": cell.learning_rate,
        "betas": (0.9, 0.95),
        "eps": cell.epsilon,
        "weight_decay": cell.weight_decay,
    }
    if cell.optimizer == "adamw_8bit":
        from bitsandbytes.optim.adamw import AdamW8bit

        return AdamW8bit, kwargs
    if cell.optimizer in ("adamw_foreach", "adamw_fused"):
        kwargs[cell.optimizer.removeprefix("adamw_")] = True
    return torch.optim.AdamW, kwargs


def optimizer_of(cell: Cell, model: nn.Module) -> Optimizer:
    """Builds the cell's optimizer for a model's trained parameters.

    Muon updates block matrices (https://kellerjordan.github.io/posts/muon/), AdamW the rest. Muon's
    steps are scaled to AdamW's learning rate (Moonlight, arXiv 2502.16982, section 2.2).
    """
    import torch

    factory, kwargs = optimizer_class(cell)
    if cell.optimizer != "muon":
        groups = parameter_groups(cell, model.parameters())
        return with_dtensors_apart(factory(groups, **kwargs))
    matrices, others = for_muon(cell, model)
    return _together(
        torch.optim.Muon(matrices, **muon_arguments(cell)),
        factory(parameter_groups(cell, others), **kwargs),
    )


def for_muon(cell: Cell, model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Returns the blocks' matrices, which Muon updates, and all other trained parameters."""
    block_path = make_workload(cell.workload).block_path
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        hidden = parameter.ndim == 2 and block_path and f"{block_path}." in name
        (matrices if hidden else others).append(parameter)
    return matrices, others


def with_dtensors_apart(optimizer: Optimizer) -> Optimizer:
    """Puts DTensors and plain tensors into separate parameter groups.

    Tensor parallelism leaves norms plain, and torch's foreach and fused updates refuse a mixed
    list.
    """
    from torch.distributed.tensor import DTensor

    groups = []
    for group in optimizer.param_groups:
        plain = [p for p in group["params"] if not isinstance(p, DTensor)]
        sharded = [p for p in group["params"] if isinstance(p, DTensor)]
        groups += [{**group, "params": part} for part in (sharded, plain) if part]
    optimizer.param_groups = groups
    return optimizer


def packages_of(cell: Cell) -> list[str]:
    return [PACKAGES[cell.optimizer]] if cell.optimizer in PACKAGES else []


def muon_arguments(cell: Cell) -> dict[str, Any]:
    return {
        "lr": cell.learning_rate,
        "weight_decay": cell.weight_decay,
        "adjust_lr_fn": "match_rms_adamw",
    }


def _together(*parts: Optimizer) -> Optimizer:
    import torch

    class Together(torch.optim.Optimizer):
        def __init__(self) -> None:
            super().__init__([group for part in parts for group in part.param_groups], {})
            for part in parts:
                part.state = self.state

        def step(self, closure: Any = None) -> Any:
            assert closure is None
            for part in parts:
                part.step()

    return Together()


def optimizer_bytes(cell: Cell, facts: ModelFacts) -> float:
    """Returns the bytes that the optimizer keeps for the whole model between steps.

    AdamW keeps two moments of a parameter's size, SGD with momentum one (ZeRO, arXiv 1910.02054,
    section 3.1, for fp32), Muon one for block matrices. Each of AdamW8bit's two moments has one
    byte per element, a scale per 256 (arXiv 2110.02861, section 2.1), and a code table.
    """
    if cell.optimizer == "muon":
        matrices = sum(hidden_matrices(facts, make_workload(cell.workload)))
        element_bytes = facts.trained_bytes / sum(facts.sizes)
        return 2.0 * facts.trained_bytes - element_bytes * matrices
    if cell.optimizer == "adamw_8bit":
        in_fp32 = [size for size in facts.sizes if size < QUANTISED_ELEMENTS]
        quantised = [size for size in facts.sizes if size >= QUANTISED_ELEMENTS]
        scales = sum(-(-size // QUANTISED_BLOCK) for size in quantised)
        tables = 2 * 4 * CODES if quantised else 0
        return 2.0 * (4 * sum(in_fp32) + sum(quantised) + 4 * scales) + tables
    return float(cell.moments * facts.trained_bytes)


def hidden_matrices(facts: ModelFacts, workload: Workload) -> list[int]:
    """Counts each matrix's elements in the blocks, which Muon updates.

    Vectors have at most 4 x hidden elements. Muon skips 3D expert weights.
    """
    least = 4 * workload.hidden_size
    return [
        size
        for name, size in zip(facts.trainable, facts.sizes, strict=True)
        if workload.block_path
        and name.startswith(f"{workload.block_path}.")
        and not (workload.experts and ".experts." in name)
        and size > least
    ]
