"""A workload: a transformers model by its config with seeded random weights, its loss, and how it
can be split."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

from harness.spec.errors import UsageError

if TYPE_CHECKING:
    pass
from harness.workloads.workload import Family, Kind, Workload


@functools.cache
def families() -> dict[str, Family]:
    from harness.workloads import bert, gpt2, llama, resnet

    return {module.FAMILY.name: module.FAMILY for module in (gpt2, llama, bert, resnet)}


def workload_names() -> list[str]:
    return [f"{family.name}-{size}" for family in families().values() for size in family.sizes]


def split_name(name: str) -> tuple[str, list[str]]:
    """A workload's name without its suffixes, and these.

    A path may have a `+` of its own: only known suffixes end it.
    """
    if not name.startswith("hf:"):
        base, *suffixes = name.split("+")
        return base, suffixes
    from harness.workloads.variants import SUFFIXES

    found: list[str] = []
    while not Path(name.removeprefix("hf:")).exists():
        base, _, last = name.rpartition("+")
        if last not in SUFFIXES:
            break
        name, found = base, [last, *found]
    return name, found


@functools.cache
def make_workload(name: str) -> Workload:
    """The workload of this name, with its suffixes (`llama-mini+lora`); raises UsageError for an
    unknown one."""
    base, suffixes = split_name(name)
    if suffixes:
        from harness.workloads.variants import vary

        return vary(make_workload(base), suffixes)
    if name.startswith("hf:"):
        return _from_hub(name)
    family_name, _, size = name.rpartition("-")
    family = families().get(family_name)
    known = family.size(size) if family else None
    if family is None or known is None:
        known_names = ", ".join(workload_names())
        raise UsageError(
            f"unknown workload {name!r}; known are {known_names}, llama-HIDDENxBLOCKS,"
            " hf:PATH_OR_ID, and these with +SUFFIX"
        )
    config = {**family.common, **known}
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
        heads=config.get("num_key_value_heads")
        or config.get("num_attention_heads", config.get("n_head", 0)),
        split=family.split,
        block_path=family.split.blocks if family.split else "",
        batch_norm=family.batch_norm,
        without_zero_gradient=family.without_zero_gradient,
    )


def _from_hub(name: str) -> Workload:
    import transformers

    path = name.removeprefix("hf:")
    try:
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        said = str(error).strip().splitlines()[0]
        raise UsageError(
            f"workload {name!r}: no model config at {path!r} ({said}); give a folder with"
            " config.json or a hub id"
        ) from None
    architecture = (config.architectures or [""])[0]
    if architecture.endswith(("ForCausalLM", "LMHeadModel")):
        kind: Kind = "causal"
    elif architecture.endswith("ForSequenceClassification"):
        kind = "classification"
    else:
        raise UsageError(
            f"workload {name!r}: architecture {architecture or 'unknown'!r} is neither a causal"
            " language model nor a sequence classification model; give one whose config.json names"
            " a ...ForCausalLM or ...ForSequenceClassification"
        )
    family = families().get(config.model_type)
    same = family is not None and family.model_class == architecture
    return Workload(
        name=name,
        kind=kind,
        config={},
        family=None,
        pretrained=path,
        num_labels=config.num_labels if kind == "classification" else 0,
        vocabulary=config.vocab_size,
        max_tokens=getattr(config, "max_position_embeddings", 0) or 0,
        blocks=config.num_hidden_layers,
        heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        split=family.split if family and same else None,
        block_path=family.split.blocks if family and same and family.split else "",
        without_zero_gradient=family.without_zero_gradient
        if family and same
        else (lambda name, tensor: tensor),
    )
