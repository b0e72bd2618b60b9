"""Variants of a workload by suffixes such as `llama-mini+nf4+lora`.

Sizes are fixed, so that cells of different hosts are comparable:

- adapters (peft): LoRA and DoRA of rank 8, scaled by 2, on all attention and MLP matrices. Prompt
tuning, P-tuning (by an MLP or a two-layer LSTM) and prefix tuning, with 16 virtual tokens. IA3 on
peft's default matrices. No dropout.

- `bf16`, `fp16`: everything in half precision, except fp32 buffers.

- `float8` (torchao): attention and MLP products, with a scale per row and column; emulated if
necessary.

- `int8`, `nf4` (bitsandbytes): frozen attention and MLP matrices, with a scale per int8 row or per
64 nf4 weights (no double quantisation).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from harness.cell.cell import Cell
from harness.cell.errors import Refused, UsageError
from harness.cell.training import Retained, Tolerance
from harness.workloads.low_precision import (
    emulated,
    halve,
    matrices,
    quantise,
    quantised_bytes,
    quiet,
    scales,
    use_float8,
)
from harness.workloads.workload import HasLogits, Workload

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from harness.cell.training import Layout

STORAGES = {
    "bf16": "weights, gradients and optimizer state in bf16",
    "fp16": "weights, gradients and optimizer state in fp16",
    "float8": "products of attention and MLP matrices in float8, weights in fp32",
    "int8": "frozen 8-bit matrices, with an adapter",
    "nf4": "frozen 4-bit matrices, with an adapter",
}
ADAPTERS = {
    "lora": "rank 8 on every attention and MLP matrix",
    "dora": "LoRA with learned norms",
    "prompt": "prompt tuning, 16 virtual tokens",
    "p_tuning": "16 virtual tokens from an MLP",
    "p_tuning_lstm": "16 virtual tokens from an LSTM",
    "prefix": "prefix tuning, 16 virtual tokens before each block's keys and values",
    "ia3": "scales of keys, values and MLP activations",
}
SUFFIXES = {**STORAGES, **ADAPTERS}
FLOAT8 = "float8"
QUANTISED = ("int8", "nf4")
HALF = ("bf16", "fp16")
TOLERANCES = {
    "bf16": Tolerance(
        5e-3,
        0.4,
        "sums in another order round differently in bf16's 8 bits, and a small update may be lost",
        other_kinds=0.02,
    ),
    "fp16": Tolerance(
        1e-3,
        0.12,
        "sums in another order round differently in fp16's 11 bits, and a small update may be lost",
        other_kinds=0.02,
    ),
    FLOAT8: Tolerance(
        2e-3,
        0.05,
        "a value halfway between two float8 numbers, which are 6% apart, rounds to either,"
        " depending on the order of earlier sums",
    ),
}
_FLOAT8_ON_GPU = Tolerance(
    2e-3,
    0.15,
    "float8 products are returned in bf16, so more values round to the other neighbouring float8"
    " number",
    other_kinds=0.05,
)
_INT8_ON_GPU = Tolerance(
    1e-2, 0.5, "activations are rounded to int8 by the largest value in the rank's own samples"
)
_ON_GPU = {"int8": _INT8_ON_GPU, FLOAT8: _FLOAT8_ON_GPU}
RANK = 8
VIRTUAL_TOKENS = 16
PROMPTS = ("prompt", "p_tuning", "p_tuning_lstm")
"""Adapters that prepend virtual tokens, which add positions to the logits."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Variant(Workload):
    base: Workload
    storage: str | None
    adapter: str | None

    @property
    def version(self) -> str:
        return self.base.version

    @property
    def suffixes(self) -> tuple[str, ...]:
        return tuple(s for s in (self.storage, self.adapter) if s)

    @property
    def partly_frozen(self) -> bool:
        return self.adapter is not None

    @property
    def arithmetic(self) -> str | None:
        return self.storage if self.storage in HALF else None

    @property
    def in_fp32(self) -> str | None:
        return "+".join(s for s in (self.base.name, self.adapter) if s) if self.storage else None

    def check(self, cell: Cell, shards_parameters: bool) -> None:
        super().check(cell, shards_parameters)
        if self.arithmetic and cell.precision != "fp32":
            raise Refused(
                f"{self.name} computes in {self.storage} already: leave the precision at fp32, or"
                f" use {self.in_fp32} in {cell.precision}"
            )
        if self.storage == "int8" and shards_parameters:
            raise Refused(
                f"{cell.strategy} shards parameters, but bitsandbytes keeps a whole copy of int8"
                f" weights next to the parameter; use {self.base.name}+nf4+{self.adapter}, or a"
                " strategy that keeps parameters whole"
            )

    def check_recompute(self, recompute: str) -> None:
        super().check_recompute(recompute)
        if self.adapter == "prefix":
            raise Refused(
                f"{self.name} passes its prefix to the blocks in a cache, and a recomputed block"
                f" would append to it twice; use {self.base.name}+lora, or recompute none"
            )
        if self.partly_frozen and recompute == "selective":
            raise Refused(
                f"selective recomputation would keep the results of {self.name}'s frozen matrices,"
                " which backward does not need, and use more memory than none; use recompute full"
            )

    def check_sequence(self, layout: Layout, tokens: int) -> None:
        super().check_sequence(layout, tokens)
        if self.adapter in (*PROMPTS, "prefix"):
            raise Refused(
                f"the virtual tokens of {self.name} come before the first token of a sample, but"
                f" each rank would put them before its part; use {self.base.name}+lora"
            )

    def tolerance(self, cell: Cell) -> Tolerance | None:
        if cell.device == "cuda" and self.storage in _ON_GPU:
            return _ON_GPU[self.storage]
        return TOLERANCES.get(self.storage or "") or super().tolerance(cell)

    def build(
        self,
        seed: int,
        device: torch.device | None = None,
        saved_weights: bool = True,
        drawn_on: torch.device | None = None,
    ) -> nn.Module:
        import torch

        model = cast("PreTrainedModel", self.base.build(seed, device, saved_weights, drawn_on))
        if self.storage in HALF:
            dtype = torch.bfloat16 if self.storage == "bf16" else torch.float16
            halve(model, dtype, keep_batch_norm=False)
        elif self.storage == FLOAT8:
            use_float8(model)
        elif self.storage:
            quantise(model, self.storage)
        if not self.adapter:
            built: nn.Module = model.train()
            return built
        gpus = [device] if device is not None and device.type == "cuda" else []
        with torch.random.fork_rng(devices=gpus):
            torch.manual_seed(self._adapter_seed(seed))
            return adapt(model, self.adapter).train()

    def _adapter_seed(self, seed: int) -> int:
        return seed + 2**31

    def logits_of(self, output: Tensor | HasLogits) -> Tensor:
        logits = super().logits_of(output)
        # Virtual tokens come first and have nothing to predict.
        return logits[:, VIRTUAL_TOKENS:] if self.adapter in PROMPTS else logits

    def retained(self, model: nn.Module) -> Iterator[Retained]:
        return scales(model) if self.storage in QUANTISED else iter(())

    def countable(self) -> Workload:
        counted_in_fp32 = self.storage in (*QUANTISED, FLOAT8)
        return dataclasses.replace(self, storage=None) if counted_in_fp32 else self

    def stand_in(self, cell: Cell) -> str | None:
        if self.storage != FLOAT8:
            return None
        return emulated(cell)

    def stored_bytes(self, model: nn.Module) -> tuple[int, int, int]:
        parameters, buffers, in_scales = super().stored_bytes(model)
        if self.storage not in QUANTISED:
            return parameters, buffers, in_scales
        unquantised = cast("PreTrainedModel", self.base.build(0, saved_weights=False))
        for _, matrix in matrices(unquantised):
            weight_bytes, scale_bytes = quantised_bytes(matrix, self.storage)
            parameters += weight_bytes - 4 * matrix.weight.numel()
            in_scales += scale_bytes
        return parameters, buffers, in_scales


def make_variant(base: Workload, suffixes: Iterable[str]) -> Variant:
    """Returns the variant; raises UsageError, suggesting an alternative, if there is none."""
    given = list(suffixes)
    name = "+".join([base.name, *given])
    storage, adapter = _storage_and_adapter(base, name, given)
    _check(base, name, storage, adapter)
    inherited = {f.name: getattr(base, f.name) for f in dataclasses.fields(Workload)}
    libraries = [
        *(["bitsandbytes"] if storage in QUANTISED else []),
        *(["torchao"] if storage == FLOAT8 else []),
        *(["peft"] if adapter else []),
    ]
    virtual = VIRTUAL_TOKENS if adapter in (*PROMPTS, "prefix") else 0
    variant = dataclasses.replace(
        Variant(**inherited, base=base, storage=storage, adapter=adapter),
        name=name,
        split=None,
        no_split=f"does not say how it can be split; use {base.name}, or a strategy that does not"
        " split the model",
        requires=(*base.requires, *libraries),
        max_tokens=max(0, base.max_tokens - virtual),
    )
    if adapter is None:
        return variant
    wrapper = "base_model.model." if adapter in ("lora", "dora", "ia3") else "base_model."
    return dataclasses.replace(
        variant,
        without_zero_gradient=lambda name, tensor: tensor,
        block_paths=tuple(wrapper + path for path in base.block_paths),
    )


def _storage_and_adapter(
    base: Workload, name: str, given: list[str]
) -> tuple[str | None, str | None]:
    for suffix in given:
        if suffix not in SUFFIXES:
            suffixes = ", ".join(f"+{s} ({meaning})" for s, meaning in SUFFIXES.items())
            raise UsageError(f"workload {name!r}: there is no suffix +{suffix}; use {suffixes}")
    storages, adapters = ([s for s in given if s in kind] for kind in (STORAGES, ADAPTERS))
    if len(storages) > 1 or len(adapters) > 1:
        raise UsageError(
            f"workload {name!r}: use at most one of {', '.join(f'+{s}' for s in STORAGES)} and"
            f" one of {', '.join(f'+{s}' for s in ADAPTERS)}"
        )
    if given != [*storages, *adapters]:
        raise UsageError(
            f"workload {name!r}: write it as {'+'.join([base.name, *storages, *adapters])!r}, so"
            " that it has one name"
        )
    return (*storages, None)[0], (*adapters, None)[0]


def _check(base: Workload, name: str, storage: str | None, adapter: str | None) -> None:
    if base.kind == "custom":
        raise UsageError(
            f"workload {name!r}: only models of transformers have variants; leave the suffix out"
        )
    if base.kind in ("image", "speech"):
        raise UsageError(
            f"workload {name!r}: {base.kind} models have no variants; use a gpt2, llama or bert"
            " workload"
        )
    if base.kind != "causal" and (adapter or storage in QUANTISED):
        raise UsageError(
            f"workload {name!r}: only causal language models have +{adapter or storage}; use a gpt2"
            " or llama workload"
        )
    of_gpt2 = base.family is not None and base.family.name == "gpt2"  # Conv1D, not Linear
    if storage == FLOAT8 and (of_gpt2 or adapter or base.experts):
        raise UsageError(
            f"workload {name!r}: float8 needs matrices in trained linear layers; use a llama or"
            " bert workload, without an adapter"
        )
    if base.experts and (adapter or storage in QUANTISED):
        raise UsageError(
            f"workload {name!r}: experts' matrices form one three-dimensional parameter, which"
            f" +{adapter or storage} does not support; use a gpt2 or llama workload"
        )
    if storage in QUANTISED and not adapter:
        raise UsageError(
            f"workload {name!r}: {storage} weights are frozen, so nothing would be trained; use"
            f" {name + '+lora'!r}"
        )
    if adapter == "ia3" and (base.split is None or base.split.exported):
        raise UsageError(
            f"workload {name!r}: IA3 is supported for gpt2 and llama models only; use +lora"
        )


def adapt(model: PreTrainedModel, adapter: str) -> nn.Module:
    """Freezes all parameters; returns the model with a trainable adapter."""
    with quiet():
        import peft
        from transformers.pytorch_utils import Conv1D

        transposed = any(isinstance(module, Conv1D) for module in model.modules())
        name, arguments = adapter_config(adapter, transposed)
        adapted: nn.Module = peft.get_peft_model(model, getattr(peft, name)(**arguments))
    return adapted


def adapter_config(adapter: str, transposed: bool) -> tuple[str, dict[str, Any]]:
    """Returns the name and the arguments of peft's config. `transposed`: whether matrices are
    (inputs, outputs), as in transformers' Conv1D."""
    causal = {"task_type": "CAUSAL_LM"}
    virtual = causal | {"num_virtual_tokens": VIRTUAL_TOKENS}
    if adapter in ("lora", "dora"):
        return "LoraConfig", {
            **causal,
            "r": RANK,
            "lora_alpha": 2 * RANK,
            "lora_dropout": 0.0,
            "target_modules": "all-linear",
            "fan_in_fan_out": transposed,
            "use_dora": adapter == "dora",
        }
    if adapter == "ia3":
        return "IA3Config", {**causal, "fan_in_fan_out": transposed}
    if adapter in ("prompt", "prefix"):
        return f"{'Prompt' if adapter == 'prompt' else 'Prefix'}TuningConfig", virtual
    return "PromptEncoderConfig", {
        **virtual,
        "encoder_reparameterization_type": "LSTM" if adapter == "p_tuning_lstm" else "MLP",
        "encoder_dropout": 0.0,
    }
