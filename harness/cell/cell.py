"""A cell: everything needed to repeat a measurement."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator
from pydantic_core import PydanticCustomError

BASELINE = "single"
"""Strategy that every other strategy is compared with: one process on one device."""
TECHNIQUES = ("micro_batches", "recompute", "compile", "checkpoint", "loss", "activations")
"""Axes that change how a strategy trains but not the result; off at their defaults."""
SAME_TRAINING = {"adamw_foreach": "adamw", "adamw_fused": "adamw"}
"""Optimizer of the reference for cells that use another implementation of it."""
RECIPE = ("clip_norm", "schedule", "decay", "labels", "dropout", "balance_weight", "documents")
"""Fields of the training recipe."""
FILLED_IN = ("defaults", "strategy_digest", "workload_digest")
"""Fields that the suite fills in."""
Setting: TypeAlias = tuple[str, Any]
SET_BEFORE_IT_WAS_AN_OPTION: Mapping[str, tuple[Setting, Setting]] = {
    "horovod": (("controller", "mpi"), ("mpi_yield_when_idle", True)),
}
"""Options by strategy that the suite once set, unnamed, whenever another option had this value."""
_NOT_IDENTITY = {"time_limit_seconds", "expect", "system"}
"""Fields excluded from the cell id, as they do not change what is measured."""


SCRIPT = "script"
"""Workload of cells whose strategy is a training script; only their controls compute it."""


def is_script(strategy: str) -> bool:
    """Returns whether a strategy's name is the path of a training script."""
    return strategy.endswith(".py")


def without_folder(name: str) -> str:
    """Strips the folder from a user's `FOLDER/FILE.py:CLASS`, and all folders but the last from a
    script's path, as versions of a script often have one name; returns other names unchanged."""
    if is_script(name):
        return "/".join(Path(name).parts[-2:])
    file, _, rest = name.rpartition(":")
    return f"{Path(file).name}:{rest}" if file.endswith(".py") else name


class Cell(BaseModel):
    """One strategy with its options, workload, number of devices, precision and batch size."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    strategy: str
    """Name of the strategy, see `bench list strategies`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the strategy; options that are left out keep their defaults."""
    defaults: dict[str, Any] = Field(default_factory=dict)
    """Default values of the options that are left out. Filled in by the suite."""
    workload: str = "llama-mini"
    """Name of the workload, see `bench list workloads`."""
    data: str = "stdlib"
    """`stdlib`, `images`, `images:FOLDER`, `text:FILE`, `parquet:FILE` or `hf:DATASET`."""
    sequence_length: int = Field(default=64, ge=2)
    """Tokens per sample (ignored by image workloads)."""
    devices: int = Field(default=1, ge=1)
    """Number of GPUs, or groups of CPU cores, that the strategy uses."""
    nodes: int = Field(default=1, ge=1)
    """Number of machines, with equally many devices each."""
    links: str = ""
    """Emulated link between the nodes: `none` (unshaped), `1gbit`, or `1gbit 1ms` (rate, one-way
    delay). If empty, the nodes use the real network."""
    strategy_digest: str = ""
    """Digest of the user's file that defines the strategy. Filled in by the suite."""
    workload_digest: str = ""
    """Digest of the user's file that defines the workload. Filled in by the suite."""
    device: DeviceType = "cpu"
    """CPU cores or GPUs."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Autocast precision, or the precision that the strategy itself sets up (AMP)."""
    regime: Literal["strong", "weak"] = "strong"
    """strong: the global batch stays constant as devices are added; weak: the batch per device
    does."""
    global_batch: int = Field(default=8, ge=1)
    """Samples per optimizer step across all devices."""
    micro_batches: int = Field(default=1, ge=1)
    """Micro-batches per rank and step: gradient accumulation, or a pipeline's micro-batches."""
    recompute: Literal["none", "selective", "full"] = "none"
    """What each block recomputes in backward: nothing, all but matrix products and attention, or
    everything."""
    compile: Literal["none", "block", "block_cudagraphs"] = "none"
    """What torch.compile compiles: nothing or each block. `block_cudagraphs` also replays kernels
    as CUDA graphs (mode `reduce-overhead`)."""
    loss: Literal["plain", "torch_linear", "liger_linear", "deepspeed_chunked"] = "plain"
    """How the loss is computed: from fp32 logits; without whole logits, by torch's
    `linear_cross_entropy` or Liger's kernel; or without fp32 copies of them, by DeepSpeed."""
    activations: Literal["device", "host"] = "device"
    """Memory in which blocks keep tensors for backward: the device, or the host (torch's
    `save_on_cpu`)."""
    checkpoint: Literal["none", "full", "sharded", "async"] = "none"
    """How the state is saved before all ranks are killed and new ranks resume from it: in one file,
    sharded by rank, or sharded while training goes on."""
    checkpoint_from: str = ""
    """Strategy and number of devices that save the checkpoint, such as `fsdp2 x2`. If empty, the
    cell saves its own."""
    optimizer: Literal["adamw", "adamw_foreach", "adamw_fused", "adamw_8bit", "muon", "sgd"] = (
        "adamw"
    )
    """AdamW (torch's default, foreach, fused or with 8-bit moments), Muon for the blocks' matrices
    with AdamW for the rest, or SGD with momentum 0.9."""
    learning_rate: float = Field(default=1e-3, gt=0)
    weight_decay: float = Field(default=0.01, ge=0)
    epsilon: float = Field(default=1e-5, gt=0)
    """AdamW's eps; the default follows Llama's recipe. At 1e-8 AdamW hides a wrong gradient scale
    and amplifies rounding noise."""
    clip_norm: float | None = Field(default=None, gt=0)
    """Global 2-norm that gradients are clipped to. If None, they are not clipped."""
    schedule: Literal["constant", "warmup", "warmup_cosine"] = "constant"
    """Learning rate over the parity segment: constant, linear warm-up, or that and cosine decay to
    10%."""
    decay: Literal["all", "matrices"] = "all"
    """Parameters with weight decay: all, or only those with at least two dimensions."""
    labels: Literal["all", "padded"] = "all"
    """Tokens with a label: all, or a prefix of random length in each sample."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Fraction of hidden states dropped after the embedding and each residual branch."""
    balance_weight: float = Field(default=0.0, ge=0)
    """Weight of the routers' load-balancing loss, computed on each rank's micro-batch."""
    documents: Literal["one", "packed"] = "one"
    """Documents per sample: one, or several with separate positions and attention."""
    seed: int = Field(default=0, ge=0)
    warmup_steps: int = Field(default=3, ge=1)
    """Number of initial steps, recorded but excluded from timings."""
    timed_steps: int = Field(default=10, ge=1)
    parity_steps: int = Field(default=13, ge=1, le=20)
    """Number of steps, from step 0, compared with the reference run."""
    launcher: Literal["elastic", "spawn"] = "elastic"
    """torchrun's elastic agent, or torch.multiprocessing.spawn."""
    threads_per_device: int = Field(default=1, ge=1)
    """Number of CPU cores, and of intra-op threads, for each device's rank."""
    memory_limit_bytes: int | None = Field(default=None, ge=1)
    """Memory limit of a rank in bytes, beyond its imports (CPU) or in total (GPU)."""
    time_limit_seconds: float = Field(default=120.0, gt=0)
    expect: Literal["ok", "diverged"] = "ok"
    """Expected parity. With `diverged`, divergence is not a failure."""
    system: str = ""
    """System that the matrix lists the cell under, such as `DeepSpeed ZeRO`."""

    @field_validator("links", mode="before")
    @classmethod
    def _normalise_link(cls, value: object) -> str:
        try:
            return link_text(value)
        except ValueError as error:
            raise PydanticCustomError("link", "{reason}", {"reason": str(error)}) from None

    @property
    def id(self) -> str:
        """Hash of non-default fields and all options: twelve hex digits, equal on every host.

        A new field keeps existing ids if its default is the old behaviour.
        """
        identity = self.model_dump(
            mode="json", exclude={"defaults", *_NOT_IDENTITY}, exclude_defaults=True
        )
        identity["options"] = {**self.defaults, **self.options}
        for field in ("strategy", "workload"):
            if f"{field}_digest" in identity:
                # The digest identifies the file, so its folder does not matter.
                identity[field] = Path(identity[field]).name
        text = json.dumps(identity, sort_keys=True)
        return hashlib.blake2s(text.encode(), digest_size=6).hexdigest()

    @property
    def set_unnamed(self) -> dict[str, Any]:
        """Option that a recorded cell was measured with although neither its options nor its
        defaults name it; see `SET_BEFORE_IT_WAS_AN_OPTION`."""
        if self.strategy not in SET_BEFORE_IT_WAS_AN_OPTION or not self.defaults:
            return {}
        (option, value), (name, hidden) = SET_BEFORE_IT_WAS_AN_OPTION[self.strategy]
        named = {**self.defaults, **self.options}
        return {name: hidden} if named.get(option) == value and name not in named else {}

    @property
    def workload_name(self) -> str:
        """The workload without the folder of a user's file."""
        return without_folder(self.workload)

    @property
    def label(self) -> str:
        """Strategy with its options, as in reports: `ddp(static_graph=true)`."""
        if is_script(self.strategy):
            arguments = self.options.get("arguments")
            return without_folder(self.strategy) + (f" {arguments}" if arguments else "")
        options = [
            f"{k}={json.dumps(v) if not isinstance(v, str) else v}"
            for k, v in sorted(self.options.items())
        ]
        options += [f"{k}={getattr(self, k)}" for k in ("launcher", *TECHNIQUES) if self.is_set(k)]
        if self.checkpoint_from:
            options.append(f"from {self.checkpoint_from}")
        if self.optimizer != "adamw":
            options.append(self.optimizer)
        return without_folder(self.strategy) + (f"({', '.join(options)})" if options else "")

    @property
    def name(self) -> str:
        """Label and further fields: `ddp(static_graph=true) llama-mini x2 fp32 batch 8`."""
        if is_script(self.strategy):
            return f"{self.label} x{self.devices}"
        weak = " weak" if self.regime == "weak" else ""
        on = f" on {self.nodes} nodes" if self.nodes > 1 else ""
        if self.links:
            on += f" {over(self.links)}"
        recipe = f" {self.recipe}" if self.recipe else ""
        return (
            f"{self.label} {self.workload_name} x{self.devices}{on} {self.precision} batch"
            f" {self.global_batch}{weak}{recipe}"
        )

    @property
    def recipe(self) -> str:
        """Recipe fields that differ from their defaults, such as `clip_norm=0.5,
        schedule=warmup_cosine`."""
        return ", ".join(f"{k}={getattr(self, k)}" for k in RECIPE if self.is_set(k))

    @property
    def plain(self) -> bool:
        """Whether the cell uses none of TECHNIQUES."""
        return not any(map(self.is_set, TECHNIQUES))

    def is_set(self, name: str) -> bool:
        """Whether a field is not at its default."""
        return bool(getattr(self, name) != type(self).model_fields[name].default)

    @property
    def moments(self) -> int:
        """Number of optimizer-state tensors per parameter."""
        return 1 if self.optimizer == "sgd" else 2

    @property
    def has_tokens(self) -> bool:
        """Whether samples are sequences of tokens; False for a user's own workload, and for a
        script unless the user says how many."""
        if is_script(self.strategy):
            return self.is_set("sequence_length")
        return not self.data.startswith("images") and not self.workload_digest

    @property
    def total_steps(self) -> int:
        """Number of steps of a trial, enough for both timing and parity."""
        return max(self.warmup_steps + self.timed_steps, self.parity_steps)

    def reference(self, strategy: str = BASELINE, options: Mapping[str, Any] | None = None) -> Cell:
        """Returns the parity reference: the same training in one process, by `strategy` with
        `options`."""
        return self.model_copy(
            update={
                "strategy": strategy,
                "options": dict(options or {}),
                "defaults": {},
                "strategy_digest": "",
                "devices": 1,
                "nodes": 1,
                "links": "",
                "regime": "strong",
                **{name: type(self).model_fields[name].default for name in TECHNIQUES},
                "optimizer": SAME_TRAINING.get(self.optimizer, self.optimizer),
                "checkpoint_from": "",
                "launcher": "elastic",
                "warmup_steps": self.parity_steps,
                "timed_steps": 1,
                "memory_limit_bytes": None,
                "expect": "ok",
                "system": "",
            }
        )


OTHER_DEVICES = {
    "mps": "Apple's GPUs are not supported, because the suite measures time, memory and processes"
    " through Linux; use cpu",
    "xpu": "Intel's GPUs are not supported, because the suite cannot measure their memory or"
    " compare their random numbers; use cpu",
}
"""Why cells do not run on torch's other device types."""


def _refuse(value: object) -> object:
    if isinstance(value, str) and value in OTHER_DEVICES:
        raise PydanticCustomError("unsupported_device", OTHER_DEVICES[value])
    return value


DeviceType: TypeAlias = Annotated[Literal["cpu", "cuda"], BeforeValidator(_refuse)]
UNSHAPED = "none"
_RATES = {"gbit": 1e9, "mbit": 1e6, "kbit": 1e3}
"""Units in bits per second."""
_DELAYS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
"""Units in seconds."""
_LEAST_RATE, _MOST_RATE, _MOST_DELAY = 1e6, 1e11, 1.0
_HOW = "write a link as none, 1gbit, 100mbit, or {rate: 1gbit, delay: 1ms}"


@dataclass(frozen=True)
class Link:
    """Rate and delay of each node's link to the switch."""

    bits_per_second: float | None = None
    """Rate per direction, including frame headers; None if unlimited."""
    delay_seconds: float = 0.0
    """One-way delay between two nodes."""

    @classmethod
    def of(cls, text: str) -> Link:
        """Parses text such as `1gbit 1ms`; raises ValueError if it is invalid."""
        if text == UNSHAPED:
            return cls()
        rate, delay = None, 0.0
        parts = text.lower().split()
        for index, word in enumerate(parts):
            match = re.fullmatch(r"(\d+(?:\.\d+)?)(?:(gbit|mbit|kbit)|(s|ms|us))", word)
            if not match or (match[2] and index > 0) or (match[3] and index < len(parts) - 1):
                raise ValueError(_HOW)
            if match[2]:
                rate = float(match[1]) * _RATES[match[2]]
            else:
                delay = float(match[1]) * _DELAYS[match[3]]
        if not parts:
            raise ValueError(_HOW)
        if rate is not None and not _LEAST_RATE <= rate <= _MOST_RATE:
            raise ValueError("the rate of a link must be from 1mbit to 100gbit")
        if delay > _MOST_DELAY:
            raise ValueError("the delay of a link must be at most 1s")
        return cls(rate, delay)

    @property
    def text(self) -> str:
        """Canonical text: `1gbit 1ms`, `100mbit`, `none`."""
        parts = [_in_units(self.bits_per_second, _RATES)] if self.bits_per_second else []
        parts += [_in_units(self.delay_seconds, _DELAYS)] if self.delay_seconds else []
        return " ".join(parts) or UNSHAPED


def over(text: str) -> str:
    """Describes a link in a cell's name: `over 1gbit (emulated)`."""
    return f"over {'unshaped links' if text == UNSHAPED else text} (emulated)"


def _in_units(value: float, units: Mapping[str, float]) -> str:
    name = next(
        (name for name, size in units.items() if value >= size * (1 - 1e-9)), list(units)[-1]
    )
    return f"{value / units[name]:.6g}{name}"


def link_text(value: object) -> str:
    """Returns a link's canonical text; empty for the real network.

    `value`: text, or a mapping with `rate`, `delay` or both. Raises ValueError if invalid.
    """
    if value is None or value == "":
        return ""
    if isinstance(value, Mapping):
        if not value or set(value) - {"rate", "delay"}:
            raise ValueError(_HOW)
        value = " ".join(
            str(value[name])
            for name in ("rate", "delay")
            if value.get(name) not in (None, UNSHAPED)
        )
        return Link.of(value).text if value else UNSHAPED
    if not isinstance(value, str):
        raise ValueError(_HOW)
    return Link.of(value).text
