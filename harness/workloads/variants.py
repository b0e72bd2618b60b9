"""Variants of a workload by suffixes to its name: weights kept in fewer bits, few trained
parameters (`llama-mini+nf4+lora`).

A variant is another model of the same name and seed, so every strategy can train it, and its
reference is the same variant in one process. Sizes are fixed, so that cells of different hosts can
be compared:

- adapters (peft): LoRA of rank 8, scaled by 2, on every attention and MLP matrix; 16 virtual tokens
  for prompt tuning, P-tuning (an MLP, or a two-layer LSTM, of the model's width) and prefix tuning;
  IA3 on peft's own choice of matrices. No dropout.
- `bf16`, `fp16`: parameters, gradients and optimizer state are kept and the arithmetic is done in
  half precision; buffers stay fp32.
- `int8`, `nf4` (bitsandbytes): every attention and MLP matrix is quantised once and frozen, so
  something else must be trained beside it. One scale for each row of int8 weights, and for each 64
  nf4 weights (no second quantisation of the scales).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.spec.cell import Cell
from harness.spec.errors import Refused, UsageError
from harness.spec.training import Retained, Tolerance
from harness.workloads.workload import Workload

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from harness.spec.training import Layout

STORAGES = {
    "bf16": "weights, gradients and optimizer state in bf16",
    "fp16": "weights, gradients and optimizer state in fp16",
    "int8": "frozen 8-bit matrices, with an adapter",
    "nf4": "frozen 4-bit matrices, with an adapter",
}
ADAPTERS = {
    "lora": "rank 8 on every attention and MLP matrix",
    "prompt": "prompt tuning, 16 virtual tokens",
    "p_tuning": "16 virtual tokens from an MLP",
    "p_tuning_lstm": "16 virtual tokens from an LSTM",
    "prefix": "prefix tuning, 16 virtual tokens before each block's keys and values",
    "ia3": "scales of keys, values and MLP activations",
}
SUFFIXES = {**STORAGES, **ADAPTERS}
RANK = 8
VIRTUAL_TOKENS = 16
_QUANTISED = ("int8", "nf4")
_PROMPTS = ("prompt", "p_tuning", "p_tuning_lstm")
_HALF = {
    "bf16": Tolerance(
        5e-3,
        0.4,
        "sums in another order are rounded to bf16's 8 bits, and a small update is lost or not",
    ),
    "fp16": Tolerance(
        1e-3,
        0.12,
        "sums in another order are rounded to fp16's 11 bits, and a small update is lost or not",
    ),
}
_INT8_ON_GPU = Tolerance(
    1e-2, 0.5, "activations are rounded to int8 by the largest value in the rank's own samples"
)


@dataclass(frozen=True, eq=False, kw_only=True)
class Varied(Workload):
    """A workload with its weights kept in fewer bits, an adapter trained in their place, or
    both."""

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
        return self.storage if self.storage in _HALF else None

    @property
    def in_fp32(self) -> str | None:
        return "+".join(s for s in (self.base.name, self.adapter) if s) if self.storage else None

    def check(self, cell: Cell, shards_parameters: bool) -> None:
        if self.arithmetic and cell.precision != "fp32":
            raise Refused(
                f"{self.name} computes in {self.storage} already: leave the precision at fp32, or"
                f" use {self.in_fp32} in {cell.precision}"
            )
        if self.storage in _QUANTISED and shards_parameters:
            raise Refused(
                f"{cell.strategy} cuts parameters into shards, and bitsandbytes finds the scales of"
                f" {self.storage} weights by whole matrices only; use a strategy that keeps them"
                " whole"
            )

    def check_split(self, layout: Layout) -> None:
        raise Refused(
            f"{self.name} does not say how it can be split; use {self.base.name}, or a strategy"
            " that does not split the model"
        )

    def tolerance(self, cell: Cell) -> Tolerance | None:
        if self.storage == "int8" and cell.device == "cuda":
            return _INT8_ON_GPU
        return _HALF.get(self.storage or "")

    def build(
        self,
        seed: int,
        device: torch.device | None = None,
        saved_weights: bool = True,
        drawn_on: torch.device | None = None,
    ) -> nn.Module:
        import torch

        model = self.base.build(seed, device, saved_weights, drawn_on)
        if self.storage in _HALF:
            from harness.workloads.precision import halve

            halve(
                model,
                getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}[self.storage]),
                keep_batch_norm=False,
            )
        elif self.storage:
            quantise(model, self.storage)
        if self.adapter:
            with torch.random.fork_rng(
                devices=[device] if device is not None and device.type == "cuda" else []
            ):
                torch.manual_seed(self._adapter_seed(seed))
                model = adapt(model, self.adapter)
        return model.train()

    def _adapter_seed(self, seed: int) -> int:
        """Another than the model's, whose first numbers an adapter would repeat."""
        return seed + 2**31

    def logits(self, model: Callable[..., Any], inputs: Tensor) -> Tensor:
        logits = super().logits(model, inputs)
        return (
            logits[:, VIRTUAL_TOKENS:] if self.adapter in _PROMPTS else logits
        )  # virtual tokens come first and predict nothing

    def held(self, model: nn.Module) -> Iterator[Retained]:
        names = {"int8": "scales of int8 weights", "nf4": "scales of nf4 weights"}
        for module in model.modules() if self.storage in _QUANTISED else ():
            weight = getattr(module, "weight", None)
            if (four := getattr(weight, "quant_state", None)) is not None:
                yield "library", names["nf4"], four.absmax
                yield "library", "code book of nf4", four.code
            for holder in (
                weight,
                getattr(module, "state", None),
            ):  # the layer takes it from its weight in the first forward
                if (scales := getattr(holder, "SCB", None)) is not None:
                    yield "library", names["int8"], scales

    def countable(self) -> Workload:
        return dataclasses.replace(self, storage=None) if self.storage in _QUANTISED else self

    def stored_bytes(self, model: nn.Module) -> tuple[int, int]:
        parameters, buffers = super().stored_bytes(model)
        for _, matrix in (
            matrices(self.base.build(0, saved_weights=False)) if self.storage in _QUANTISED else ()
        ):
            weight: Any = matrix.weight
            of_weights, of_scales = _quantised_bytes(
                weight.numel(), _features(matrix)[1], self.storage or ""
            )
            parameters += of_weights - 4 * weight.numel()
            buffers += of_scales
        return parameters, buffers


def _quantised_bytes(elements: int, rows: int, storage: str) -> tuple[int, int]:
    """Bytes of a quantised matrix and of its scales."""
    if storage == "int8":
        return elements, 4 * rows
    return (
        -(-elements // 2),
        4 * -(-elements // 64) + 4 * 16,
    )  # and the 16 values that 4 bits choose from


def vary(base: Workload, suffixes: Iterable[str]) -> Varied:
    """The variant of these suffixes; raises UsageError where they mean nothing, with what does."""
    given = list(suffixes)
    name = "+".join([base.name, *given])
    for suffix in given:
        if suffix not in SUFFIXES:
            said = ", ".join(f"+{s} ({what})" for s, what in SUFFIXES.items())
            raise UsageError(f"workload {name!r}: there is no suffix +{suffix}; there are {said}")
    storages, adapters = ([s for s in given if s in kind] for kind in (STORAGES, ADAPTERS))
    if len(storages) > 1 or len(adapters) > 1:
        raise UsageError(
            f"workload {name!r}: at most one of {', '.join(f'+{s}' for s in STORAGES)} and one of"
            f" {', '.join(f'+{s}' for s in ADAPTERS)}"
        )
    if given != [*storages, *adapters]:
        raise UsageError(
            f"workload {name!r}: write it as {'+'.join([base.name, *storages, *adapters])!r}, so"
            " that it has one name"
        )
    storage, adapter = (*storages, None)[0], (*adapters, None)[0]
    if base.kind == "image":
        raise UsageError(
            f"workload {name!r}: an image model has no variants; use a gpt2, llama or bert workload"
        )
    if base.kind != "causal" and (adapter or storage in _QUANTISED):
        raise UsageError(
            f"workload {name!r}: only causal language models have +{adapter or storage}; use a gpt2"
            " or llama workload"
        )
    if storage in _QUANTISED and not adapter:
        raise UsageError(
            f"workload {name!r}: {storage} weights are frozen, so nothing would be trained; use"
            f" {name + '+lora'!r}"
        )
    if adapter == "ia3" and not base.block_path:
        raise UsageError(
            f"workload {name!r}: which matrices IA3 scales is known for gpt2 and llama models only;"
            " use +lora"
        )
    same = {f.name: getattr(base, f.name) for f in dataclasses.fields(Workload)}
    virtual = VIRTUAL_TOKENS if adapter in (*_PROMPTS, "prefix") else 0
    changes: dict[str, Any] = {
        "name": name,
        "split": None,
        "requires": (
            *base.requires,
            *(["bitsandbytes"] if storage in _QUANTISED else []),
            *(["peft"] if adapter else []),
        ),
        "max_tokens": max(0, base.max_tokens - virtual),
    }
    if adapter:
        wrapped = "base_model.model." if adapter in ("lora", "ia3") else "base_model."
        changes |= {
            "without_zero_gradient": lambda name, tensor: tensor,
            "block_path": base.block_path and wrapped + base.block_path,
        }
    return Varied(**same | changes, base=base, storage=storage, adapter=adapter)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what the libraries say of themselves: peft asks transformers for a name that is
    going, bitsandbytes for faster kernels."""
    logger = logging.getLogger("bitsandbytes")
    level = logger.level
    logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logger.setLevel(level)


def matrices(model: Any) -> list[tuple[str, nn.Module]]:
    """Path and module of every attention and MLP matrix: all linear layers but the one that makes
    the logits."""
    import torch
    from transformers.pytorch_utils import Conv1D

    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | Conv1D)
    ]
    return [(name, module) for name, module in found if module is not model.get_output_embeddings()]


def _features(matrix: Any) -> tuple[int, int]:
    """Inputs and outputs; GPT-2's Conv1D keeps its weight as (inputs, outputs), Linear as (outputs,
    inputs)."""
    rows, columns = matrix.weight.shape
    return (columns, rows) if hasattr(matrix, "in_features") else (rows, columns)


def quantise(model: nn.Module, storage: str) -> None:
    """Exchanges every attention and MLP matrix for bitsandbytes' layer, one by one, on the device
    it is on."""
    with _quiet():
        import bitsandbytes
    import torch

    layers: Any = bitsandbytes.nn
    for name, old in matrices(model):
        matrix: Any = old
        inputs, outputs = _features(matrix)
        device = matrix.weight.device
        weight = (
            matrix.weight.detach()
            if hasattr(matrix, "in_features")
            else matrix.weight.detach().t().contiguous()
        )
        biased = matrix.bias is not None
        layer: Any
        if storage == "nf4":
            layer = layers.Linear4bit(
                inputs, outputs, biased, compress_statistics=False, quant_type="nf4", device="meta"
            )
            layer.weight = layers.Params4bit(
                weight, False, compress_statistics=False, quant_type="nf4", module=layer
            ).to(device)
        else:
            layer = layers.Linear8bitLt(
                inputs, outputs, biased, has_fp16_weights=False, threshold=6.0, device="meta"
            )
            layer.weight = layers.Int8Params(weight.cpu(), False).to(
                device
            )  # what comes from a GPU it leaves as it is
        if biased:
            layer.bias = torch.nn.Parameter(matrix.bias.detach(), requires_grad=False)
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, layer)
    model.__dict__["is_loaded_in_4bit" if storage == "nf4" else "is_loaded_in_8bit"] = (
        True  # peft then takes its layers for such
    )


def adapt(model: Any, adapter: str) -> nn.Module:
    """The model with everything frozen but the adapter."""
    from transformers.pytorch_utils import Conv1D

    with _quiet():
        import peft

        task: dict[str, Any] = {"task_type": "CAUSAL_LM"}
        matrix = {
            **task,
            "fan_in_fan_out": any(isinstance(module, Conv1D) for module in model.modules()),
        }
        prompt = {**task, "num_virtual_tokens": VIRTUAL_TOKENS}
        network = {**prompt, "encoder_dropout": 0.0}
        configs: dict[str, Callable[[], Any]] = {
            "lora": lambda: peft.LoraConfig(
                r=RANK, lora_alpha=2 * RANK, lora_dropout=0.0, target_modules="all-linear", **matrix
            ),
            "ia3": lambda: peft.IA3Config(**matrix),
            "prompt": lambda: peft.PromptTuningConfig(**prompt),
            "p_tuning": lambda: peft.PromptEncoderConfig(
                encoder_reparameterization_type="MLP", **network
            ),
            "p_tuning_lstm": lambda: peft.PromptEncoderConfig(
                encoder_reparameterization_type="LSTM", **network
            ),
            "prefix": lambda: peft.PrefixTuningConfig(**prompt),
        }
        adapted: nn.Module = peft.get_peft_model(model, configs[adapter]())
    return adapted
