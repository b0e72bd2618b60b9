"""Workloads from a folder or the hub of transformers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, cast

from harness.spec.errors import UsageError
from harness.workloads.family import Family, Kind, Split
from harness.workloads.structure import Structure, read_structure
from harness.workloads.workload import Workload, has_weights

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel

IMAGE_SIZE = 224
"""Height and width in pixels if a config has none."""
SHARDS = "model*.safetensors.index.json"


def lacking_weights(path: str) -> str:
    """Returns what is wrong with a folder's weights; empty if they are complete or absent."""
    folder = Path(path)
    if not has_weights(path) and any(folder.glob(SHARDS)):
        return f"folder {path!r} has a weight index, but not the files that it lists"
    return ""


def from_config(
    name: str, path: str, config: PretrainedConfig, kind: Kind, families: dict[str, Family]
) -> Workload:
    """Returns a workload from a config, without reading weights.

    Raises UsageError if transformers cannot build the model.
    """
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
        image_size=(_number(config, "image_size") or IMAGE_SIZE) if kind == "image" else 0,
        vocabulary=_number(config, "vocab_size") if kind != "image" else 0,
        experts=_number(config, "num_experts") or _number(config, "num_local_experts"),
        experts_per_token=_number(config, "num_experts_per_tok"),
        heads=_number(config, "num_key_value_heads") or query_heads,
        query_heads=query_heads,
        head_width=_number(config, "head_dim") or width,
    )
    try:
        model = cast("PreTrainedModel", workload.on_meta())
    except Exception as error:  # models raise anything for a bad config
        reason = (str(error) or type(error).__name__).strip().splitlines()[0]
        raise UsageError(
            f"workload {name!r}: transformers cannot build a model from its config.json ({reason})"
        ) from None
    structure = read_structure(model)
    split, lacks = _split(type(model).__name__, config, structure, families, workload.hidden_size)
    family = _family(config, type(model).__name__, families)
    positions = [n for n in (_number(config, "max_position_embeddings"), structure.positions) if n]
    return dataclasses.replace(
        workload,
        max_tokens=min(positions, default=0) if kind != "image" else 0,
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


def _without(names: frozenset[str]) -> Callable[[str, Tensor], Tensor]:
    return lambda name, tensor: tensor[:0] if name in names else tensor


def _split(
    architecture: str,
    config: PretrainedConfig,
    structure: Structure,
    families: dict[str, Family],
    hidden_size: int,
) -> tuple[Split | None, str]:
    """Returns the family's split, else one by the model's plans, or why there is none.

    A family's split passes no mask, as limited attention needs.
    """
    family = _family(config, architecture, families)
    if family and family.split and not structure.window:
        return family.split.tied_as(structure.tied), ""
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
    """Returns an integer of a config; 0 if it is missing or differs between blocks."""
    value = getattr(config, name, None)
    return value if isinstance(value, int) else 0


def _cannot_train(config: PretrainedConfig, kind: Kind) -> str:
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
