"""Counts the bytes that training with PyTorch allocates on the fullest GPU.

Nothing is fitted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from harness.host.gpu_models import GpuModel
from harness.planner.cluster.model_shape import ModelShape
from harness.planner.cluster.recipe import (
    OPTIMIZERS,
    SOFTWARE,
    STATES,
    STORED,
    Library,
    Recipe,
    quantised_parameters,
    trained_parameters,
)

LOGIT_BYTES: dict[str, tuple[float, float]] = SOFTWARE["logits"]
RETURNED_BYTES = 7.5
"""Further bytes per logit that FSDP1 keeps of a model that returns fp32 logits, if the loss is
`fused`."""
CHUNK_BYTES = 8
"""Bytes per token and hidden element of a chunk's logits. Liger makes as many chunks as the
vocabulary is wider than the hidden states."""
TORCHTUNE_CHUNKS, CHUNK_LOGIT_BYTES = 8, 10.0
"""Number of chunks that torchtune makes, and bytes per logit of the current one: bf16, fp32 and
gradient."""
QUANTISED_LITGPT_BYTES = 27.0
"""Further bytes per token and hidden element that a quantised layer of litgpt keeps. Four published
peaks give 23 to 30; the cause is not known."""
PREFETCHED, REDUCED = 1e9, 5e8
"""Parameters that DeepSpeed's ZeRO-3 keeps gathered at most (`stage3_max_live_parameters`), and
gradients that it reduces at once, from one of two buffers (`reduce_bucket_size`)."""
BUCKETS = 4e9
"""Further bytes of DeepSpeed's buckets, by eight published peaks of 1.8 to 72 billion parameters
on one, two and four GPUs."""
PINNED = 1.5
"""Host memory relative to the tensors in it. torch rounds pinned blocks up to powers of two, and
processes have memory of their own; a run of 485 GiB took 750 to 800 GB."""
CAP_BYTES = 2
"""Additional bytes per logit for its hyperbolic tangent."""
STEPWISE = ("gelu_new", "gelu_accurate")
"""Activations that transformers computes step by step, keeping four tensors."""
FINAL_NORM_BYTES = 6
"""Bytes per token and hidden element after the last layer."""
WORKSPACE_BYTES = 67.1e6
"""Matrix-product workspaces."""
CONTEXT_BYTES, DISPLAY_BYTES, COLLECTIVE_BYTES = 0.6e9, 0.4e9, 0.5e9
"""Memory outside torch's allocator: CUDA context, desktop on consumer cards, collective buffers."""
DORA_BYTES = 12.0
"""Temporary bytes per element of a target whose norms peft 0.21 computes: the weight, the adapter's
product and their sum, in fp32."""
FRAGMENTED = 0.05
"""Share of a step's temporary bytes that fragmentation makes unusable."""
MOST_CERTAIN = 0.98
"""Maximum probability that is ever given."""
SPREAD = 0.04
"""Standard deviation of log peak memory for Llama shapes on one or two GPUs."""
SPREADS: dict[str, float] = SOFTWARE["spreads"]
FSDP2: tuple[Library, ...] = ("transformers", "fused")
"""Libraries whose users shard with FSDP2, by layers, with embedding and head as one unit."""


@dataclass(frozen=True)
class Footprint:
    """Bytes on the fullest GPU."""

    loaded: float
    """Bytes of the parameters before the first step."""
    resident: float
    """Bytes between steps: parameters, optimizer state and DDP's buckets."""
    gradients: float
    """Gradients at the end of backward."""
    gathered: float
    """Bytes of parameters that other ranks own."""
    start: float
    """Peak at the first layer, when FSDP2 still holds the buffers of its first two gathers."""
    loss: float
    """Peak at the loss: all activations and logits."""
    backward: float
    """Peak at the end of backward: all gradients."""
    update: float
    saving: float
    """Peak while a checkpoint is saved."""

    @property
    def peak(self) -> float:
        return max(self.start, self.loss, self.backward, self.update, self.saving)

    @property
    def demand(self) -> float:
        """Bytes the allocator cannot do without."""
        return self.peak + FRAGMENTED * (self.peak - self.resident)


def usable_bytes(gpu: GpuModel, gpus: int) -> float:
    taken = CONTEXT_BYTES + (DISPLAY_BYTES if "GeForce" in gpu.product_name else 0.0)
    return gpu.memory_bytes - taken - (COLLECTIVE_BYTES if gpus > 1 else 0.0)


def spread(shape: ModelShape, recipe: Recipe) -> float:
    """Returns the standard deviation of log peak memory, wider for unmeasured setups."""
    variance = SPREAD**2
    variance += SPREADS["experts"] ** 2 * (shape.experts > 1)
    variance += (SPREADS["gpus"] * math.log2(max(1.0, recipe.gpus * recipe.tensor / 2))) ** 2
    variance += SPREADS["selective"] ** 2 * (recipe.recompute not in ("none", "full"))
    variance += SPREADS["gptq4"] ** 2 * (recipe.base in ("gptq4", "int8"))
    variance += SPREADS["ungated"] ** 2 * (not shape.gated)
    variance += SPREADS["offload"] ** 2 * (recipe.offload or recipe.offloaded_activations)
    variance += SPREADS["chunked"] ** 2 * (recipe.loss_code == "chunked")
    variance += SPREADS["copies"] ** 2 * _copies_inputs(shape, recipe)
    variance += SPREADS["litgpt"] ** 2 * (recipe.library == "litgpt" and recipe.base != "bf16")
    variance += SPREADS["deepspeed"] ** 2 * (recipe.library == "deepspeed")
    variance += SPREADS["traits"] ** 2 * (recipe.compiled or recipe.optimizer != "adamw")
    return math.sqrt(variance)


def footprint(shape: ModelShape, recipe: Recipe) -> Footprint:
    of = STATES[recipe.precision]
    shards = recipe.gpus if recipe.sharding != "none" else 1
    trained = trained_parameters(shape, recipe) / recipe.tensor
    # Parameters of experts that live on other ranks.
    alien = shape.layers * _alien_experts(shape, recipe) / recipe.tensor
    if recipe.adapter:
        parameter, gradient, moments = 4.0, 4.0, 8.0
        frozen = _frozen(shape, recipe, shards) / recipe.tensor
        if recipe.offload:
            # bitsandbytes keeps scales on the GPU.
            frozen = STORED[recipe.base][1] * quantised_parameters(shape, recipe.quantised_experts)
    else:
        parameter, gradient, moments = of.parameter, of.gradient, of.optimizer
        frozen = 0.0
    if recipe.adapter or not recipe.trained_tower:
        frozen += (2.0 if recipe.adapter else parameter) * shape.tower / shards
    share, more = OPTIMIZERS[recipe.optimizer]
    optimizer = share * moments + more
    if recipe.offload:
        # FSDP keeps accumulated gradients on the GPU.
        parameter, gradient, optimizer = 0.0, gradient * recipe.whole_gradients, 0.0
    gradients = gradient * (trained - alien if recipe.whole_gradients else trained / shards)
    loaded = frozen + parameter * trained / shards + WORKSPACE_BYTES
    resident = loaded + optimizer * trained / shards
    if recipe.gpus > 1 and recipe.sharding == "none":
        # DDP's buckets.
        resident += gradient * trained
    resident += BUCKETS * (recipe.library == "deepspeed")
    gathered = _gathered(shape, recipe) / recipe.tensor
    accumulated = gradients if recipe.accumulation > 1 else 0.0
    activations = _activations(shape, recipe)
    casts = 0.0
    if recipe.precision == "bf16" and not recipe.adapter and not recipe.gathers:
        # Autocast keeps bf16 copies of weights until forward ends, autograd until backward has used
        # them.
        looked_up = 0.0 if shape.tied else shape.embedding_parameters / recipe.tensor
        casts = 2.0 * (trained - looked_up)
    logits = _logits(shape, recipe)
    scores = _scores(shape, recipe) / recipe.tensor
    score_gradients = (4.0 + _element(recipe)) * scores
    end = _last_layer(shape, recipe) + score_gradients
    backward = resident + _backward(shape, recipe, gradients, gathered, end)
    copied = gathered if recipe.library in FSDP2 else 0.0
    temporary = 0.0 if recipe.fused_optimizer else max(parameter, 2.0) * trained / shards
    return Footprint(
        loaded=loaded,
        resident=resident,
        gradients=gradients,
        gathered=gathered,
        start=resident + accumulated + gathered + max(copied, _uploaded(shape, recipe)),
        loss=resident + accumulated + gathered + casts + activations + max(logits, score_gradients),
        backward=backward,
        update=resident + gradients + temporary,
        saving=resident + _saved(shape, recipe),
    )


def _saved(shape: ModelShape, recipe: Recipe) -> float:
    """Returns the bytes that saving a sharded model gathers: its largest parameter, or all."""
    if recipe.adapter or not recipe.gathers:
        return 0.0
    saved = shape.parameters if recipe.gathered_save else shape.embedding_parameters
    return STATES[recipe.precision].parameter * saved


def _backward(
    shape: ModelShape, recipe: Recipe, gradients: float, gathered: float, end: float
) -> float:
    """Returns the bytes beyond states at the end of backward. `end`: those of the first layer."""
    of = STATES[recipe.precision]
    gradient = 4.0 if recipe.adapter else 0.0 if recipe.offload else of.gradient
    reduces = recipe.gathers and not recipe.whole_gradients and not recipe.adapter
    if recipe.library == "deepspeed":
        return gradients + gathered + end + 2 * REDUCED * of.element * reduces
    if reduces and recipe.library != "native":
        return _reducing(shape, recipe, end)
    if reduces:
        layer = shape.layer_parameters - _alien_experts(shape, recipe)
        end += max(gradient, of.element) * layer / recipe.tensor
    if shape.tied and not recipe.adapter:
        # The embedding's gradient, and its sum with the head's. Without shards, the first layer is
        # freed by then; with shards, the head's whole gradient takes its place.
        summed = 2 * max(gradient, of.element) * shape.embedding_parameters / recipe.tensor
        sharded = recipe.sharding != "none" and recipe.gpus > 1
        end = end + summed if sharded else max(end, summed)
    return gradients + gathered + end


def _last_layer(shape: ModelShape, recipe: Recipe) -> float:
    """Returns the bytes of one layer at the end of backward: activations, dequantised matrices,
    merged experts with their gradients, and DoRA's norms."""
    layer = layer_bytes(shape, recipe) * recipe.tokens / recipe.tensor
    if recipe.base != "bf16":
        layer += 2.0 * shape.hidden * shape.widest_feed_forward
    layer += 2 * merged_bytes(shape, recipe) / recipe.tensor
    if recipe.adapter and recipe.adapter.dora:
        layer += DORA_BYTES * shape.hidden * shape.widest_feed_forward
    return layer


def _reducing(shape: ModelShape, recipe: Recipe, layer_activations: float) -> float:
    """Returns the maximum number of bytes beyond states while FSDP reduces gradients in backward. A
    layer's whole gradients are copied for their reduction while the next layer is gathered. The
    gradients of embedding and head, which are one unit, stay whole until the end. FSDP2 copies them
    after it has freed the unit's parameters (torch 2.13, `FSDPParamGroup.post_backward`), FSDP1
    copies them into its flat gradient before."""
    of = STATES[recipe.precision]
    whole, copied = of.element / recipe.tensor, of.reduced / recipe.tensor
    flat = recipe.library not in FSDP2
    layer = shape.layer_parameters - _alien_experts(shape, recipe)
    head = shape.embedding_parameters
    ends = shape.end_parameters
    reduced = 0.0 if recipe.offload else of.gradient / recipe.gpus / recipe.tensor
    shards = reduced * (shape.layers * layer + ends * (recipe.accumulation > 1))
    copies = (whole if flat else copied) * layer
    # The gradients of two layers are not reduced yet.
    in_layers = whole * (ends + head + 3 * layer) + layer_activations - 2 * reduced * layer
    # A tied embedding has another gradient, and its sum with the head's.
    in_embedding = whole * ((3 if flat else 2) * ends + 2 * head * shape.tied)
    # The embedding's gradient, or the head's, stays until the reduction has ended.
    after = max((whole + copied) * ends, (copied * (1 + 1 / recipe.gpus) + whole / 2) * ends)
    return shards + max(in_layers + copies, in_embedding + copies, after)


def _alien_experts(shape: ModelShape, recipe: Recipe) -> float:
    return shape.routed_parameters * (1 - 1 / recipe.expert)


def _frozen(shape: ModelShape, recipe: Recipe, shards: int) -> float:
    element, scale = STORED[recipe.base]
    matrices = quantised_parameters(shape, recipe.quantised_experts)
    stored = element * matrices + 2.0 * (shape.parameters - matrices)
    if recipe.fp32_embeddings and recipe.base != "bf16":
        stored += 2.0 * shape.end_parameters
    # torchao shards scales too.
    return stored / shards + scale * matrices / (shards if recipe.library == "native" else 1)


def _gathered(shape: ModelShape, recipe: Recipe) -> float:
    """Returns the bytes that FSDP has gathered: embedding, head and one layer. Native code wraps
    embedding and head separately and prefetches a layer."""
    if not recipe.gathers:
        return 0.0
    element = STORED[recipe.base][0] if recipe.adapter else STATES[recipe.precision].element
    alien = _alien_experts(shape, recipe)
    layer = element * (shape.layer_parameters - alien)
    whole = element * (shape.parameters - shape.layers * alien)
    if recipe.sharding != "full":
        return whole
    if recipe.library == "deepspeed":
        return min(whole, element * PREFETCHED)
    if recipe.library == "native":
        return 2 * layer + 2.0 * shape.embedding_parameters
    return layer + max(2.0, element) * shape.end_parameters


def _uploaded(shape: ModelShape, recipe: Recipe) -> float:
    """Returns the bytes of embedding and head that come from the host before they are gathered:
    this GPU's shards as stored, and cast."""
    if not recipe.offload:
        return 0.0
    of = STATES[recipe.precision]
    stored = 2.0 if recipe.adapter else of.parameter
    cast = 0.0 if recipe.adapter or of.parameter == of.element else of.element
    return (stored + cast) * shape.end_parameters / recipe.gpus / recipe.tensor


def host_bytes(shape: ModelShape, recipe: Recipe) -> float:
    """Returns the bytes of host memory that what all GPUs offload needs."""
    of, trained = STATES[recipe.precision], trained_parameters(shape, recipe)
    # An adapter's parameters, gradients and moments are fp32.
    states, moments = (8.0, 8.0) if recipe.adapter else (of.parameter + of.gradient, of.optimizer)
    share, more = OPTIMIZERS[recipe.optimizer]
    offloaded = 0.0
    if recipe.offload:
        frozen = _frozen(shape, recipe, 1) if recipe.adapter else 0.0
        offloaded = (states + share * moments + more) * trained + frozen
    if recipe.offloaded_activations:
        offloaded += recipe.gpus * shape.layers * recipe.tokens * _kept_bytes(shape, recipe)
    return PINNED * offloaded


def _logits(shape: ModelShape, recipe: Recipe) -> float:
    loss = recipe.loss_code
    if loss == "chunked":
        head = 0.0 if recipe.adapter else STATES[recipe.precision].element
        chunk: float = recipe.tokens * (CHUNK_BYTES + FINAL_NORM_BYTES) * shape.hidden
        if recipe.library == "native":
            chunk = max(
                chunk, recipe.tokens / TORCHTUNE_CHUNKS * CHUNK_LOGIT_BYTES * shape.vocabulary
            )
        return (chunk + head * shape.embedding_parameters) / recipe.tensor
    per_logit = LOGIT_BYTES[loss][recipe.gathers] + CAP_BYTES * shape.softcapped
    per_logit += RETURNED_BYTES * (
        recipe.gathers and loss == "fused" and shape.layer_code.fp32_logits
    )
    logits = per_logit * shape.vocabulary / recipe.tensor
    return recipe.tokens * (logits + FINAL_NORM_BYTES * shape.hidden)


def _kept_bytes(shape: ModelShape, recipe: Recipe) -> float:
    """Returns the bytes per token that a layer keeps between forward and backward."""
    if recipe.recompute == "none":
        return layer_bytes(shape, recipe)
    if recipe.recompute.startswith("selective"):
        return selective_bytes(shape, recipe)
    element = 4.0 if recipe.fp32_stream else _stream(recipe)
    inputs = (element + 2.0 * _copies_inputs(shape, recipe)) * shape.hidden
    return inputs if recipe.recompute == "full" else (inputs + layer_bytes(shape, recipe)) / 2


def _copies_inputs(shape: ModelShape, recipe: Recipe) -> bool:
    """Returns whether FSDP1 keeps a cast copy of each layer's input. It did in 2024 for a quantised
    Llama, but not for Mistral."""
    old = recipe.loss_code.endswith("-2024") and recipe.base != "bf16" and recipe.gathers
    return old and not shape.layer_code.fp32_logits


def _activations(shape: ModelShape, recipe: Recipe) -> float:
    merged = 0.0 if recipe.recompute == "full" else merged_bytes(shape, recipe)
    # One layer computes while the tensors of another one travel.
    layers = min(2, shape.layers) if recipe.offloaded_activations else shape.layers
    tokens = layers * recipe.tokens
    return (tokens * _kept_bytes(shape, recipe) + shape.layers * merged) / recipe.tensor


def merged_bytes(shape: ModelShape, recipe: Recipe) -> float:
    """Returns the bytes of a layer's experts with their adapters added, which peft 0.21 keeps for
    backward next to the experts (`ParamWrapper`)."""
    adapter = recipe.adapter
    if adapter is None or recipe.quantised_experts or not adapter.adapts_experts(shape):
        return 0.0
    return 2.0 * shape.routed_parameters


def _stream(recipe: Recipe) -> float:
    of = STATES[recipe.precision]
    if recipe.adapter:
        return 2.0
    return of.element if recipe.sharding != "none" else of.activation


def selective_bytes(shape: ModelShape, recipe: Recipe) -> float:
    """Returns a partly recomputed layer's bytes per token: its input, attention's output, and
    outputs of all or half of the matrix products."""
    feed = shape.active_feed_forward
    products = shape.attention_width + 2 * shape.kv_width + 2 * shape.hidden
    products += feed * (2 if shape.gated else 1)
    element = _element(recipe)
    share = 0.5 if recipe.recompute == "selective-op" else 1.0
    inputs = _stream(recipe) * shape.hidden
    return inputs + element * (shape.attention_width + share * products)


def layer_bytes(shape: ModelShape, recipe: Recipe) -> float:
    """Returns a layer's bytes per token kept for backward."""
    hidden, code = shape.hidden, shape.layer_code
    norm = norm_bytes(shape, recipe)
    # The stream between layers is fp32 under autocast, and so is its normalised tensor.
    usual = 8.0 if _autocast(recipe) and not code.layer_norm else norm
    # Each LayerNorm casts a bf16 input itself.
    read = code.norm_outputs if recipe.adapter else code.norm_inputs
    norms = usual * read * hidden + norm * shape.further_normalised
    # Gradients of the routing weights need what experts return, and those of experts their inputs.
    routed = shape.routed_width + hidden * (shape.shared_feed_forward > 0)
    if recipe.adapter is None or recipe.adapter.adapts_experts(shape):
        routed += shape.routed_width
    masks = float(code.dropouts * hidden)
    products = _input_bytes(shape, recipe) + _feed_bytes(shape, recipe)
    attention = _attention_bytes(shape, recipe)
    return norms + products + attention + _element(recipe) * routed + masks


def _input_bytes(shape: ModelShape, recipe: Recipe) -> float:
    """Returns the bytes of the norms' outputs, as inputs of products, and of adapters' tensors.

    Autocast casts the input of every matrix separately.
    """
    hidden = shape.hidden
    if recipe.adapter:
        matrices = recipe.adapter.matrices(shape)
        inputs = 2.0 * sum(size for name, (size, _) in matrices.items() if name != "down")
        # The input of the router's adapter.
        inputs += 2.0 * hidden * recipe.adapter.adapts_experts(shape)
        if recipe.library == "litgpt" and recipe.base != "bf16":
            inputs += QUANTISED_LITGPT_BYTES * hidden
        # DoRA scales both the target's output and the adapter's, and keeps them for backward.
        return inputs + (4.0 * recipe.adapter.outputs(shape) if recipe.adapter.dora else 0.0)
    if _autocast(recipe):
        fused = shape.layer_code.fused
        return 2.0 * hidden * ((1 if fused else 3) + (2 if shape.gated and not fused else 1))
    return _element(recipe) * hidden * shape.layer_code.norm_outputs


def _attention_bytes(shape: ModelShape, recipe: Recipe) -> float:
    """Returns the bytes of queries, keys, values, output and what else attention keeps."""
    width, keys, code = shape.attention_width, shape.kv_width, shape.layer_code
    element = _element(recipe)
    scores = _score_bytes(shape, recipe) * _scores(shape, recipe) / recipe.tokens
    if code.repeated_keys or _softcapped(shape, recipe):
        keys = width
    saved = 3.0 * width if code.attention != "fused" else width + 2.0 * keys
    saved *= 4.0 if code.attention == "math" else element
    if code.attention == "fused" or recipe.adapter is None:
        saved += element * width
    if code.copied_output and recipe.adapter is None:
        saved += element * width
    masks = code.mask + shape.heads * (code.alibi and _autocast(recipe))
    rotated = code.whole_projection and not (code.separate_bias and _autocast(recipe))
    saved += element * ((width + shape.kv_width) * rotated + recipe.sequence * masks)
    return saved + 4.0 * shape.heads + scores


def _feed_bytes(shape: ModelShape, recipe: Recipe) -> float:
    """Returns the bytes of the feed-forward block between its products. A gated block keeps both
    factors, the activated gate and the product. CUDA's autocast computes powers in fp32, which
    makes later tensors of NewGELU fp32."""
    element, feed = _element(recipe), shape.active_feed_forward
    activation = shape.layer_code.activation
    if recipe.compiled:
        # torch.compile computes elementwise work again in backward.
        return element * feed * (2 if shape.gated else 1)
    if shape.gated:
        within = 3 * element
    elif activation in STEPWISE:
        within = 14.0 if _casts(recipe) else 4 * element
    elif activation == "relu" and recipe.adapter is None:
        # Its output is what the next product keeps.
        within = 0.0
    else:
        within = 4.0 if shape.layer_code.separate_bias and _autocast(recipe) else element
    adapter = recipe.adapter
    if adapter and not adapter.adapts_experts(shape):
        product_input, _ = adapter.matrices(shape).get("down", (0, 0))
    else:
        product_input = feed
    return within * feed + element * product_input


def _autocast(recipe: Recipe) -> bool:
    """Returns whether products cast fp32 states; FSDP casts whole layers instead."""
    return recipe.precision == "bf16" and recipe.sharding == "none" and recipe.adapter is None


def _casts(recipe: Recipe) -> bool:
    """Returns whether training runs under autocast, as with adapters."""
    return recipe.adapter is not None or _autocast(recipe)


def _element(recipe: Recipe) -> float:
    return 2.0 if recipe.adapter else STATES[recipe.precision].element


def _scores(shape: ModelShape, recipe: Recipe) -> float:
    """Returns the number of a layer's attention scores; 0 if attention is fused."""
    if not _score_bytes(shape, recipe):
        return 0.0
    return float(shape.heads) * recipe.sequence * recipe.tokens


def _score_bytes(shape: ModelShape, recipe: Recipe) -> float:
    """Returns the bytes kept per attention score.

    fp32: 4 each for the softmax and a softcap's tanh. bf16: 4 for the softmax, 2 for its copy, 2
    for the tanh. torch's fallback computes in fp32.
    """
    if _softcapped(shape, recipe):
        return 8.0
    fp32 = _element(recipe) == 4.0
    return {"fused": 0.0, "eager": 4.0 if fp32 else 6.0, "math": 4.0}[shape.layer_code.attention]


def _softcapped(shape: ModelShape, recipe: Recipe) -> bool:
    """Returns whether attention has a softcap, which transformers' default does not fuse."""
    return shape.softcapped and recipe.library != "native"


def norm_bytes(shape: ModelShape, recipe: Recipe) -> float:
    """Returns the bytes per element that a norm keeps for backward, without its output. LayerNorm
    and fused norms keep the input alone, transformers' RMSNorm an fp32 copy. If the norm is
    trained, it also keeps the normalised tensor, in the type in which it applies the weight."""
    fp32 = _element(recipe) == 4.0
    if shape.layer_code.layer_norm:
        return 4.0 if fp32 or _casts(recipe) else 2.0
    if recipe.library in ("native", "fused") or recipe.compiled:
        return 4.0 if fp32 else 2.0
    if recipe.adapter:
        return 4.0
    return 8.0 if fp32 or shape.fp32_norms else 6.0
