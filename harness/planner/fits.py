from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from harness.cell.errors import UsageError
from harness.host.gpu_models import TERA, GpuModel
from harness.planner.cluster.anchor import USUAL_FACTOR, Anchor
from harness.planner.cluster.device_rates import (
    HOPPER,
    USUAL_SHARE,
    WIRE_SHARE,
    best_products,
    bytes_per_second,
    inside_node,
)
from harness.planner.cluster.footprint import (
    MOST_CERTAIN,
    footprint,
    host_bytes,
    merged_bytes,
    spread,
    usable_bytes,
)
from harness.planner.cluster.model_shape import ModelShape
from harness.planner.cluster.recipe import (
    ALL_LINEAR,
    STATES,
    STORED,
    Adapter,
    Precision,
    Recipe,
    quantised_parameters,
    trained_parameters,
)

Verdict = Literal["yes", "no", "uncertain"]
Method = Literal["full", "lora", "dora", "qlora", "qdora"]

SURE, HARDLY = 0.9, 0.1
MEASURED_SPREAD, LESS_CERTAIN = 0.1, 0.95
"""Spread of log peak memory up to which setups count as measured, and the maximum probability of
other setups."""
MOST_SEQUENCE, STEP = 2**20, 256
MOST_BATCH = 1024
PER_NODE, USUAL_NETWORK = 8, "400gbit"
"""GPUs of a node, and each one's rate to other nodes if no link is given."""
MEASURED_SEQUENCES, MEASURED_GPUS = (1024, 8192), ("a100", "h100", "h200")
FUSED: tuple[dict[str, str], ...] = ({}, {"library": "fused", "loss": "chunked"})
"""Plain code, and fused norms with a loss that makes no logits (Liger)."""


@dataclass(frozen=True)
class Option:
    """One change to the question, and its outcome."""

    name: str
    """Changed field: batch, precision, method, seq or gpus."""
    value: str
    fits: float
    margin_bytes: float
    tokens_per_second: float


@dataclass(frozen=True)
class OffloadedFit:
    """Memory that training needs with its states in host memory."""

    fits: float
    peak_bytes: float
    host_bytes: float
    """Host memory of all GPUs together."""


@dataclass(frozen=True)
class FitAnswer:
    verdict: Verdict
    fits: float
    recipe: Recipe
    peak_bytes: float
    """Bytes that torch's allocator needs, with fragmentation."""
    allocated_bytes: float
    """Peak of the tensors alone (`max_memory_allocated`)."""
    usable_bytes: float
    host_bytes: float
    """Host memory of all GPUs together, for what the recipe offloads."""
    tokens_per_second: float
    """Throughput of all GPUs together."""
    tokens_low: float
    tokens_high: float
    """Upper bound of the 80% interval of `tokens_per_second`; `tokens_low` is the lower bound."""
    longest_sequence: int
    largest_batch: int
    turn_on: tuple[str, ...]
    """Differences from plain training, cheapest first."""
    remedies: tuple[Option, ...]
    """Changes that would make it fit, cheapest first."""
    offload: OffloadedFit | None
    """What the training needs with offload. None if it surely fits without offload, or does not
    surely fit with it."""
    one_gpu_tokens_per_second: float | None
    """Throughput of one GPU alone. None if one GPU does not suffice."""
    anchor: Anchor | None
    """Correction of all speeds by the user's own runs; None if there are none."""

    @property
    def margin_bytes(self) -> float:
        return self.usable_bytes - self.peak_bytes


@dataclass(frozen=True)
class FitQuestion:
    shape: ModelShape
    gpu: GpuModel
    gpus: int
    method: Method
    sequence: int
    micro_batch: int
    precision: Precision
    rank: int
    link_bytes_per_second: Callable[[int], float]
    """Bus bytes per second of gathers, as a function of the number of GPUs."""
    anchor: Anchor | None = None
    """Correction of the speed by the user's own runs. None if there are none."""
    measured: str = ""
    """Folder of the runs that measured this GPU's rates; empty if they are a data sheet's."""
    fixed: Mapping[str, object] = field(default_factory=dict)
    """Fields of the recipe, and an adapter's targets, that the user chose."""

    def __post_init__(self) -> None:
        if self.precision == "pure-bf16-fused" and self.fixed.get("accumulation", 1) != 1:
            raise UsageError(
                f"precision {self.precision} updates in backward, so it cannot accumulate"
                " gradients; use accumulation 1"
            )
        if "dora" in self.method and Adapter().adapts_experts(self.shape):
            raise UsageError(
                f"model {self.shape.name!r}: peft has no DoRA for routed experts; use the"
                " method lora or qlora"
            )

    @property
    def codes(self) -> tuple[dict[str, str], ...]:
        """Plain and fused code, or only the code that the user chose."""
        return FUSED[:1] if {"library", "loss"} & {*self.fixed} else FUSED

    def recipe(self, **fields: object) -> Recipe:
        """Returns a recipe with these fields; what the user chose takes precedence."""
        fixed = {**self.fixed}
        targets = fixed.pop("targets", ALL_LINEAR)
        base = fixed.pop("base", "nf4-double")
        adapter = None
        if self.method != "full":
            adapter = Adapter(self.rank, targets, dora="dora" in self.method)  # type: ignore[arg-type]
        plain = Recipe(
            precision=self.precision,
            adapter=adapter,
            base=base if self.method.startswith("q") else "bf16",  # type: ignore[arg-type]
            sequence=self.sequence,
            micro_batch=self.micro_batch,
            gpus=self.gpus,
        )
        return replace(plain, **{**fields, **fixed})  # type: ignore[arg-type]


def probability(question: FitQuestion, recipe: Recipe) -> float:
    """Returns the probability of fitting, which is nearer to one half for setups that were never
    measured."""
    room = usable_bytes(question.gpu, recipe.gpus) / footprint(question.shape, recipe).demand
    deviation = spread(question.shape, recipe)
    certain = 0.5 * (1 + math.erf(math.log(room) / deviation / math.sqrt(2)))
    most = MOST_CERTAIN if deviation <= MEASURED_SPREAD else LESS_CERTAIN
    return min(most, max(1 - most, certain))


def _ladder(question: FitQuestion) -> Iterator[tuple[tuple[str, ...], Recipe]]:
    """Yields different recipes and what each changes about plain training, cheapest first."""
    shardings = ("none", "full") if question.gpus > 1 else ("none",)
    tried = set()
    for fused, sharding, recompute in itertools.product(
        question.codes, shardings, ("none", "full")
    ):
        recipe = question.recipe(sharding=sharding, recompute=recompute, **fused)
        if recipe in tried:
            continue
        tried.add(recipe)
        changes = {
            "sharding": "FSDP full sharding" * (sharding == "full"),
            "recompute": "recomputation (gradient checkpointing)" * (recompute == "full"),
            "library": "fused cross-entropy and norms" * bool(fused),
        }
        free = [changes[name] for name in changes if name not in question.fixed]
        yield tuple(filter(None, free)), recipe


def _fastest(question: FitQuestion) -> tuple[tuple[str, ...], Recipe] | None:
    """Returns the fastest recipe that surely fits, and its differences from plain training.

    Fused code needs another library, so it is turned on only if nothing else suffices.
    """
    sure = [row for row in _ladder(question) if probability(question, row[1]) >= SURE]
    plain = [row for row in sure if row[1].library != "fused"]
    return max(plain or sure, key=lambda row: _rate(question, row[1]), default=None)


def answer(question: FitQuestion) -> FitAnswer:
    """Returns the fastest recipe that surely fits, else the one that needs the least memory."""
    tried = list(_ladder(question))
    text, recipe = _fastest(question) or min(
        tried, key=lambda row: footprint(question.shape, row[1]).demand
    )
    fits = probability(question, recipe)
    verdict: Verdict = "yes" if fits >= SURE else "no" if fits <= HARDLY else "uncertain"
    alone = None
    if question.gpus > 1:
        single = replace(question, gpus=1)
        best = _fastest(single)
        alone = _rate(single, best[1]) if best else None
    ladder = [r for _, r in tried]
    rate, within = speed(question, recipe)
    needed = footprint(question.shape, recipe)
    return FitAnswer(
        verdict,
        fits,
        recipe,
        needed.demand,
        needed.peak,
        usable_bytes(question.gpu, question.gpus),
        host_bytes(question.shape, recipe),
        rate,
        rate / within,
        rate * within,
        _largest(question, ladder, lambda r, n: replace(r, sequence=n), STEP, MOST_SEQUENCE),
        _largest(question, ladder, lambda r, n: replace(r, micro_batch=n), 1, MOST_BATCH),
        text,
        () if verdict == "yes" else tuple(_remedies(question)),
        None if verdict == "yes" else _offload(question),
        alone,
        question.anchor,
    )


def _offload(question: FitQuestion) -> OffloadedFit | None:
    """Returns what full sharding with offload needs, with as little fused code as possible; None if
    it does not surely fit."""
    for fused in question.codes:
        states = {"sharding": "full", "offload": True, "synchronised": True}
        recipe = question.recipe(recompute="full", **states, **fused)
        fits = probability(question, recipe)
        if fits >= SURE:
            peak = footprint(question.shape, recipe).demand
            return OffloadedFit(fits, peak, host_bytes(question.shape, recipe))
    return None


def speed(question: FitQuestion, recipe: Recipe) -> tuple[float, float]:
    """Returns tokens per second of all GPUs, and the factor that bounds the 80% interval.

    The factor is larger for what was not measured: short and long sequences, other GPUs than
    MEASURED_GPUS, links through the host, several nodes, and DeepSpeed.
    """
    rate, anchor = _rate(question, recipe), question.anchor
    if anchor:
        return rate, math.exp(anchor.half_width)
    through_host = recipe.gpus > 1 and not question.gpu.peer_bytes_per_second(2)
    unmeasured = (
        not MEASURED_SEQUENCES[0] <= recipe.sequence <= MEASURED_SEQUENCES[1],
        not question.measured and not question.gpu.host_name.startswith(MEASURED_GPUS),
        through_host or recipe.library == "deepspeed" or recipe.gpus > PER_NODE,
    )
    return rate, math.exp(math.log(USUAL_FACTOR) * (1 + sum(unmeasured)))


def _rate(question: FitQuestion, recipe: Recipe) -> float:
    link = question.link_bytes_per_second(recipe.gpus) if recipe.gpus > 1 else None
    factor = question.anchor.factor if question.anchor else 1.0
    return recipe.gpus * tokens_per_second(question.shape, recipe, question.gpu, link) / factor


def _largest(
    question: FitQuestion,
    recipes: list[Recipe],
    changed: Callable[[Recipe, int], Recipe],
    step: int,
    most: int,
) -> int:
    def fit(count: int) -> bool:
        return any(
            probability(question, changed(recipe, count * step)) >= SURE for recipe in recipes
        )

    return step * _last(fit, most // step)


def _last(fit: Callable[[int], bool], most: int) -> int:
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fit(middle) else (low, middle)
    return low


def _remedies(question: FitQuestion) -> Iterator[Option]:
    changed: list[tuple[str, str, FitQuestion]] = []
    if question.micro_batch > 1:
        changed.append(("micro-batch", "1", replace(question, micro_batch=1)))
    if question.recipe(sharding="full").whole_gradients and question.method == "full":
        fixed = {**question.fixed, "synchronised": True}
        changed.append(("set", "synchronised=yes", replace(question, fixed=fixed)))
    if question.method == "full" and question.precision != "pure-bf16":
        changed.append(("precision", "pure-bf16", replace(question, precision="pure-bf16")))
    if question.method == "full":
        changed.append(("method", "lora", replace(question, method="lora")))
    if "dora" in question.method:
        plain: Method = "qlora" if question.method == "qdora" else "lora"
        changed.append(("method", plain, replace(question, method=plain)))
    if not question.method.startswith("q"):
        changed.append(("method", "qlora", replace(question, method="qlora")))
    shorter = question.sequence // 2
    if shorter >= STEP:
        changed.append(("seq", str(shorter), replace(question, sequence=shorter)))
    for count in (2, 4, 8):
        if count > question.gpus:
            text = f"{count} x {question.gpu.host_name}"
            changed.append(("gpus", text, replace(question, gpus=count)))
    for name, value, other in changed:
        if best := _fastest(other):
            recipe = best[1]
            fits, rate = probability(other, recipe), _rate(other, recipe)
            margin = usable_bytes(other.gpu, other.gpus) - footprint(other.shape, recipe).demand
            yield Option(name, value, fits, margin, rate)


BEST_SHARE, ATTENTION_SHARE = 0.87, 0.34
"""Shares, by the cluster planner's calibration, of the best product's rate in products and of peak
in fused attention."""
LONG_FROM, LONG_SHARE = 4096, 0.6
"""Sequence from which attention's share of the peak grows, and its largest share, which QLoRA of
Llama 2 7B reaches on an A100 with 16,384 and 32,768 tokens (LLaMA-Factory's wiki, 2024)."""
AGAIN = {"none": 0.0, "selective": 0.1, "selective-op": 0.4, "half": 0.5, "full": 1.0}
"""Share of forward that backward repeats, by kind of recomputation."""
COMPILED = 3.0
"""Factor by which torch.compile reduces elementwise traffic and launches. Assumed."""
GATHER_SECONDS = 6e-3
"""Seconds in which DeepSpeed's hooks gather a layer's modules (Qwen's README, 2023)."""
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

    `link`: as for `inside_node`, and after a comma each GPU's rate to other nodes; None means the
    fastest in the GPU's data sheet, and USUAL_NETWORK. Otherwise raises UsageError.
    """
    inner, _, outer = (link or "").strip().lower().partition(",")
    inner = inner or ("nvlink" if gpu.peer_bytes_per_second(2) else "pcie")
    between = bytes_per_second(outer or USUAL_NETWORK)
    if inside_node(gpu, 2, inner) is None or between is None:
        raise UsageError(
            f"link {link!r}: give nvlink, pcie, pcie-p2p or a rate above 0 such as 450gbyte, and"
            " for several nodes a rate between them, such as nvlink,400gbit"
        )

    def rate(gpus: int) -> float:
        inside = (inside_node(gpu, min(gpus, PER_NODE), inner) or (0.0, 0.0))[1]
        others = -(-gpus // PER_NODE) - 1
        # Nodes gather inside first (Cluster.bandwidth).
        return min(inside, WIRE_SHARE * between * (gpus - 1) / others) if others else inside

    return rate


def tokens_per_second(
    shape: ModelShape, recipe: Recipe, gpu: GpuModel, link: float | None
) -> float:
    """Returns each GPU's tokens per second; `link`: collectives' bus bytes per second."""
    tokens = recipe.tokens * recipe.accumulation
    device = recipe.tokens * _seconds_per_token(shape, recipe, gpu)
    compute = max(device + _weight_passes(shape, recipe, gpu), _launches(shape, recipe))
    total = recipe.accumulation * compute
    trained = trained_parameters(shape, recipe)
    bandwidth = MEMORY_SHARE * gpu.memory_bytes_per_second
    shards = recipe.gpus if recipe.sharding != "none" else 1
    total += UPDATE_BYTES * trained / shards / bandwidth
    if recipe.gpus > 1 and link:
        total += _exchange(shape, recipe, trained, link, compute)
    return tokens / total


def launch_bound(shape: ModelShape, recipe: Recipe, gpu: GpuModel) -> bool:
    """Returns whether launching a micro-batch's kernels takes longer than computing them."""
    device = recipe.tokens * _seconds_per_token(shape, recipe, gpu)
    return _launches(shape, recipe) > device + _weight_passes(shape, recipe, gpu)


def _seconds_per_token(shape: ModelShape, recipe: Recipe, gpu: GpuModel) -> float:
    peak = gpu.half_flops_per_second
    if recipe.precision == "fp32" and not recipe.adapter:
        peak = gpu.fp32_flops_per_second or peak / 8
    again = AGAIN[recipe.recompute]
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
    if recipe.compiled:
        moved /= COMPILED
    elementwise = shape.layers * moved * (3.0 + again)
    bandwidth = MEMORY_SHARE * gpu.memory_bytes_per_second
    elementwise += 40.0 * shape.vocabulary
    return (
        products / (BEST_SHARE * reached)
        + attention / (_attention_share(recipe.sequence, peak) * peak)
        + elementwise / bandwidth
    )


def _attention_share(sequence: int, peak: float) -> float:
    """Returns the share of the peak that fused attention reaches. It grows with the sequence, but
    not on Hopper and later GPUs, which FlashAttention-2 does not use well."""
    longer = math.log2(max(1.0, sequence / LONG_FROM)) if peak < HOPPER else 0.0
    return min(LONG_SHARE, ATTENTION_SHARE + 0.13 * longer)


def _launches(shape: ModelShape, recipe: Recipe) -> float:
    seconds = LAYER_SECONDS
    if recipe.adapter:
        per_target = TARGET_SECONDS + (QUANTISED_SECONDS if recipe.base != "bf16" else 0.0)
        seconds += per_target * len(recipe.adapter.matrices(shape))
    if recipe.library == "deepspeed" and recipe.sharding == "full":
        seconds += GATHER_SECONDS
    again = {"full": 4 / 3, "half": 7 / 6}.get(recipe.recompute, 1.0)
    return shape.layers * seconds * again / (COMPILED if recipe.compiled else 1)


def _weight_passes(shape: ModelShape, recipe: Recipe, gpu: GpuModel) -> float:
    """Returns seconds for dequantising matrices, for DoRA's norms in each forward, and for adding
    adapters to experts."""
    if not recipe.adapter:
        return 0.0
    again = recipe.recompute == "full"
    moved = (2 + again) * DEQUANTISED_BYTES * (recipe.base != "bf16")
    moved += (1 + again) * NORM_BYTES * recipe.adapter.dora
    bandwidth = MEMORY_SHARE * gpu.memory_bytes_per_second
    merged = MERGED_BYTES * (3 + again) / 3 * merged_bytes(shape, recipe) * shape.layers / 2
    return (moved * quantised_parameters(shape, recipe.quantised_experts) + merged) / bandwidth


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
    gathers = 1 if recipe.sharding != "full" else 3 if recipe.recompute == "full" else 2
    moved = part * (gathers * element * shape.parameters + gradient * trained) / link
    return recipe.accumulation * max(EXPOSED * moved, moved - 0.9 * compute)
