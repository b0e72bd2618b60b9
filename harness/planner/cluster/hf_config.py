"""Reads a model's shape and exact parameter count from a transformers config.json.

Follows transformers' code without importing it, except for types not in FAMILIES.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from harness.cell.errors import UnknownModel, UsageError
from harness.host.packages import is_installed
from harness.planner.cluster.model_shape import RMS_NORM, LayerCode, ModelShape

Config: TypeAlias = Mapping[str, object]


@dataclass(frozen=True)
class ConfigFamily:
    """Differences between a model type and Llama."""

    tied: bool = False
    """Default of `tie_word_embeddings`."""
    gated: bool = True
    norm: int = 1
    """Vectors per norm: 2 for LayerNorm, which has a bias."""
    layer_norms: int = 2
    qkv_bias: bool = False
    """Default bias of queries, keys and values."""
    out_bias: bool = False
    feed_bias: bool = False
    head_norms: int = 0
    """Norms of queries and keys: 1 if each head has its own, 2 if they span the width of all heads,
    0 without any."""
    fp32_norms: bool = False
    softcapped: bool = False
    head_bias: bool = False
    positions: int = -1
    """Learned positions beyond the configured number; -1 if there are none."""
    bias_key: str = ""
    """Config key that switches all attention biases."""
    code: LayerCode = RMS_NORM
    dropout: float = 0.0
    """Default share of hidden elements that are dropped."""


UNKNOWN = ConfigFamily()
"""Stands for types without a family."""
Row: TypeAlias = dict[str, Any]
"""Entries of a table in YAML, or of a config."""
_TABLE: Row = yaml.safe_load(
    Path(__file__).parents[1].joinpath("families.yaml").read_text(encoding="utf-8")
)
_ROWS: dict[str, Row] = _TABLE["families"]
TEXT_SIZES: dict[str, tuple[int, ...]] = {
    kind: tuple(row.pop("sizes")) for kind, row in _ROWS.items() if "sizes" in row
}
"""transformers' defaults of SIZES; 0 if a size follows from the other sizes. A `text_config` omits
them."""


def _family(row: Row) -> ConfigFamily:
    usual = _TABLE["gpt"] if row.pop("like", "") == "gpt" else {}
    code = LayerCode(**{**usual.get("code", {}), **row.get("code", {})})
    return ConfigFamily(**{**usual, **row, "code": code})


FAMILIES = {kind: _family(row) for kind, row in _ROWS.items()}
QWEN2_MOE_SHARED = 5632
"""transformers' default of `shared_expert_intermediate_size`."""
SIZES = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("intermediate_size", "vocab_size", "head_dim"),
)
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_PER_TOKEN = (
    *("num_experts_per_tok", "experts_per_token", "num_experts_per_token", "moe_topk", "moe_k"),
)
USUAL = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
"""Names that most of transformers' configs give to their sizes."""
TOWER_SIZES = (
    ("embed_dim", "hidden_size", "d_model"),
    ("depth", "num_hidden_layers", "encoder_layers"),
    ("mlp_ratio",),
    ("intermediate_size", "encoder_ffn_dim"),
)
"""Names of an encoder's width, layers, relative and absolute width of its blocks."""
DROPOUTS = ("resid_pdrop", "dropout", "hidden_dropout", "residual_dropout")
"""Names of the share of hidden elements that layers drop."""
SAME_WIDTH = 0.02
"""Difference in a block's width that is due to its small parts."""
UNTIED_BY_CONFIG = "tie_word_embeddings"


def from_config(path: Path) -> ModelShape:
    """Reads a transformers config.json; raises UsageError if it is unreadable or lacks a size.

    Encoders of images and sound count with the approximate number of their parameters.
    """
    file = path / "config.json" if path.is_dir() else path
    whole = _read(file)
    name = str(whole.get("model_type", "")) or file.parent.name
    text = _text_config(whole)
    tower = _tower(whole) if text else 0
    if text:
        name += (
            f" (text model, and a tower of {tower / 1e9:.2f}B)" if tower else " (text model only)"
        )
    quantised = whole.get("quantization_config")
    if isinstance(quantised, dict):
        name += f" ({quantised.get('quant_method', 'quantised')} weights counted as bf16)"
    config = text or whole
    kind = str(config.get("model_type", ""))
    if kind in FAMILIES or not (is_installed("torch") and is_installed("transformers")):
        return replace(from_entries(config, name, str(file)), tower=tower)
    if not text:
        return _built(file, config, name)
    with tempfile.TemporaryDirectory() as folder:
        inner = Path(folder) / "config.json"
        inner.write_text(json.dumps(text), encoding="utf-8")
        try:
            return replace(_built(inner, text, name), tower=tower)
        except UsageError:
            raise UsageError(
                f"{str(file)!r}: transformers builds no text model of type {kind!r}; give its sizes"
            ) from None


def _tower(config: Config) -> int:
    """Returns the approximate number of parameters of encoders of images and sound: in each layer
    four matrices of attention, and two or three of its block (ViT, arXiv 2010.11929). Their
    embeddings and projections into the text model are another 5 to 10%."""
    total = 0.0
    for part in (config.get("vision_config"), config.get("audio_config")):
        if isinstance(part, dict):
            width, layers, ratio, feed = (
                next((part[key] for key in keys if isinstance(part.get(key), (int, float))), 0)
                for keys in TOWER_SIZES
            )
            feed = feed or width * (ratio or 4)
            matrices = 3 if part.get("hidden_act") == "silu" else 2
            total += layers * width * (4 * width + matrices * feed)
    return int(total)


def from_entries(config: Config, name: str, where: str = "") -> ModelShape:
    """Returns the shape that a config's entries describe, with the exact number of parameters if
    its type is in FAMILIES. Raises UsageError if an entry is missing; `where`: name of the config
    in messages."""
    kind = str(config.get("model_type", ""))
    shape = _shape(where or name, config, kind, name)
    family = FAMILIES.get(kind)
    return shape if family is None else replace(shape, other=_others(config, kind, family, shape))


def _shape(where: str, config: Config, kind: str, name: str) -> ModelShape:
    """Returns sizes without other parameters; raises UsageError if one is missing."""

    def size(*names: str, default: int | None = None) -> int:
        for name in names:
            value = config.get(name)
            if isinstance(value, int) and value > 0:
                return value
        if default is None:
            raise UsageError(f"{where!r} has no {' or '.join(names)}, which is required")
        return default

    family = FAMILIES.get(kind, UNKNOWN)
    hidden = size(*(("n_embed",) if kind == "bloom" else ()), "hidden_size", "n_embd", "d_model")
    heads = size("num_attention_heads", "n_head")
    experts = size(*EXPERTS, default=1)
    expert_width = size("moe_intermediate_size", default=0) if experts > 1 else 0
    act = str(config.get("hidden_act", config.get("activation_function", "silu")))
    feed_forward = expert_width or size(
        "intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner", default=4 * hidden
    )
    shared = 0
    if experts > 1:
        shared = size("n_shared_experts", default=0) * feed_forward
        usual = QWEN2_MOE_SHARED if kind == "qwen2_moe" else shared
        shared = size("shared_expert_intermediate_size", default=usual)
    layers = size("num_hidden_layers", "n_layer")
    dense = size("first_k_dense_replace", default=0) if experts > 1 else 0
    latent = size("kv_lora_rank", default=0)
    head_size = size("head_dim", default=hidden // heads)
    if latent:
        head_size = size("qk_nope_head_dim") + size("qk_rope_head_dim")
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads if latent else _kv_heads(config, kind, heads, size),
        head_size=head_size,
        attention=_latent_parameters(hidden, heads, size) if latent else 0,
        dense_layers=min(dense, layers - 1),
        dense_feed_forward=size("intermediate_size") if dense else 0,
        feed_forward=feed_forward,
        vocabulary=size("vocab_size"),
        gated=_gated(config, act) if family is UNKNOWN else family.gated,
        tied=bool(config.get(UNTIED_BY_CONFIG, family.tied)),
        experts=experts,
        experts_per_token=size(*EXPERTS_PER_TOKEN, default=1),
        shared_feed_forward=shared,
        extra_norms=max(0, family.layer_norms - 2),
        head_norms=family.head_norms > 0,
        fp32_norms=family.fp32_norms,
        softcapped=family.softcapped,
        code=_code(config, kind, family) if kind in FAMILIES else None,
    )


def _latent_parameters(hidden: int, heads: int, size: Callable[..., int]) -> int:
    """Returns a layer's parameters of latent attention (DeepSeek-V2, arXiv 2405.04434, section
    2.1). Queries, keys and values come from compressed vectors; keys share the rotated part."""
    compressed, rotated = size("kv_lora_rank"), size("qk_rope_head_dim")
    plain, values = size("qk_nope_head_dim"), size("v_head_dim")
    queries, width = size("q_lora_rank", default=0), heads * (plain + rotated)
    asked = queries * (hidden + width) if queries else hidden * width
    return (
        asked
        + hidden * (compressed + rotated)
        + compressed * heads * (plain + values)
        + heads * values * hidden
    )


def _gated(config: Config, activation: str) -> bool:
    """Guesses whether feed-forward blocks of an unknown type have a gate.

    Types with RMSNorm follow Llama or Gemma, whose blocks have one; those with LayerNorm follow
    GPT.
    """
    rms_norm = "rms_norm_eps" in config
    return activation in ("silu", "swish", "swiglu") or (rms_norm and activation.startswith("gelu"))


def _code(config: Config, kind: str, family: ConfigFamily) -> LayerCode:
    """Returns the family's code as the config changes it, from transformers' modeling files."""
    code = family.code
    for key in ("hidden_act", "activation_function", "activation"):
        if code.layer_norm and kind != "bloom" and isinstance(config.get(key), str):
            code = replace(code, activation=str(config[key]))
    shares = [config[key] for key in DROPOUTS if key in config]
    code = replace(code, dropouts=2 * any(shares or [family.dropout]))
    if kind != "falcon":
        return code
    alibi, new, bias = (
        bool(config.get(key)) for key in ("alibi", "new_decoder_architecture", "bias")
    )
    one_head = not new and bool(config.get("multi_query", True))
    norms = _falcon_norms(config)
    return replace(
        code,
        norm_inputs=1 if config.get("parallel_attn", True) else 2,
        norm_outputs=norms,
        attention="math" if one_head else "fused",
        repeated_keys=new,
        mask=not alibi and not one_head,
        alibi=alibi,
        separate_bias=bias,
        whole_projection=not (alibi or new or one_head),
    )


def _falcon_norms(config: Config) -> int:
    new = bool(config.get("new_decoder_architecture"))
    two = new and config.get("num_ln_in_parallel_attn") in (None, 2)
    return 2 if two or not config.get("parallel_attn", True) else 1


def _text_config(config: Config) -> Config:
    """Returns the text model's entries with transformers' defaults; empty if there is none."""
    text = config.get("text_config")
    if str(config.get("model_type")) in FAMILIES or not isinstance(text, dict):
        return {}
    if "model_type" not in text:
        return {}
    kind = str(text["model_type"])
    outer = {UNTIED_BY_CONFIG: config[UNTIED_BY_CONFIG]} if UNTIED_BY_CONFIG in config else {}
    return {**dict(zip(SIZES, TEXT_SIZES.get(kind, ()), strict=False)), **text, **outer}


def _built(file: Path, entries: Config, name: str) -> ModelShape:
    """Returns the shape of the model that transformers builds, with the exact number of parameters.

    Sizes are the config's, and blocks are as wide as their parameters are many. Everything else in
    layers is their attention. Raises UsageError if the model cannot be built.
    """
    from harness.workloads.catalog import make_workload

    workload = make_workload(f"hf:{file.parent if file.name == 'config.json' else file}")
    config = workload.hf_config()
    usual = {}
    for size in USUAL:
        # transformers refuses sizes that differ between layers by errors of its own.
        with contextlib.suppress(Exception):
            usual[size] = getattr(config, size)
    kind = str(entries.get("model_type", ""))
    shape = _shape(str(file), {**config.to_dict(), **entries, **usual}, kind, name)
    counts, blocks = Counter[str](), Counter[tuple[str, str]]()
    for path, tensor in workload.on_meta().named_parameters():
        layer, part = _part(path, tensor.dim())
        counts[part] += tensor.numel()
        blocks[part, layer] += tensor.numel()
    sparse = {layer for part, layer in blocks if part == "routed"} if shape.experts > 1 else set()
    next_to_experts = sum(blocks["dense", layer] for layer in sparse)
    per_width = (3 if shape.gated else 2) * shape.hidden
    apart = shape.layers - len(sparse) if sparse else 0
    per_layer = per_width * (len(sparse) or shape.layers)
    routed, experts = (counts["routed"], shape.experts) if sparse else (counts["dense"], 1)
    width = max(1, routed // per_layer // experts)
    near = abs(width / shape.feed_forward - 1) < SAME_WIDTH
    shape = replace(
        shape,
        experts=experts,
        experts_per_token=min(experts, shape.experts_per_token),
        feed_forward=shape.feed_forward if near else width,
        shared_feed_forward=(counts["shared"] + next_to_experts) // per_layer if sparse else 0,
        dense_layers=apart,
        dense_feed_forward=(counts["dense"] - next_to_experts) // apart // per_width
        if apart
        else 0,
        attention=max(1, counts["attention"] // shape.layers),
    )
    total = sum(counts.values())
    # What is rounded up, such as a block of width 1, belongs to attention.
    excess = -(-max(0, shape.parameters - total) // shape.layers)
    shape = replace(shape, attention=max(1, shape.attention - excess))
    return replace(shape, other=max(0, total - shape.parameters))


def _part(path: str, axes: int) -> tuple[str, str]:
    """Returns the layer and the part of it that a parameter belongs to, by transformers' names."""
    found = re.match(r"(.*?\.\d+)\.(.*)", path)
    if found is None or axes < 2 or path.endswith("bias"):
        return "", "other"
    layer, within = found.groups()
    if "shared" in within:
        return layer, "shared"
    if "experts" in within:
        return layer, "routed"
    if re.search(r"router|mlp\.gate\.|moe\.gate\.|gate\.wg|shared_expert_gate", within):
        return layer, "other"
    block = re.search(
        r"mlp|feed_forward|ffn|fc_?[12in]|dense_h_to_4h|dense_4h_to_h|intermediate", within
    )
    return layer, "dense" if block and axes == 2 else "attention"


def _read(file: Path) -> Config:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {str(file)!r}: {error.strerror}") from None
    except ValueError:
        raise UsageError(
            f"{str(file)!r} is not JSON; give the config.json of a transformers model"
        ) from None
    if not isinstance(config, dict):
        raise UsageError(f"{str(file)!r} is not a JSON object; give a model's config.json")
    return config


def _whole(config: Config, name: str, default: int) -> int:
    value = config.get(name)
    return value if isinstance(value, int) else default


def _kv_heads(config: Config, kind: str, heads: int, size: Callable[..., int]) -> int:
    if kind != "falcon":
        return size("num_key_value_heads", default=heads)
    if config.get("new_decoder_architecture"):
        return size("num_kv_heads", default=heads)
    return 1 if config.get("multi_query", True) else heads


def _others(config: Config, kind: str, family: ConfigFamily, shape: ModelShape) -> int:
    """Returns the number of parameters beyond Llama's matrices and norms, which ModelShape
    counts."""
    hidden, feed = shape.hidden, shape.feed_forward
    bias = bool(config.get(family.bias_key)) if family.bias_key else False
    layer_norms = family.layer_norms
    qkv, out, feeds = family.qkv_bias or bias, family.out_bias or bias, family.feed_bias
    if kind == "starcoder2":
        qkv = out = feeds = bool(config.get("use_bias", True))
    if kind == "gpt_neox":
        qkv = out = bool(config.get("attention_bias", True))
    if kind == "falcon":
        qkv = out = feeds = bool(config.get("bias", False))
        layer_norms = _falcon_norms(config)
    if kind == "llama":
        feeds = bool(config.get("mlp_bias", False))
    per_layer = (family.norm * layer_norms - 2 - shape.extra_norms) * hidden
    per_layer += (shape.attention_width + 2 * shape.kv_width) * qkv + hidden * out
    per_layer += (feed * (2 if shape.gated else 1) + hidden) * feeds
    per_layer += {0: 0, 1: 2 * shape.head_size, 2: shape.attention_width + shape.kv_width}[
        family.head_norms
    ]
    if kind == "qwen2_moe":
        per_layer += hidden
    if shape.attention:
        # Norms of compressed queries, keys and values.
        per_layer += _whole(config, "kv_lora_rank", 0) + _whole(config, "q_lora_rank", 0)
    ends = (family.norm - 1) * hidden
    if family.positions >= 0:
        count = _whole(config, "n_positions", _whole(config, "max_position_embeddings", 1024))
        ends += (count + family.positions) * hidden
    if family.head_bias:
        ends += shape.vocabulary
    if kind == "bloom":
        ends += 2 * hidden
    return shape.layers * per_layer + ends


@functools.cache
def _model_rows() -> list[Row]:
    text = Path(__file__).parents[1].joinpath("models.yaml").read_text(encoding="utf-8")
    rows: list[Row] = yaml.safe_load(text)["models"]
    return rows


@functools.cache
def named_shapes() -> dict[str, ModelShape]:
    shapes = {}
    for row in _model_rows():
        sizes = {name: value for name, value in row.items() if name not in ("also", "code")}
        code = FAMILIES[row["code"]].code if "code" in row else None
        shapes[row["name"]] = ModelShape(code=code, **sizes)
    return shapes


def _plain_name(text: str) -> str:
    """Returns a model's name without its owner, capitals and what only training changed."""
    name = text.strip().lower().rpartition("/")[2]
    return re.sub(r"[-_](instruct|base|chat|hf|it|thinking|v0\.\d|\d{4})(?=[-_]|$)|[-_ ]", "", name)


@functools.cache
def _plain_names() -> dict[str, str]:
    return {
        _plain_name(name): row["name"]
        for row in _model_rows()
        for name in (*row.get("also", ()), row["name"])
    }


def parse_shape(text: str) -> ModelShape:
    """Parses a name as people type it, `hf:PATH` (a config.json or its folder) or
    `layers=32,hidden=4096,...`.

    Raises UsageError for anything else, with the nearest names.
    """
    if text.startswith("hf:"):
        return from_config(Path(text.removeprefix("hf:")))
    if "=" in text:
        return _from_sizes(text)
    names = _plain_names()
    if found := names.get(_plain_name(text)):
        return named_shapes()[found]
    near = difflib.get_close_matches(_plain_name(text), names, 3, 0.6)
    nearest = ", ".join(dict.fromkeys(names[name] for name in near))
    raise UnknownModel(
        f"unknown model {text!r}{f'; the nearest are {nearest}' if near else ''}; give a name such"
        " as llama-8b, hf:PATH of a config.json, or sizes such as layers=32,hidden=4096,heads=32"
    )


_SIZES = [f.name for f in dataclasses.fields(ModelShape) if f.type in ("int", "bool")]
_FLAGS = [field.name for field in dataclasses.fields(ModelShape) if field.type == "bool"]


def _from_sizes(text: str) -> ModelShape:
    values: dict[str, int] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in _SIZES:
            raise UsageError(f"unknown model size {name!r}; use one of {', '.join(_SIZES)}")
        if not re.fullmatch(r"\d+", value):
            raise UsageError(
                f"model size {name}={value!r} is not a whole number; give it as digits"
            )
        if name in values:
            raise UsageError(f"model {text!r}: {name} is given twice; give it once")
        values[name] = int(value)
        if not values[name] and name not in _FLAGS:
            raise UsageError(f"model {text!r}: {name} is 0; give at least 1")
    if missing := [name for name in ("layers", "hidden") if name not in values]:
        raise UsageError(f"model {text!r}: give {' and '.join(missing)} as well")
    hidden = values["hidden"]
    defaults = {
        "heads": max(1, hidden // 128),
        # As in Llama: 8/3 of the hidden size, rounded up to a multiple of 256.
        "feed_forward": -(-8 * hidden // 3 // 256) * 256,
        "vocabulary": 128256,
    }
    sizes: Row = defaults | values
    sizes |= {name: bool(values[name]) for name in _FLAGS if name in values}
    return ModelShape(name=text, **sizes)
