"""How a training stores its tensors, and which code runs it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from pydantic import TypeAdapter

from harness.cell.errors import UsageError
from harness.planner.cluster.model_shape import ModelShape

Precision = Literal["fp32", "bf16", "pure-bf16", "pure-bf16-fp32-reduce", "pure-bf16-fused"]
Base = Literal["bf16", "int8", "nf4", "nf4-double", "gptq4"]
Sharding = Literal["none", "optimizer", "grad", "full"]
"""What data-parallel GPUs share: nothing (DDP), optimizer states (ZeRO-1), also gradients (ZeRO-2),
or also parameters (ZeRO-3, FSDP)."""
Recompute = Literal["none", "selective", "full", "selective-op", "half"]
RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)
"""What backward recomputes: nothing, all but matrix products and attention, whole layers, every
second product too (torchtitan's selective recomputation by operator), or every second layer."""
SUITE_RECOMPUTE = RECOMPUTE[:3]
"""Recomputation that the suite's cells offer."""
Library = Literal["transformers", "transformers-2024", "fused", "native", "deepspeed", "litgpt"]
"""Code of the model. `transformers`: from 4.46 on. `transformers-2024`: before 4.46. `fused`: with
fused norms and loss. `native`: torch's own fused norm (torchtitan, torchtune). `deepspeed`: that of
transformers, sharded by DeepSpeed. `litgpt`: like that of transformers."""
Loss = Literal["plain", "plain-2024", "fused", "fused-2024", "in-place", "chunked"]
"""How the loss treats logits. `plain`: torch's cross-entropy of fp32 logits. `fused`: one kernel
for softmax and gradient. `in-place`: one kernel that writes the gradient over bf16 logits.
`chunked`: a few tokens at once, or no logits at all (Liger, cut cross-entropy, TRL, torchtune).
Names with a year are those of transformers before 4.46."""
SOFTWARE: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).parents[1].joinpath("software.yaml").read_text(encoding="utf-8")
)
"""Tables of software: bytes per logit, optimizers, and spreads of unmeasured setups."""
OPTIMIZERS: dict[str, tuple[float, float]] = SOFTWARE["optimizers"]


DEGREES = "pipeline tensor context expert chunks offload"
"""What programs may combine with data parallelism."""
UNTIED: frozenset[Library] = frozenset({"litgpt"})
"""Libraries whose head and embedding are never one matrix."""


@dataclass(frozen=True)
class Program:
    """A program that trains layouts, described by how it differs from torch's own code."""

    zero: tuple[int, ...] = (0, 1, 2, 3)
    """Stages of ZeRO that it has."""
    offers: tuple[str, ...] = tuple(DEGREES.split())
    """What it can combine with data parallelism."""
    library: Library = "native"
    loss: Loss | None = None
    """Code of the loss. None means the library's."""
    synchronised: bool = False
    """Whether every micro-batch reduces gradients with ZeRO 2 and 3."""
    calibrated: bool = False
    """Whether the built-in calibration was fitted to it."""
    time: Mapping[str, float] = field(default_factory=dict)
    """Factors of the step time's constants."""
    hopper: Mapping[str, float] = field(default_factory=dict)
    """Further factors on Hopper and later GPUs."""


PROGRAMS = TypeAdapter(dict[str, Program]).validate_python(SOFTWARE["programs"])
"""Programs by name. The empty name stands for torch's own code."""


def plain(name: object) -> str:
    """Returns the letters and digits of a name, in lower case."""
    return re.sub(r"[^a-z0-9]", "", str(name).lower())


def named(what: str, text: str, names: Iterable[str]) -> str:
    """Returns which name is meant, without regard to capitals and hyphens. Raises UsageError, which
    names the nearest, if it is unknown."""
    by_plain = {plain(name): name for name in names if name}
    if found := by_plain.get(plain(text)):
        return found
    near = difflib.get_close_matches(plain(text), by_plain, 1)
    hint = f"; did you mean {by_plain[near[0]]}?" if near else ""
    names = ", ".join(by_plain.values())
    raise UsageError(f"{what} {text!r} is unknown{hint}; give one of {names}")


@dataclass(frozen=True)
class StateBytes:
    """Bytes per trained parameter."""

    parameter: float
    gradient: float
    optimizer: float
    """Adam's two moments."""
    activation: float
    """Bytes per element of the hidden states between layers."""
    element: float
    """Bytes per parameter and activation in matrix products."""

    @property
    def updated(self) -> float:
        """Bytes that only the update needs: moments, and parameters that products do not use."""
        return self.optimizer + (self.parameter if self.parameter != self.element else 0.0)

    @property
    def reduced(self) -> float:
        """Bytes per gradient in collectives."""
        return self.gradient or self.element


STATES: dict[Precision, StateBytes] = {
    "fp32": StateBytes(4, 4, 8, 4, 4),
    "bf16": StateBytes(4, 4, 8, 4, 2),
    "pure-bf16": StateBytes(2, 2, 4, 2, 2),
    "pure-bf16-fp32-reduce": StateBytes(2, 4, 4, 2, 2),
    "pure-bf16-fused": StateBytes(2, 0, 4, 2, 2),
}
"""`bf16` is autocast: fp32 states, bf16 products. `pure-bf16-fused` updates during backward, so it
cannot accumulate gradients."""

SUITE_CELLS: dict[Precision, tuple[str, str]] = {
    "fp32": ("", "fp32"),
    "bf16": ("", "bf16"),
    "pure-bf16": ("+bf16", "fp32"),
}
"""Workload suffix and precision of the suite's cells."""

STORED: dict[Base, tuple[float, float]] = {
    "bf16": (2.0, 0.0),
    "int8": (1.0, 0.002),
    "nf4": (0.5, 4 / 64),
    "nf4-double": (0.5, 1 / 64 + 4 / (64 * 256)),
    "gptq4": (0.5, 2.5 / 128),
}
"""Bytes of a frozen matrix element and of its scales. int8 has a scale per row, nf4 one per 64
elements, doubly quantised in blocks of 256 (QLoRA, arXiv 2305.14314, section 3). GPTQ (arXiv
2210.17323) has one per 128. bitsandbytes shards only the elements."""


def precision_named(text: str) -> Precision:
    if text not in STATES:
        raise UsageError(f"precision {text!r}: give one of {', '.join(STATES)}")
    return text


ATTENTION = ("q", "k", "v", "qkv", "o")
ALL_LINEAR = (*ATTENTION, "gate", "up", "gate_up", "down")


@dataclass(frozen=True)
class Adapter:
    """LoRA (arXiv 2106.09685) with fp32 parameters and moments, as in peft."""

    rank: int = 16
    targets: tuple[str, ...] = ALL_LINEAR
    dora: bool = False
    """Whether each target also learns the norms of its rows (DoRA, arXiv 2402.09353)."""

    def parameters(self, shape: ModelShape) -> int:
        """Returns rank x (inputs + outputs), summed over target matrices. Each expert has matrices
        of its own; the matrix that joins gate and up has twice the rank (peft 0.21)."""
        per_layer = sum(sum(sizes) for sizes in self.matrices(shape).values())
        if self.adapts_experts(shape):
            hidden, feed = shape.hidden, shape.feed_forward
            gates = 2 if shape.gated else 1
            per_layer += shape.experts * (gates * (hidden + gates * feed) + feed + hidden)
            per_layer += hidden + shape.experts
        return shape.layers * (self.rank * per_layer + self.dora * self.outputs(shape))

    def adapts_experts(self, shape: ModelShape) -> bool:
        """Returns whether routed experts and their router have adapters."""
        return shape.experts > 1 and "down" in self.targets and shape.layer_code.adapted_experts

    def matrices(self, shape: ModelShape) -> dict[str, tuple[int, int]]:
        """Returns the input and output sizes of targets outside routed experts."""
        return {n: sizes for n, sizes in matrix_sizes(shape).items() if n in self.targets}

    def outputs(self, shape: ModelShape) -> int:
        return sum(output for _, output in self.matrices(shape).values())


@dataclass(frozen=True)
class Recipe:
    """A way to train on `gpus` data-parallel replicas of `tensor` ranks each."""

    precision: Precision = "pure-bf16"
    adapter: Adapter | None = None
    base: Base = "bf16"
    """Storage of the frozen matrices under an adapter."""
    gpus: int = 1
    sharding: Sharding = "none"
    recompute: Recompute = "none"
    sequence: int = 2048
    micro_batch: int = 1
    accumulation: int = 1
    synchronised: bool = False
    """Whether every micro-batch reduces gradients, so that only shards of them accumulate."""
    tensor: int = 1
    expert: int = 1
    """GPUs that share a mixture's experts."""
    library: Library = "transformers"
    loss: Loss | None = None
    """Code of the loss. None means the library's."""
    optimizer: str = "adamw"
    """One of OPTIMIZERS."""
    compiled: bool = False
    """Whether torch.compile fuses norms and other elementwise work."""
    quantised_experts: bool = False
    """Whether matrices of routed experts are quantised and adapted one by one, as before
    transformers 5."""
    fp32_embeddings: bool = False
    """Whether embedding and head of a quantised base are fp32, as after peft's
    `prepare_model_for_kbit_training`."""
    offloaded_activations: bool = False
    """Whether layers keep their activations in host memory until backward (Unsloth, torchtune)."""
    fused_optimizer: bool = True
    """Whether the update avoids a temporary copy of all parameters (torch's `fused`)."""
    fp32_stream: bool = False
    """Whether a frozen base passes fp32 between layers, as in peft's quantised models."""
    trained_tower: bool = False
    """Whether full training also changes encoders of images and sound."""
    gathered_save: bool = False
    """Whether saving a checkpoint first gathers the whole model on each GPU (FSDP1's full state
    dict without offload)."""
    offload: bool = False
    """Whether a fully sharded model's parameters, gradients and moments are in host memory (FSDP2's
    `CPUOffloadPolicy`)."""

    @property
    def tokens(self) -> int:
        """Tokens per micro-batch."""
        return self.micro_batch * self.sequence

    @property
    def gathers(self) -> bool:
        """Whether layers are gathered before use, from other GPUs or from the host."""
        return self.sharding != "none" and (self.gpus > 1 or self.offload)

    @property
    def whole_gradients(self) -> bool:
        """Whether each GPU of a sharded training keeps the gradients of all its parameters."""
        several = self.accumulation > 1 and not self.synchronised
        return self.sharding == "optimizer" or (several and self.sharding != "none")

    @property
    def loss_code(self) -> Loss:
        usual: dict[Library, Loss] = {"transformers-2024": "plain-2024", "fused": "fused"}
        return self.loss or usual.get(self.library, "plain")


def matrix_sizes(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """Returns the input and output sizes of a layer's matrices outside routed experts."""
    hidden, width, keys = shape.hidden, shape.attention_width, shape.kv_width
    feed = shape.shared_feed_forward + (shape.feed_forward if shape.experts == 1 else 0)
    fused = shape.layer_code.fused
    sizes = {"o": (width, hidden)}
    if fused:
        sizes["qkv"] = (hidden, width + 2 * keys)
    else:
        sizes |= {"q": (hidden, width), "k": (hidden, keys), "v": (hidden, keys)}
    if not feed:
        return sizes
    sizes["down"] = (feed, hidden)
    if fused and shape.gated:
        return sizes | {"gate_up": (hidden, 2 * feed)}
    sizes["up"] = (hidden, feed)
    return sizes | {"gate": (hidden, feed)} if shape.gated else sizes


def quantised_parameters(shape: ModelShape, routed: bool = False) -> int:
    """Returns parameters that quantisation applies to: those in layers' matrices.

    `routed`: whether it applies to routed experts. In transformers 5 they form three-dimensional
    parameters, which bitsandbytes leaves alone.
    """
    feed = shape.shared_parameters
    if routed or shape.experts == 1:
        feed += shape.routed_parameters
    return shape.layers * (shape.attention_parameters + feed)


def trained_parameters(shape: ModelShape, recipe: Recipe) -> int:
    if recipe.adapter:
        return recipe.adapter.parameters(shape)
    return shape.parameters + shape.tower * recipe.trained_tower
