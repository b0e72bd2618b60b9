from __future__ import annotations

import dataclasses
import functools
import importlib
import pkgutil
from pathlib import Path
from typing import TYPE_CHECKING

from harness.cell.cell import SCRIPT
from harness.cell.errors import UsageError
from harness.host.user_code import UserClass, entry_point_class, names_user_class, user_class
from harness.workloads.family import Family, Kind
from harness.workloads.pretrained import from_config, lacking_weights, read_config
from harness.workloads.user_workload import from_class
from harness.workloads.workload import AUTO, Workload
from harness.workloads.workload_variants import SUFFIXES, make_variant

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PretrainedConfig

BLOCKS = "blocks="
"""Suffix with the path of a list of blocks in a user's model: `my.py:Tiny+blocks=layers`."""
HUB = "hf:"
"""Prefix of models that transformers loads from a folder or its hub."""

_ENDINGS: dict[Kind, tuple[str, ...]] = {
    "causal": ("ForCausalLM", "LMHeadModel"),
    "masked": ("ForMaskedLM",),
    "seq2seq": ("ForConditionalGeneration",),
    "speech": ("ForConditionalGeneration",),
    "classification": ("ForSequenceClassification",),
    "tokens": ("ForTokenClassification",),
    "image": ("ForImageClassification", "ForImageClassificationWithTeacher"),
}
"""Suffixes of transformers' class names, by what these classes are trained for."""


@functools.cache
def families() -> dict[str, Family]:
    from harness.workloads import families as package

    modules = [
        importlib.import_module(f"{package.__name__}.{module.name}")
        for module in pkgutil.iter_modules(package.__path__)
    ]
    defined: list[Family] = [module.FAMILY for module in modules]
    return {family.name: family for family in defined}


def workload_names() -> list[str]:
    return [f"{family.name}-{size}" for family in families().values() for size in family.sizes]


def split_name(name: str) -> tuple[str, list[str]]:
    """Splits `llama-mini+lora` into (`llama-mini`, [`lora`]).

    Paths may contain `+`: `hf:PATH` loses only known suffixes, and none if the full path exists.
    """
    if not name.startswith(HUB):
        source, colon, rest = name.rpartition(":")
        base, *suffixes = rest.split("+")
        return source + colon + base, suffixes
    suffixes = []
    while not Path(name.removeprefix(HUB)).exists():
        base, _, last = name.rpartition("+")
        if last not in SUFFIXES:
            break
        name, suffixes = base, [last, *suffixes]
    return name, suffixes


@functools.cache
def make_workload(name: str) -> Workload:
    """Returns the workload, suffixes included; raises UsageError for an unknown name."""
    base, suffixes = split_name(name)
    blocks = tuple(s.removeprefix(BLOCKS) for s in suffixes if s.startswith(BLOCKS))
    if len(blocks) == len(suffixes) > 0 and (found := _user_class(base)):
        return from_class(dataclasses.replace(found, name=name), blocks)
    if suffixes:
        return make_variant(make_workload(base), suffixes)
    if name.startswith(HUB):
        return _from_hub(name)
    if found := _user_class(name):
        return from_class(found)
    family_name, _, size = name.rpartition("-")
    family = families().get(family_name)
    of_size = family.size(size) if family else None
    if family is None or of_size is None:
        any_size = [f"{f.name}-HIDDENxBLOCKS" for f in families().values() if f.sized]
        raise UsageError(
            f"unknown workload {name!r}; use one of {', '.join([*workload_names(), *any_size])},"
            " hf:PATH_OR_ID or FILE.py:CLASS, optionally with +SUFFIX"
        )
    config = {**family.common, **of_size}
    query_heads = config.get("num_attention_heads", config.get("n_head", 0))
    hidden = config.get(family.hidden_size_key, 0)
    return Workload(
        name=name,
        kind=family.kind,
        config=config,
        family=family,
        image_size=family.image_size(size),
        num_labels=config.get("num_labels", 0),
        vocabulary=config.get("vocab_size", 0),
        max_tokens=config.get("max_position_embeddings", config.get("n_positions", 0)),
        blocks=config.get("num_hidden_layers", config.get("n_layer", 0)),
        heads=config.get("num_key_value_heads") or query_heads,
        query_heads=query_heads,
        head_width=config.get("head_dim") or (hidden // query_heads if query_heads else 0),
        experts=config.get("num_experts", config.get("num_local_experts", 0)),
        experts_per_token=config.get("num_experts_per_tok", 0),
        split=family.split,
        block_paths=(family.split.blocks,) if family.split else (),
        tied=bool(family.split and family.split.tied),
        batch_norm=family.batch_norm,
        without_zero_gradient=family.without_zero_gradient,
    )


ENTRY_POINTS = "parallelism_bench.workloads"


class Small:
    """A small network that the control of a training script computes."""

    def build(self) -> nn.Module:
        from torch import nn

        return nn.Linear(256, 1024)

    def batch(self, samples: Tensor) -> tuple[Tensor, Tensor]:
        import torch

        return torch.ones(len(samples), 256), samples

    def loss(self, output: Tensor, labels: Tensor) -> Tensor:
        return output.square().mean()


def _user_class(name: str) -> UserClass | None:
    if name == SCRIPT:
        return UserClass(SCRIPT, Small, "")
    if names_user_class(name):
        return user_class(name)
    return None if name in workload_names() else entry_point_class(ENTRY_POINTS, name)


def source_of(name: str) -> tuple[str, str]:
    """Returns a workload's name, with a user's file as an absolute path, and that file's digest."""
    base, suffixes = split_name(name)
    found = _user_class(base)
    if found is None:
        return name, ""
    return "+".join([found.name, *suffixes]), found.digest


def _from_hub(name: str) -> Workload:
    path = name.removeprefix(HUB)
    config = read_config(f"workload {name!r}", path)
    kind = require_kind(name, config)
    if Path(path).is_dir() and (lacks := lacking_weights(path)):
        raise UsageError(f"workload {name!r}: {lacks}")
    return from_config(name, path, config, kind, families())


def require_kind(name: str, config: PretrainedConfig) -> Kind:
    """Returns what the config's architecture or model type is trained for.

    Raises UsageError if that is neither text nor images.
    """
    import transformers

    able: list[Kind] = [
        kind
        for kind, auto in AUTO.items()
        if type(config) in getattr(transformers, auto)._model_mapping
    ]
    architectures = getattr(config, "architectures", None)
    if not architectures:
        usual: list[Kind] = ["seq2seq", "speech"] if config.is_encoder_decoder else []
        usual += ["masked", "causal", "seq2seq", "image", "classification", "tokens"]
        if kinds := [kind for kind in usual if kind in able]:
            return kinds[0]
        raise UsageError(
            f"workload {name!r}: transformers trains models of type {config.model_type!r} neither"
            f" on text alone nor on images alone; give one that a {', '.join(AUTO.values())} loads"
        )
    architecture = str(architectures[0]) if isinstance(architectures, list) else ""
    for kind in able:
        if architecture.endswith(_ENDINGS[kind]):
            return kind
    for kind in able:
        loaded = getattr(transformers, AUTO[kind])._model_mapping[type(config)]
        if loaded.__name__ == architecture and "ConditionalGeneration" not in architecture:
            return kind
    loads = ", ".join(AUTO[kind] for kind in able)
    raise UsageError(
        f"workload {name!r}: its architecture is {str(architectures)[:80]}, which cannot be trained"
        f" on text alone or images alone; give one that {loads or ', '.join(AUTO.values())} loads"
    )
