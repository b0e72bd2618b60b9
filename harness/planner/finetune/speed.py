from __future__ import annotations

from collections.abc import Callable

from harness.host.gpu_models import TERA, GpuModel
from harness.planner.cluster.device_rates import USUAL_SHARE, best_products, inside_node
from harness.planner.cluster.footprint import merged_bytes
from harness.planner.cluster.model_shape import ModelShape
from harness.planner.cluster.recipe import (
    STATES,
    STORED,
    Recipe,
    quantised_parameters,
    trained_parameters,
)
from harness.spec.errors import UsageError

BEST_SHARE, ATTENTION_SHARE = 0.87, 0.34
"""Shares, by the cluster planner's calibration, of the best product's rate in products and of peak
in fused attention."""
MEMORY_SHARE = 0.85
EXPOSED = 0.5
"""Share of FSDP's communication that compute never hides."""
HIDDEN_BYTES, FEED_BYTES = 84.0, 10.0
"""Bytes per token that elementwise work in a layer's forward moves: per hidden element (norms,
rotary angles, residuals), and per feed-forward element (activation, product)."""
ADAPTER_BYTES = 13.0
"""Bytes moved per token and element of a target's input and output: casts, scaling and sum."""
UPDATE_BYTES = 22.0
DEQUANTISED_BYTES, NORM_BYTES = 4.6, 26.0
"""Bytes moved per element of a quantised matrix that is unpacked, and of a target whose norm DoRA
computes."""
MERGED_BYTES = 12.0
"""Bytes moved per element of adapted experts: a third in forward, and the rest for gradients of the
sum and of both factors."""
LAYER_SECONDS, TARGET_SECONDS, QUANTISED_SECONDS = 3e-3, 0.5e-3, 0.6e-3
"""Seconds to launch forward and backward of a layer, an adapter's target (some 36 kernels), and a
quantised matrix (unpacked in Python)."""
DDP_HIDDEN = 0.7
"""Share of compute that can hide an all-reduce."""


def link_bytes_per_second(gpu: GpuModel, link: str | None) -> Callable[[int], float]:
    """Returns gathers' bus bytes per second as a function of the number of GPUs.

    `link`: as for `inside_node`; None means the fastest in the GPU's data sheet. Otherwise raises
    UsageError.
    """
    link = link.strip().lower() if link else "nvlink" if gpu.peer_bytes_per_second(2) else "pcie"
    if inside_node(gpu, 2, link) is None:
        raise UsageError(
            f"link {link!r}: give nvlink, pcie, pcie-p2p or a rate above 0 such as 450gbyte"
        )
    return lambda gpus: (inside_node(gpu, gpus, link) or (0.0, 0.0))[1]


def tokens_per_second(
    shape: ModelShape, recipe: Recipe, gpu: GpuModel, link: float | None
) -> float:
    """Returns each GPU's tokens per second; `link`: collectives' bus bytes per second."""
    tokens = recipe.tokens * recipe.accumulation
    device = recipe.tokens * _seconds_per_token(shape, recipe, gpu)
    compute = max(device + _weight_passes(shape, recipe, gpu), _launches(shape, recipe))
    total = recipe.accumulation * compute
    trained = trained_parameters(shape, recipe)
    bandwidth = MEMORY_SHARE * (gpu.memory_bytes_per_second or 1e12)
    shards = recipe.gpus if recipe.sharding == "full" else 1
    total += UPDATE_BYTES * trained / shards / bandwidth
    if recipe.gpus > 1 and link:
        total += _exchange(shape, recipe, trained, link, compute)
    return tokens / total


def launch_bound(shape: ModelShape, recipe: Recipe, gpu: GpuModel) -> bool:
    """Returns whether launching a micro-batch's kernels takes longer than computing them."""
    device = recipe.tokens * _seconds_per_token(shape, recipe, gpu)
    return _launches(shape, recipe) > device + _weight_passes(shape, recipe, gpu)


def _seconds_per_token(shape: ModelShape, recipe: Recipe, gpu: GpuModel) -> float:
    peak = gpu.bf16_flops_per_second or gpu.fp16_flops_per_second or 1e13
    if recipe.precision == "fp32" and not recipe.adapter:
        peak = gpu.fp32_flops_per_second or peak / 8
    again = {"none": 0.0, "selective": 0.1, "selective-op": 0.4, "full": 1.0}[recipe.recompute]
    reached = best_products().get(gpu.host_name, USUAL_SHARE * peak / TERA) * TERA
    if recipe.precision == "fp32" and not recipe.adapter:
        reached = USUAL_SHARE * peak
    # A frozen matrix needs no gradient.
    passes = 1.0 + again + (1.0 if recipe.adapter else 2.0)
    used = shape.layers * shape.active_parameters
    head = 2.0 * shape.embedding_parameters * (2.0 if recipe.adapter else 3.0)
    products = 2.0 * used * passes + head
    scores = 2.0 * shape.layers * recipe.sequence * shape.attention_width
    attention = scores * (3.5 + again)
    moved = HIDDEN_BYTES * shape.hidden + FEED_BYTES * shape.active_feed_forward
    if recipe.library in ("fused", "native"):
        moved /= 3
    if recipe.adapter:
        moved += ADAPTER_BYTES * sum(map(sum, recipe.adapter.matrices(shape).values()))
    elementwise = shape.layers * moved * (3.0 + again)
    bandwidth = MEMORY_SHARE * (gpu.memory_bytes_per_second or 1e12)
    elementwise += 40.0 * shape.vocabulary
    return (
        products / (BEST_SHARE * reached)
        + attention / (ATTENTION_SHARE * peak)
        + elementwise / bandwidth
    )


def _launches(shape: ModelShape, recipe: Recipe) -> float:
    seconds = LAYER_SECONDS
    if recipe.adapter:
        per_target = TARGET_SECONDS + (QUANTISED_SECONDS if recipe.base != "bf16" else 0.0)
        seconds += per_target * len(recipe.adapter.matrices(shape))
    again = 4 / 3 if recipe.recompute == "full" else 1.0
    return shape.layers * seconds * again


def _weight_passes(shape: ModelShape, recipe: Recipe, gpu: GpuModel) -> float:
    """Returns seconds for dequantising matrices, for DoRA's norms in each forward, and for adding
    adapters to experts."""
    if not recipe.adapter:
        return 0.0
    again = recipe.recompute == "full"
    moved = (2 + again) * DEQUANTISED_BYTES * (recipe.base != "bf16")
    moved += (1 + again) * NORM_BYTES * recipe.adapter.dora
    bandwidth = MEMORY_SHARE * (gpu.memory_bytes_per_second or 1e12)
    merged = MERGED_BYTES * (3 + again) / 3 * merged_bytes(shape, recipe) * shape.layers / 2
    return (moved * quantised_parameters(shape) + merged) / bandwidth


def _exchange(
    shape: ModelShape, recipe: Recipe, trained: float, link: float, compute: float
) -> float:
    part = (recipe.gpus - 1) / recipe.gpus
    of = STATES[recipe.precision]
    gradient = 4.0 if recipe.adapter else of.reduced
    if recipe.sharding == "none":
        reduced = 2 * part * gradient * trained / link
        return max(0.1 * reduced, reduced - DDP_HIDDEN * compute)
    element = STORED[recipe.base][0] if recipe.adapter else of.element
    gathers = 3 if recipe.recompute == "full" else 2
    moved = part * (gathers * element * shape.parameters + gradient * trained) / link
    return recipe.accumulation * max(EXPOSED * moved, moved - 0.9 * compute)
