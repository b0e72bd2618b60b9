"""Structure of a transformers model: blocks, ties and plans, as its class and config declare."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel

STYLES = {
    "colwise": "column",
    "rowwise": "row",
    "replicated_with_grad_allreduce": "heads",
    "colwise_gather_output": "gathered column",
    "rowwise_split_input": "gathered row",
}
"""Styles of transformers' tensor plans that torch's own styles can express."""

KEYS = ("key", "k_proj", "key_proj", "pos_key_proj", "k_lin", "k_head", "to_k")
"""Names of transformers' linear layers that compute attention keys."""


@dataclass(frozen=True)
class TensorPlan:
    """A tensor-parallel plan by full paths, in which `*` stands for any block."""

    column: tuple[str, ...] = ()
    row: tuple[str, ...] = ()
    gathered: tuple[str, ...] = ()
    """Layers in `column` or `row` with gathered outputs or unsplit inputs."""
    heads: tuple[str, ...] = ()
    """Norms within attention heads; each rank normalises its own heads."""
    missing: str = "transformers has no tensor-parallel plan for it"
    """Why there is no plan; empty if there is a plan."""


@dataclass(frozen=True)
class Structure:
    block_paths: tuple[str, ...]
    blocks: int
    tied: Mapping[str, str]
    """Further names of shared parameters -> their first name."""
    embedding: tuple[str, ...] = ()
    head: tuple[str, ...] = ()
    """Paths of modules with parameters before and after the blocks, if a pipeline can split
    them."""
    no_stages: str = ""
    """Why the model cannot be split into stages."""
    tensor: TensorPlan = field(default_factory=TensorPlan)
    positions: int = 0
    """Maximum sequence length that learned positions allow, if less than the config says."""
    no_sequence: str = ""
    """Why ranks cannot share a sample's tokens."""
    batch_norm: bool = False
    zero_gradients: frozenset[str] = frozenset()
    """Names of parameters whose gradient is analytically zero."""
    window: int = 0
    """Minimum over layers of the number of tokens that attention is limited to. 0 means no
    limit."""


def read_structure(model: PreTrainedModel) -> Structure:
    paths = block_lists(model)
    lists = [cast("nn.ModuleList", model.get_submodule(path)) for path in paths]
    tied = tied_parameters(model)
    embedding, head, no_stages = _stages(model, paths, tied)
    return Structure(
        block_paths=paths,
        blocks=sum(len(blocks) for blocks in lists),
        tied=tied,
        embedding=embedding,
        head=head,
        no_stages=no_stages,
        tensor=_tensor_plan(model, paths),
        positions=_positions(model),
        no_sequence=_no_sequence(model),
        batch_norm=has_batch_norm(model),
        zero_gradients=frozenset(key_biases(model)),
        window=attention_window(model.config),
    )


def has_batch_norm(model: nn.Module) -> bool:
    from torch.nn.modules.batchnorm import _BatchNorm

    return any(isinstance(module, _BatchNorm) for module in model.modules())


def tied_parameters(model: nn.Module) -> dict[str, str]:
    """Returns what `Structure.tied` describes."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            tied[name] = first[id(parameter)]
    return tied


def block_lists(model: nn.Module) -> tuple[str, ...]:
    """Returns paths of ModuleLists of blocks: those of `_no_split_modules`, else the largest."""
    from torch import nn

    kinds = set(getattr(model, "_no_split_modules", None) or ())
    lists = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)]
    lists = [(n, m) for n, m in lists if not any(isinstance(child, nn.ModuleList) for child in m)]
    named = [path for path, m in lists if all(type(child).__name__ in kinds for child in m)]
    if named:
        return tuple(path for path in named if not any(path.startswith(f"{o}.") for o in named))
    alike = [(p, m) for p, m in lists if len(m) > 1 and len({type(child) for child in m}) == 1]
    sizes = {path: sum(p.numel() for p in module.parameters()) for path, module in alike}
    largest = max(sizes, key=lambda path: sizes[path], default="")
    return (largest,) if largest else ()


def attention_window(config: PretrainedConfig) -> int:
    """Returns what `Structure.window` describes."""
    kinds = set(getattr(config, "layer_types", None) or ())
    sliding = getattr(config, "sliding_window", None) or 0
    chunk = getattr(config, "attention_chunk_size", None) or 0
    if not kinds:
        return int(sliding)
    limits = [sliding if "sliding_attention" in kinds else 0]
    limits += [chunk if "chunked_attention" in kinds else 0]
    return min((int(limit) for limit in limits if limit), default=0)


def _stages(
    model: PreTrainedModel, paths: tuple[str, ...], tied: Mapping[str, str]
) -> tuple[tuple[str, ...], tuple[str, ...], str]:
    plan: Mapping[str, object] = getattr(model.config, "base_model_pp_plan", None) or {}
    prefix, head_module = model.base_model_prefix, model.get_output_embeddings()
    if not plan:
        return (
            (),
            (),
            "transformers has no pipeline plan for it, which would name its embedding and head",
        )
    layers = paths[0].removeprefix(f"{prefix}.") if len(paths) == 1 else ""
    if layers not in plan or head_module is None:
        return (
            (),
            (),
            "its pipeline plan does not name one list of blocks and a language model head",
        )
    order = list(plan)
    at = order.index(layers)
    present = {name for name, _ in model.named_modules()}
    embedding = [f"{prefix}.{name}" for name in order[:at] if f"{prefix}.{name}" in present]
    head = [f"{prefix}.{name}" for name in order[at + 1 :] if f"{prefix}.{name}" in present]
    head += [name for name, module in model.named_modules() if module is head_module]
    parts = (*embedding, *head, paths[0])
    for name, _ in model.named_parameters(remove_duplicate=False):
        if not name.startswith(tuple(f"{part}." for part in parts)):
            return (), (), f"its pipeline plan does not say which stage has {name}"
    for name, owner in tied.items():
        ends = (name.startswith(tuple(head)), owner.startswith(tuple(embedding)))
        if not all(ends):
            return (), (), f"{name} is tied to {owner}, but they are not head and embedding"
    return tuple(embedding), tuple(head), ""


def _tensor_plan(model: PreTrainedModel, paths: tuple[str, ...]) -> TensorPlan:
    from torch import nn

    plan: Mapping[str, str] = getattr(model.config, "base_model_tp_plan", None) or {}
    prefix = model.base_model_prefix
    by_style: dict[str, list[str]] = {name: [] for name in STYLES.values()}
    names = dict(model.named_modules())
    for path, style in plan.items():
        full = f"{prefix}.{path}"
        modules = [module for name, module in names.items() if fnmatch(name, full)]
        if not modules or not full.startswith(tuple(f"{blocks}." for blocks in paths)):
            continue
        if style not in STYLES:
            return TensorPlan(
                missing=f"its tensor-parallel plan gives {full} the unsupported style {style}"
            )
        kind = STYLES[style]
        if kind != "heads" and not all(isinstance(module, nn.Linear) for module in modules):
            return TensorPlan(
                missing=f"its tensor-parallel plan splits {full}, which is not Linear"
            )
        by_style[kind].append(full)
    if not (by_style["column"] or by_style["gathered column"]):
        return TensorPlan()
    return TensorPlan(
        column=(*by_style["column"], *by_style["gathered column"]),
        row=(*by_style["row"], *by_style["gathered row"]),
        gathered=(*by_style["gathered column"], *by_style["gathered row"]),
        heads=tuple(by_style["heads"]),
        missing="",
    )


def _positions(model: nn.Module) -> int:
    """Counts learned positions after a padding row."""
    from torch import nn

    usable = [
        module.num_embeddings - module.padding_idx - 1
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
        and name.endswith("position_embeddings")
        and module.padding_idx is not None
    ]
    return min(usable, default=0)


def key_biases(model: nn.Module) -> Iterator[str]:
    """Yields biases of attention keys whose gradient is zero, as softmax ignores an equal shift of
    all scores."""
    kinds = [type(module).__name__.lower() for module in model.modules()]
    if any("rotary" in kind or "rope" in kind for kind in kinds):
        return
    for name, _ in model.named_parameters():
        layer, _, leaf = name.rpartition(".")
        parent, _, of_keys = layer.rpartition(".")
        if leaf != "bias" or of_keys not in KEYS:
            continue
        if of_keys == "pos_key_proj" or not hasattr(model.get_submodule(parent), "pos_query_proj"):
            yield name


def _no_sequence(model: PreTrainedModel) -> str:
    import inspect

    if not getattr(model, "_supports_attention_backend", False):
        return "its attention cannot be replaced by one over all ranks' tokens"
    if (implementation := model.config._attn_implementation) != "sdpa":
        return f"its attention is transformers' {implementation}, not torch's"
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return "it takes no positions, and would count them from 0 on every rank"
    return ""


def split_sizes(
    model: nn.Module, paths: tuple[str, ...], dimension: int
) -> Iterator[tuple[str, int]]:
    """Yields path and size in this dimension of each layer's weight, only for the first block."""
    for path in paths:
        for name, module in model.named_modules():
            if fnmatch(name, path):
                yield name, int(cast("nn.Linear", module).weight.shape[dimension])
                break
