from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from harness.host.gpu_models import GpuModel
from harness.planner.cluster.anchor import USUAL_FACTOR, Anchor
from harness.planner.cluster.footprint import (
    MOST_CERTAIN,
    footprint,
    host_bytes,
    spread,
    usable_bytes,
)
from harness.planner.cluster.model_shape import ModelShape
from harness.planner.cluster.recipe import Adapter, Precision, Recipe
from harness.planner.finetune.speed import tokens_per_second
from harness.spec.errors import UsageError

Verdict = Literal["yes", "no", "uncertain"]
Method = Literal["full", "lora", "dora", "qlora", "qdora"]

SURE, HARDLY = 0.9, 0.1
MOST_SEQUENCE, STEP = 2**20, 256
MOST_BATCH = 1024


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
    usable_bytes: float
    tokens_per_second: float
    """Throughput of all GPUs together."""
    tokens_low: float
    tokens_high: float
    """Bounds of its 80 % interval."""
    longest_sequence: int
    largest_batch: int
    turn_on: tuple[str, ...]
    """Differences from plain training, cheapest first."""
    remedies: tuple[Option, ...]
    """Changes that would make it fit, cheapest first."""
    offload: OffloadedFit | None
    """None if it surely fits without offload, or does not with it."""
    one_gpu_tokens_per_second: float | None
    """Throughput of one GPU alone, if it suffices."""
    anchor: Anchor | None
    """Correction of all speeds by runs of the user's own."""

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
    """Gathers' bus bytes per second, given the number of GPUs."""
    anchor: Anchor | None = None
    """Correction of the speed by runs of the user's own. None if there are none."""

    def __post_init__(self) -> None:
        if "dora" in self.method and Adapter().adapts_experts(self.shape):
            raise UsageError(
                f"model {self.shape.name!r}: peft has no DoRA for routed experts; use the"
                " method lora or qlora"
            )

    def recipe(self, **fields: object) -> Recipe:
        adapter = Adapter(self.rank, dora="dora" in self.method) if self.method != "full" else None
        plain = Recipe(
            precision=self.precision,
            adapter=adapter,
            base="nf4-double" if self.method.startswith("q") else "bf16",
            sequence=self.sequence,
            micro_batch=self.micro_batch,
            gpus=self.gpus,
        )
        return replace(plain, **fields)  # type: ignore[arg-type]


def probability(question: FitQuestion, recipe: Recipe) -> float:
    """Returns the probability of fitting, nearer to one half for unmeasured setups."""
    room = usable_bytes(question.gpu, recipe.gpus) / footprint(question.shape, recipe).demand
    deviations = math.log(room) / spread(question.shape, recipe)
    certain = 0.5 * (1 + math.erf(deviations / math.sqrt(2)))
    return min(MOST_CERTAIN, max(1 - MOST_CERTAIN, certain))


def _ladder(question: FitQuestion) -> Iterator[tuple[tuple[str, ...], Recipe]]:
    shardings = ("none", "full") if question.gpus > 1 else ("none",)
    for fused in (False, True):
        for sharding in shardings:
            for recompute in ("none", "full"):
                steps = [
                    *(["FSDP full sharding"] if sharding == "full" else []),
                    *(["recomputation (gradient checkpointing)"] if recompute == "full" else []),
                    *(["fused cross-entropy and norms"] if fused else []),
                ]
                library = "fused" if fused else "transformers"
                yield (
                    tuple(steps),
                    question.recipe(sharding=sharding, recompute=recompute, library=library),
                )


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
    rate, anchor = _rate(question, recipe), question.anchor
    within = math.exp(anchor.half_width) if anchor else USUAL_FACTOR
    return FitAnswer(
        verdict,
        fits,
        recipe,
        footprint(question.shape, recipe).demand,
        usable_bytes(question.gpu, question.gpus),
        rate,
        rate / within,
        rate * within,
        _largest(question, ladder, lambda r, n: replace(r, sequence=n), STEP, MOST_SEQUENCE),
        _largest(question, ladder, lambda r, n: replace(r, micro_batch=n), 1, MOST_BATCH),
        text,
        () if verdict == "yes" else tuple(_remedies(question)),
        None if verdict == "yes" else _offload(question),
        alone,
        anchor,
    )


def _offload(question: FitQuestion) -> OffloadedFit | None:
    """Returns what full sharding with offload needs, with as little fused code as possible; None if
    it does not surely fit or the base is quantised."""
    if question.method.startswith("q"):
        return None
    for library in ("transformers", "fused"):
        recipe = question.recipe(sharding="full", recompute="full", offload=True, library=library)
        fits = probability(question, recipe)
        if fits >= SURE:
            peak = footprint(question.shape, recipe).demand
            return OffloadedFit(fits, peak, host_bytes(question.shape, recipe))
    return None


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
        changed.append(("batch", "1", replace(question, micro_batch=1)))
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
