from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

from harness.cell.errors import UsageError
from harness.host.user_code import one_line
from harness.workloads.family import Family, Kind, Split
from harness.workloads.structure import Structure, read_structure
from harness.workloads.workload import Workload, has_weights

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel

IMAGE_SIZE = 224
"""Default height and width in pixels."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""A config's names for the number of experts."""
FEW_TOKENS = 16
SHARDS = "model*.safetensors.index.json"
MOST = {"layer": 10_000, "block": 10_000, "depth": 10_000, "expert": 10_000, "stage": 10_000} | {
    "label": 1_000_000,
    "position": 2**24,
}
"""Limits for config entries whose name contains a word."""
LARGEST = 2**40
"""Limit for all other numbers in a config."""


def read_config(name: str, path: str) -> PretrainedConfig:
    """Reads a config from a folder, a file or the hub; raises UsageError if transformers has none
    for it.

    `name`: what the message calls it.
    """
    import transformers

    try:
        entries, _ = transformers.PretrainedConfig.get_config_dict(path)
        if large := _too_large(entries):
            raise UsageError(f"{name}: {large}")
        config: PretrainedConfig = transformers.AutoConfig.from_pretrained(
            path, trust_remote_code=False
        )
    except UsageError:
        raise
    except Exception as error:  # whatever a config's class raises for wrong values
        raise UsageError(
            f"{name}: transformers reads no model config at {path!r} ({one_line(error)}); give a"
            " folder with config.json or a hub id"
        ) from None
    return config


def _too_large(entries: object, name: str = "") -> str:
    """Describes the first config entry above its limit; empty if there is none."""
    if isinstance(entries, Mapping):
        found = (_too_large(value, str(key)) for key, value in entries.items())
        return next(filter(None, found), "")
    if isinstance(entries, list):
        return next(filter(None, (_too_large(value, name) for value in entries)), "")
    most = min((limit for word, limit in MOST.items() if word in name), default=LARGEST)
    if isinstance(entries, int) and abs(entries) > most:
        return f"config.json has {name} = {str(entries)[:20]}; give at most {most}"
    return ""


def lacking_weights(path: str) -> str:
    """Returns what is wrong with a folder's weights; empty if they are complete or absent."""
    folder = Path(path)
    if not has_weights(path) and any(folder.glob(SHARDS)):
        return f"folder {path!r} has a weight index, but not the files that it lists"
    return ""


def from_config(
    name: str, path: str, config: PretrainedConfig, kind: Kind, families: dict[str, Family]
) -> Workload:
    """Returns a workload from a config, without reading weights. Raises UsageError if transformers
    cannot build it."""
    query_heads = _number(config, "num_attention_heads")
    width = _number(config, "hidden_size") // query_heads if query_heads else 0
    workload = Workload(
        name=name,
        kind=kind,
        config={},
        family=None,
        pretrained=path,
        cannot_train=_cannot_train(config, kind),
        num_labels=_number(config, "num_labels")
        if kind in ("classification", "tokens", "image")
        else 0,
        image_size=_image_size(config) if kind == "image" else 0,
        spectrum=_spectrum(config) if kind == "speech" else None,
        vocabulary=_number(config, "vocab_size") if kind != "image" else 0,
        experts=next(filter(None, (_number(config, key) for key in EXPERTS)), 0),
        experts_per_token=_number(config, "num_experts_per_tok"),
        heads=_number(config, "num_key_value_heads") or query_heads,
        query_heads=query_heads,
        head_width=_number(config, "head_dim") or width,
    )
    try:
        model = cast("PreTrainedModel", workload.on_meta())
        structure, unused = read_structure(model), _unused(workload, model)
        vocabulary = workload.vocabulary or _rows(model)
    except Exception as error:  # whatever a model's class raises for a config that it cannot build
        raise UsageError(
            f"workload {name!r}: transformers cannot build the model of its config.json"
            f" ({one_line(error)})"
        ) from None
    split, lacks = _split(type(model).__name__, config, structure, families, workload.hidden_size)
    family = _family(config, type(model).__name__, families)
    positions = [
        _number(config, "max_position_embeddings"),
        structure.positions,
        2 * _number(config, "max_target_positions") if kind == "speech" else 0,
    ]
    return dataclasses.replace(
        workload,
        vocabulary=vocabulary if kind != "image" else 0,
        max_tokens=min(filter(None, positions), default=0) if kind != "image" else 0,
        unused=unused,
        built_frozen=not all(p.requires_grad for p in model.parameters()),
        blocks=structure.blocks,
        block_paths=structure.block_paths,
        split=split if kind in ("causal", "classification") else None,
        no_split=f"cannot be split: {lacks or 'its plans are for language models only'}",
        tied=bool(structure.tied),
        no_sequence=structure.no_sequence,
        window=structure.window,
        batch_norm=structure.batch_norm,
        without_zero_gradient=(
            family.without_zero_gradient if family else _without(structure.zero_gradients)
        ),
    )


def _unused(workload: Workload, model: PreTrainedModel) -> tuple[str, ...]:
    """Returns names of parameters that get no gradient; empty if the loss depends on values."""
    import torch

    try:
        with torch.device("meta"):
            inputs = workload.sample_inputs(2, FEW_TOKENS)
            logits = workload.logits(model.train(), inputs)
            workload.loss(logits, workload.sample_labels(inputs)).backward()
    except Exception:  # e.g. torch's, from an operator that needs values
        return ()
    named = model.named_parameters()
    return tuple(name for name, p in named if p.requires_grad and p.grad is None)


def _rows(model: PreTrainedModel) -> int:
    try:
        return int(getattr(model.get_input_embeddings(), "num_embeddings", 0))
    except NotImplementedError:  # image models have none
        return 0


def _image_size(config: PretrainedConfig) -> int:
    size = getattr(config, "image_size", None)
    if isinstance(size, list | tuple) and len(set(size)) == 1:
        size = size[0]
    return size if isinstance(size, int) and size > 0 else IMAGE_SIZE


def _spectrum(config: PretrainedConfig) -> tuple[int, int]:
    """Returns mel bins and frames; raises UsageError for a model with another kind of input."""
    bins, positions = _number(config, "num_mel_bins"), _number(config, "max_source_positions")
    if not (bins and positions):
        raise UsageError(
            f"models of type {config.model_type!r} take other input than log-mel spectra"
            " of a fixed length; give one of type 'whisper'"
        )
    return bins, 2 * positions


def _without(names: frozenset[str]) -> Callable[[str, Tensor], Tensor]:
    return lambda name, tensor: tensor[:0] if name in names else tensor


def _split(
    architecture: str,
    config: PretrainedConfig,
    structure: Structure,
    families: dict[str, Family],
    hidden_size: int,
) -> tuple[Split | None, str]:
    """Returns the family's split, else one by the model's plans, or why there is none."""
    family = _family(config, architecture, families)
    if family and family.split and not structure.window:
        return type(family.split)(structure.tied), ""
    if structure.no_stages:
        return None, structure.no_stages
    from harness.workloads.planned_split import PlannedSplit

    return PlannedSplit(structure, hidden_size), ""


def _family(
    config: PretrainedConfig, architecture: str, families: dict[str, Family]
) -> Family | None:
    family = families.get(config.model_type.replace("_", "-"))
    return family if family and family.model_class == architecture else None


def _number(config: PretrainedConfig, name: str) -> int:
    """Returns the config's number; 0 if it is absent or a list with one per block."""
    try:
        value = getattr(config, name, None)
    except Exception:  # e.g. a property computed from a wrong entry
        return 0
    return value if isinstance(value, int) and value > 0 else 0


def _cannot_train(config: PretrainedConfig, kind: Kind) -> str:
    if getattr(config, "quantization_config", None):
        return "has quantised weights, which would train as fp32; give the model without them"
    if kind not in ("classification", "tokens", "image"):
        return ""
    if _number(config, "num_labels") < 2:
        return (
            "has one label, so its cross entropy is always 0; use a config.json with at least two"
            " labels (id2label)"
        )
    if (problem := getattr(config, "problem_type", None)) not in (
        None,
        "single_label_classification",
    ):
        return f"is for {problem}, but samples have one class each; leave problem_type out"
    if kind == "image" and _number(config, "num_channels") not in (0, 3):
        return f"takes images with {config.num_channels} channels, but the data has 3"
    return ""
