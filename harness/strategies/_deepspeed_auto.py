"""Optimizers, routers and whole tensors of models that DeepSpeed has divided among ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.module_inject.auto_ep_presets import base
from deepspeed.module_inject.layers import LinearAllreduce, TensorParallel_Layer
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.utils import groups

from harness.seam import Job
from harness.seam.checkpoints import MOMENTS
from harness.seam.job import Moment, Router
from harness.strategies._deepspeed_engine import full_moments, gathered

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine
    from torch import Tensor
    from torch.optim import Optimizer


def record_no_scores() -> None:
    """Keeps DeepSpeed 0.19.8 from having transformers record routers' scores, by a function that
    version 5.23 has changed. Nothing needs them here."""
    base._retarget_transformers_output_recorders_for_modules = lambda **_: 0


def optimizer_of_experts(job: Job, parameters: list[Tensor]) -> Optimizer:
    """Returns the cell's optimizer, with experts in groups of their own, which ZeRO requires."""
    kind, kwargs = job.optimizer_class()
    groups = job.groups(parameters)
    named = [{"name": str(number), **part} for number, part in enumerate(groups)]
    return kind(split_params_into_different_moe_groups_for_optimizer(named), **kwargs)


def routers(engine: DeepSpeedEngine) -> dict[int, Router]:
    layers = [module for module in engine.module.modules() if isinstance(module, AutoEPMoELayer)]
    return {
        block: Router(layer.router, lambda output: output[-1]) for block, layer in enumerate(layers)
    }


def whole_moments(engine: DeepSpeedEngine) -> Iterator[Moment]:
    for kind in MOMENTS:
        named = [(name, moment) for name, of, moment in full_moments(engine) if of == kind]
        yield from ((name, kind, moment) for name, moment in whole_parts(engine, named))


def whole_parts(
    engine: DeepSpeedEngine, named: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yields whole tensors, shaped like parameters, under transformers' names."""
    experts: dict[str, Tensor] = {}
    for name, part in named:
        path, _, kind = name.rpartition(".")
        module = engine.module.get_submodule(path)
        layer = engine.module.get_submodule(path.removesuffix(".experts"))
        by_row = isinstance(module, LinearAllreduce)
        if isinstance(module, TensorParallel_Layer) and not (by_row and kind == "bias"):
            yield name, gathered(part, groups.get_tensor_model_parallel_group(), int(by_row))
        elif path.endswith(".experts") and isinstance(layer, AutoEPMoELayer):
            group = groups._get_expert_parallel_group(layer.ep_group_name)
            experts[kind] = gathered(part, group)
            if len(experts) == 3:
                yield f"{path}.gate_up_proj", torch.cat([experts["w1"], experts["w3"]], 1)
                yield f"{path}.down_proj", experts["w2"]
                experts.clear()
        else:
            yield name.replace(".router.gate.", ".gate."), part
