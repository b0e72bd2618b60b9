"""Counts the bytes that training with PyTorch allocates on the fullest GPU.

It covers Hugging Face's Llama, peft, bitsandbytes, FSDP and the loss. Nothing is fitted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from harness.host.gpu_models import GpuModel
from harness.planner.cluster.model_shape import ModelShape
from harness.planner.cluster.recipe import (
    STATES,
    STORED,
    Recipe,
    quantised_parameters,
    trained_parameters,
)

LOGIT_BYTES = {"transformers": 12, "transformers-2024": 14, "fused": 10, "native": 12}
"""Bytes per logit at the loss's peak.

transformers holds bf16 logits, the fp32 log-softmax and its gradient, and the bf16 gradient. Before
4.46: bf16 and fp32 logits, their shifted copy and the log-softmax. `fused` has no log-softmax,
`native` fp32 logits instead of a second bf16 tensor."""
LOGIT_BYTES_WHOLE = {"transformers": 12, "transformers-2024": 16, "fused": 14, "native": 12}
"""Bytes per logit under FSDP1, whose hooks keep outputs until backward.

Counts fp32 logits, log-softmax (unless fused), its gradient, the shifted copy's, and the bf16
gradient if fused.
"""
CAP_BYTES = 2
"""Additional bytes per logit for its hyperbolic tangent."""
SCORE_BYTES = 8.0
"""Bytes per softcapped attention score without fused attention. fp32: 4 each for the hyperbolic
tangent and the softmax. bf16: 2 for the tangent, 4 for the softmax, 2 for its copy."""
FINAL_NORM_BYTES = 6
"""Bytes per token and hidden element after the last layer."""
WORKSPACE_BYTES = 67.1e6
"""Matrix-product workspaces."""
CONTEXT_BYTES, DISPLAY_BYTES, COLLECTIVE_BYTES = 0.6e9, 0.4e9, 0.5e9
"""Memory outside torch's allocator: CUDA context, desktop on consumer cards, collective buffers."""
DORA_BYTES = 12.0
"""Temporary bytes per element of a target whose norms peft 0.21 computes: the weight, the adapter's
product, and their sum in fp32."""
FRAGMENTED = 0.05
"""Share of a step's temporary bytes that stays unusable after the allocator frees its cache."""
MOST_CERTAIN = 0.98
"""Highest probability ever given."""
SPREAD = 0.04
"""Standard deviation of log peak memory for Llama shapes on one or two GPUs."""
SPREADS = {"experts": 0.12, "gpus": 0.04, "selective": 0.08, "gptq4": 0.03, "ungated": 0.06}
"""Additional spread of unmeasured setups: mixtures of experts, more than two GPUs (per doubling),
partial recomputation, other bases, ungated layers."""


@dataclass(frozen=True)
class Footprint:
    """Bytes on the fullest GPU."""

    loaded: float
    """Parameters before the first step."""
    kept: float
    """Parameters and optimizer state."""
    gradients: float
    """Gradients at the end of backward."""
    gathered: float
    """Parameters of other ranks."""
    loss: float
    """Peak at the loss: all activations and logits."""
    backward: float
    """Peak at the end of backward: all gradients."""
    update: float

    @property
    def peak(self) -> float:
        return max(self.loss, self.backward, self.update)

    @property
    def demand(self) -> float:
        """Bytes the allocator cannot do without."""
        return self.peak + FRAGMENTED * (self.peak - self.kept)


def usable_bytes(gpu: GpuModel, gpus: int) -> float:
    taken = CONTEXT_BYTES + (DISPLAY_BYTES if "GeForce" in gpu.product_name else 0.0)
    return gpu.memory_bytes - taken - (COLLECTIVE_BYTES if gpus > 1 else 0.0)


def spread(shape: ModelShape, recipe: Recipe) -> float:
    """Returns the standard deviation of log peak memory, wider for unmeasured setups."""
    variance = SPREAD**2
    variance += SPREADS["experts"] ** 2 * (shape.experts > 1)
    variance += (SPREADS["gpus"] * math.log2(max(1.0, recipe.gpus * recipe.tensor / 2))) ** 2
    variance += SPREADS["selective"] ** 2 * recipe.recompute.startswith("selective")
    variance += SPREADS["gptq4"] ** 2 * (recipe.base in ("gptq4", "int8"))
    variance += SPREADS["ungated"] ** 2 * (not shape.gated)
    return math.sqrt(variance)


def footprint(shape: ModelShape, recipe: Recipe) -> Footprint:
    of = STATES[recipe.precision]
    shards = recipe.gpus if recipe.sharding == "full" else 1
    trained = trained_parameters(shape, recipe) / recipe.tensor
    # Parameters of experts that live on other ranks.
    alien = shape.layers * _alien_experts(shape, recipe) / recipe.tensor
    if recipe.adapter:
        parameter, gradient, optimizer = 4.0, 4.0, 8.0
        frozen = _frozen(shape, recipe, shards) / recipe.tensor
    else:
        parameter, gradient, optimizer = of.parameter, of.gradient, of.optimizer
        frozen = 0.0
    if recipe.offload:
        parameter = optimizer = 0.0
    whole = recipe.accumulation > 1 and not recipe.synchronised and recipe.sharding == "full"
    gradients = gradient * (trained - alien if whole else trained / shards)
    if recipe.gpus > 1 and recipe.sharding == "none":
        # DDP copies gradients into buckets.
        gradients *= 2
    loaded = frozen + parameter * trained / shards + WORKSPACE_BYTES
    kept = loaded + optimizer * trained / shards
    gathered = _gathered(shape, recipe) / recipe.tensor
    accumulated = gradients if recipe.accumulation > 1 else 0.0
    activations = _activations(shape, recipe)
    casts = 0.0
    if recipe.precision == "bf16" and not recipe.adapter and shards == 1:
        # Autocast keeps its bf16 copies of weights until the forward pass ends.
        casts = 2.0 * trained
    logits = _logits(shape, recipe)
    scores = _scores(shape, recipe) / recipe.tensor
    score_gradients = (4.0 + _element(recipe)) * scores
    end = layer_bytes(shape, recipe) * recipe.tokens / recipe.tensor + score_gradients
    if shards > 1 and not whole and not recipe.adapter:
        layer = shape.layer_parameters - _alien_experts(shape, recipe)
        end += max(gradient, of.element) * layer / recipe.tensor
    if recipe.base != "bf16":
        end += 2.0 * shape.hidden * shape.widest_feed_forward
    if recipe.adapter and recipe.adapter.dora:
        end += DORA_BYTES * shape.hidden * shape.widest_feed_forward
    if shape.tied and not recipe.adapter:
        # The embedding's gradient, and its sum with the head's. Without shards, the first layer is
        # freed by then; with shards, the head's whole gradient takes its place.
        summed = 2 * max(gradient, of.element) * shape.embedding_parameters / recipe.tensor
        end = end + summed if shards > 1 else max(end, summed)
    temporary = 0.0 if recipe.fused_optimizer else max(parameter, 2.0) * trained / shards
    return Footprint(
        loaded=loaded,
        kept=kept,
        gradients=gradients,
        gathered=gathered,
        loss=kept + accumulated + gathered + casts + activations + max(logits, score_gradients),
        backward=kept + gradients + gathered + casts + end,
        update=kept + gradients + temporary,
    )


def _alien_experts(shape: ModelShape, recipe: Recipe) -> float:
    return shape.experts * shape.expert_parameters * (1 - 1 / recipe.expert)


def _frozen(shape: ModelShape, recipe: Recipe, shards: int) -> float:
    element, scale = STORED[recipe.base]
    matrices = quantised_parameters(shape)
    stored = element * matrices + 2.0 * (shape.parameters - matrices)
    return stored / shards + scale * matrices


def _gathered(shape: ModelShape, recipe: Recipe) -> float:
    """Returns bytes that FSDP has gathered: embedding, head and one layer.

    Native code wraps the first two separately and prefetches a layer.
    """
    if recipe.sharding != "full" or recipe.gpus == 1:
        return 0.0
    element = STORED[recipe.base][0] if recipe.adapter else STATES[recipe.precision].element
    alien = _alien_experts(shape, recipe)
    layer = element * (shape.layer_parameters - alien)
    if not recipe.resharded:
        return element * (shape.parameters - shape.layers * alien)
    if recipe.library == "native":
        return 2 * layer + 2.0 * shape.embedding_parameters
    ends = shape.embedding_parameters * (1 if shape.tied else 2)
    return layer + max(2.0, element) * ends


def _logits(shape: ModelShape, recipe: Recipe) -> float:
    table = LOGIT_BYTES_WHOLE if recipe.sharding == "full" and recipe.gpus > 1 else LOGIT_BYTES
    per_logit = table[recipe.library] + CAP_BYTES * shape.softcapped
    logits = per_logit * shape.vocabulary / recipe.tensor
    return recipe.tokens * (logits + FINAL_NORM_BYTES * shape.hidden)


def _activations(shape: ModelShape, recipe: Recipe) -> float:
    per_token = layer_bytes(shape, recipe)
    if recipe.recompute == "full":
        per_token = (4.0 if recipe.fp32_stream else _stream(recipe)) * shape.hidden
    if recipe.recompute.startswith("selective"):
        per_token = selective_bytes(shape, recipe)
    return recipe.tokens * shape.layers * per_token / recipe.tensor


def _stream(recipe: Recipe) -> float:
    of = STATES[recipe.precision]
    if recipe.adapter:
        return 2.0
    return of.element if recipe.sharding == "full" else of.activation


def selective_bytes(shape: ModelShape, recipe: Recipe) -> float:
    """Returns a partly recomputed layer's bytes per token.

    It keeps its input, attention's output, and outputs of all or half of the matrix products.
    """
    feed = shape.active_feed_forward
    products = shape.attention_width + 2 * shape.kv_width + 2 * shape.hidden
    products += feed * (2 if shape.gated else 1)
    element = _element(recipe)
    share = 0.5 if recipe.recompute == "selective-op" else 1.0
    inputs = _stream(recipe) * shape.hidden
    return inputs + element * (shape.attention_width + share * products)


def layer_bytes(shape: ModelShape, recipe: Recipe) -> float:
    """Returns a layer's bytes per token kept for backward.

    Attention keeps queries, keys, values and output; the gated product four feed-forward tensors.
    The two usual norms also keep their outputs, as inputs of the products that follow.
    """
    hidden, width, keys = shape.hidden, shape.attention_width, shape.kv_width
    feed = shape.active_feed_forward
    tensors = 4 if shape.gated else 2
    attention = 4.0 * width + 4.0 * keys + 4.0 * shape.heads
    norm = norm_bytes(shape, recipe)
    further = norm * shape.further_normalised
    # Gradients of the routing weights need what experts return, and those of experts their inputs.
    weighted = shape.routed_width + hidden * (shape.shared_feed_forward > 0)
    routed = weighted + shape.routed_width * (recipe.adapter is None)
    element = _element(recipe)
    further += element * routed
    if scores := _scores(shape, recipe):
        # Copies keys and values for every query head.
        further += SCORE_BYTES * scores / recipe.tokens + 2 * element * (width - keys)
    if recipe.adapter:
        targets = recipe.adapter.targets
        # Autocast casts each target's input separately.
        inputs = 2.0 * hidden * sum(name in targets for name in ("q", "k", "v", "gate", "up"))
        inputs += 2.0 * width * ("o" in targets)
        product = 2.0 * feed * (tensors - 1 + ("down" in targets))
        # DoRA scales both the target's output and the adapter's, and keeps them for backward.
        scaled = 4.0 * recipe.adapter.outputs(shape) if recipe.adapter.dora else 0.0
        return 2 * norm * hidden + inputs + attention + product + scaled + further
    if recipe.precision == "fp32":
        return 24.0 * hidden + 2 * attention + 4.0 * tensors * feed + further
    if recipe.precision == "bf16" and recipe.sharding == "none":
        return 26.0 * hidden + attention + 2.0 * tensors * feed + further
    return 2 * (norm + 2) * hidden + attention + 2.0 * tensors * feed + further


def _element(recipe: Recipe) -> float:
    return 2.0 if recipe.adapter else STATES[recipe.precision].element


def _scores(shape: ModelShape, recipe: Recipe) -> float:
    """Returns the number of a layer's attention scores; 0 if attention is fused.

    transformers' default attention for softcapped scores is not fused.
    """
    if not shape.softcapped or recipe.library == "native":
        return 0.0
    return float(shape.heads) * recipe.sequence * recipe.tokens


def norm_bytes(shape: ModelShape, recipe: Recipe) -> float:
    """Returns the bytes per element that a norm keeps for backward, without its output.

    transformers' norms keep an fp32 copy of the input. If trained, they also keep the normalised
    tensor, in the type in which they apply the weight. Fused norms keep the input alone.
    """
    fp32 = _element(recipe) == 4.0
    if recipe.library in ("native", "fused"):
        return 4.0 if fp32 else 2.0
    if recipe.adapter:
        return 4.0
    return 8.0 if fp32 or shape.fp32_norms else 6.0
