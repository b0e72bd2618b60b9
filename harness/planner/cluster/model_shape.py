from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Literal

from harness.cell.errors import UsageError

MOST_LAYERS, MOST_ELEMENTS = 10_000, 10**7
"""Limits for layers and for other sizes, to catch mistakes."""

OPTIONAL_SIZES = (
    *("kv_heads", "head_size", "shared_feed_forward", "extra_norms"),
    *("attention", "dense_layers", "dense_feed_forward", "other", "tower"),
)
"""Sizes that may be 0."""
MOST_UNDESCRIBED = 0.02
"""Share of a model's parameters up to which their use does not matter."""
FULL = 0.997
"""Share of its part of the cost at which a stage counts as full; nanotron uses 1."""


@dataclass(frozen=True)
class LayerCode:
    """How transformers' code of a layer differs in what it keeps for backward."""

    layer_norm: bool = False
    """Whether the norms are LayerNorm, a single kernel, instead of RMSNorm."""
    norm_inputs: int = 2
    """Number of different tensors that the two usual norms read."""
    norm_outputs: int = 2
    fused: bool = False
    """Whether one matrix makes queries, keys and values."""
    activation: str = "silu"
    """transformers' name of the activation."""
    attention: Literal["fused", "eager", "math"] = "fused"
    """Kernel of attention: `eager` is BLOOM's; `math` is torch's fallback for one key head
    (multi-query attention, as in Falcon)."""
    repeated_keys: bool = False
    """Whether keys and values are copied for every query head, in grouped-query attention."""
    mask: bool = False
    """Whether each layer keeps an attention mask."""
    alibi: bool = False
    """Whether autocast copies an attention mask that differs between heads."""
    separate_bias: bool = False
    """Whether biases are added after products, in fp32 under autocast."""
    whole_projection: bool = False
    """Whether rotated queries and keys are kept next to the projection."""
    copied_output: bool = False
    """Whether attention's output is kept twice, in two layouts."""
    dropouts: int = 0
    """Number of masks of dropped hidden elements."""
    fp32_logits: bool = False
    """Whether the model returned fp32 logits in 2024 (Mistral and Mixtral)."""
    adapted_experts: bool = True
    """Whether peft's `all-linear` adapts routed experts."""


RMS_NORM = LayerCode()
LAYER_NORM = LayerCode(layer_norm=True, fused=True, activation="gelu")


@dataclass(frozen=True)
class ModelShape:
    """Shape of a decoder between embedding and head; sizes in elements. Layers count as equal, with
    the mean of what differs between them."""

    name: str
    layers: int
    hidden: int
    heads: int
    feed_forward: int
    vocabulary: int
    kv_heads: int = 0
    """Number of key and value heads, fewer than query heads in grouped-query attention; 0 means
    `heads`."""
    head_size: int = 0
    """Width of a head; 0 means hidden / heads."""
    gated: bool = True
    """Whether feed-forward blocks have three matrices (SwiGLU), not two."""
    tied: bool = False
    experts: int = 1
    experts_per_token: int = 1
    shared_feed_forward: int = 0
    """Feed-forward width of the shared experts, which every token uses in addition to its routed
    experts."""
    extra_norms: int = 0
    """Number of norms of the hidden states per layer beyond the usual two."""
    head_norms: bool = False
    """Whether queries and keys are normalised."""
    fp32_norms: bool = False
    """Whether norms apply their weights in fp32, before the cast (Gemma, OLMo 2)."""
    softcapped: bool = False
    """Whether a hyperbolic tangent bounds attention scores and logits (Gemma 2)."""
    code: LayerCode | None = None
    """Code of a layer. None means that of Llama or, if ungated, that of GPT."""
    attention: int = 0
    """Mean number of parameters of a layer's attention, if it does not have four projections of
    heads: latent attention, linear attention, convolution or a state-space model. 0 if it has."""
    dense_layers: int = 0
    """Number of a mixture's layers that have one dense block instead of experts."""
    dense_feed_forward: int = 0
    """Feed-forward width of these layers."""
    tower: int = 0
    """Parameters of encoders that turn images or sound into tokens, which are not part of
    `parameters`."""
    other: int = 0
    """Parameters beyond matrices and norms of hidden states: biases, norms of heads, positions,
    gates of shared experts."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type != "int":
                continue
            given = f"model {self.name!r}: {field.name} is {value}"
            most = MOST_LAYERS if field.name == "layers" else MOST_ELEMENTS
            least = 0 if field.name in OPTIONAL_SIZES else 1
            if value < least:
                raise UsageError(f"{given}; give at least {least}")
            if value > most and field.name not in ("other", "attention", "tower"):
                raise UsageError(f"{given}; give at most {most}")
        if not self.head_size:
            if self.hidden % self.heads:
                raise UsageError(
                    f"model {self.name!r}: hidden size {self.hidden} is not divisible by"
                    f" {self.heads} heads; give heads that divide it, or head_size"
                )
            object.__setattr__(self, "head_size", self.hidden // self.heads)
        if not self.kv_heads:
            object.__setattr__(self, "kv_heads", self.heads)
        if self.heads % self.kv_heads:
            raise UsageError(
                f"model {self.name!r}: {self.heads} heads are not divisible by {self.kv_heads}"
                f" kv_heads; give a divisor of {self.heads}"
            )
        if self.dense_layers >= self.layers:
            raise UsageError(f"model {self.name!r}: all layers are dense_layers; give fewer")
        if self.experts_per_token > self.experts:
            raise UsageError(
                f"model {self.name!r}: experts_per_token is {self.experts_per_token}, more than the"
                f" {self.experts} experts; give fewer"
            )

    @property
    def layer_code(self) -> LayerCode:
        return self.code or (RMS_NORM if self.gated else LAYER_NORM)

    @property
    def attention_width(self) -> int:
        return self.heads * self.head_size

    @property
    def kv_width(self) -> int:
        """Total width of the key heads; the value heads have the same width."""
        return self.kv_heads * self.head_size

    @property
    def active_feed_forward(self) -> int:
        """Feed-forward width that a token passes through."""
        routed = self.experts_per_token * self.feed_forward + self.shared_feed_forward
        return self._mean(routed, self.dense_feed_forward)

    @property
    def widest_feed_forward(self) -> int:
        """Width of a layer's largest feed-forward block."""
        return max(self.feed_forward, self.shared_feed_forward, self.dense_feed_forward)

    @property
    def further_normalised(self) -> int:
        """Elements per token that a layer normalises, apart from its two usual norms."""
        heads = self.attention_width + self.kv_width if self.head_norms else 0
        return self.extra_norms * self.hidden + heads

    @property
    def routed_width(self) -> int:
        """Elements per token that its experts take; they return as many."""
        return self.experts_per_token * self.hidden if self.experts > 1 else 0

    @property
    def attention_parameters(self) -> int:
        """Parameters of a layer's projections."""
        return self.attention or self.hidden * (2 * self.attention_width + 2 * self.kv_width)

    @property
    def expert_parameters(self) -> int:
        return (3 if self.gated else 2) * self.hidden * self.feed_forward

    @property
    def routed_parameters(self) -> int:
        """Parameters of a layer's routed experts."""
        return self._mean(self.experts * self.expert_parameters, 0)

    @property
    def shared_parameters(self) -> int:
        """Parameters of a layer's shared experts, or of its dense block."""
        per_width = (3 if self.gated else 2) * self.hidden
        return self._mean(per_width * self.shared_feed_forward, per_width * self.dense_feed_forward)

    @property
    def active_parameters(self) -> int:
        """Parameters of the matrices that a token passes through in a layer."""
        experts = self._mean(self.experts_per_token * self.expert_parameters, 0)
        return self.attention_parameters + experts + self.shared_parameters

    def _mean(self, sparse: int, dense: int) -> int:
        """Returns the mean over layers, rounded down, of what sparse and dense layers have."""
        total = (self.layers - self.dense_layers) * sparse + self.dense_layers * dense
        return total // self.layers

    @property
    def undescribed(self) -> str:
        """Sentence about parameters that count as memory but not as time; empty if they are few."""
        share = self.other / self.parameters
        if share <= MOST_UNDESCRIBED:
            return ""
        return f"{share:.0%} of the parameters are in parts that count as memory, but not as time"

    @functools.cached_property
    def layer_parameters(self) -> int:
        """Parameters of a layer, including all experts."""
        return self._in_layers // self.layers

    @functools.cached_property
    def _in_layers(self) -> int:
        per_width, router = (3 if self.gated else 2) * self.hidden, 0
        if self.experts > 1:
            router = self.hidden * self.experts
        sparse = self.experts * self.expert_parameters + router
        sparse += per_width * self.shared_feed_forward
        every = self.attention_parameters + (2 + self.extra_norms) * self.hidden
        return (
            self.layers * every
            + (self.layers - self.dense_layers) * sparse
            + self.dense_layers * per_width * self.dense_feed_forward
            + self.other
        )

    @property
    def embedding_parameters(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def end_parameters(self) -> int:
        """Parameters of embedding and head, which are one matrix if tied."""
        return self.embedding_parameters * (1 if self.tied else 2)

    @functools.cached_property
    def parameters(self) -> int:
        """Parameters, counting a tied matrix once."""
        return self._in_layers + self.end_parameters + self.hidden


def padded_head(size: int) -> int:
    """Returns FlashAttention's head size: the next power of two from 32."""
    return max(32, 1 << (size - 1).bit_length())


@dataclass(frozen=True)
class LayerStage:
    layers: int
    embedding: bool
    head: bool
    first: int
    """Index of the first such stage, with the most micro-batches in flight."""
    count: int


@functools.lru_cache(maxsize=4096)
def stages(shape: ModelShape, pipeline: int) -> tuple[LayerStage, ...]:
    """Returns the kinds of stages in a pipeline balanced by cost.

    Stages are filled in order. Cost is the number of parameters a token passes through (nanotron,
    `build_model` and `get_block_compute_costs`). Equal numbers of layers (Megatron-LM) are used if
    faster.
    """
    layer = shape.active_parameters
    head = shape.embedding_parameters
    total = shape.layers * layer + head
    counts = [0] * pipeline
    filling, cost = 0, 0
    for _ in range(shape.layers):
        counts[filling] += 1
        cost += layer
        if filling < pipeline - 1 and cost * pipeline > FULL * total * (filling + 1):
            filling += 1
    head_stage = filling
    slowest = max(
        count * layer + (head if stage == head_stage else 0) for stage, count in enumerate(counts)
    )
    equal = shape.layers // pipeline
    if shape.layers % pipeline == 0 and equal * layer + head < slowest:
        counts, head_stage = [equal] * pipeline, pipeline - 1
    kinds: dict[tuple[int, bool, bool], list[int]] = {}
    for number, layers in enumerate(counts):
        kinds.setdefault((layers, number == 0, number == head_stage), []).append(number)
    return tuple(
        LayerStage(layers, embedding, has_head, numbers[0], len(numbers))
        for (layers, embedding, has_head), numbers in kinds.items()
    )


@functools.lru_cache(maxsize=4096)
def empty_stages(shape: ModelShape, pipeline: int) -> int:
    """Counts empty stages beyond the one that may hold only the loss."""
    empty = sum(
        stage.count
        for stage in stages(shape, pipeline)
        if not (stage.layers or stage.embedding or stage.head)
    )
    return max(0, empty - 1)
