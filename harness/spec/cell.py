"""A cell: everything needed to repeat a measurement."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator
from pydantic_core import PydanticCustomError

from harness.spec.link import link_text, over

BASELINE = "single"
"""Strategy that all others are compared with: one process on one device. It is part of the record
format, which is read where no strategy can be imported."""
TECHNIQUES = ("micro_batches", "recompute", "compile", "checkpoint")
"""Axes that change how a strategy trains but not what; off at their defaults."""
SAME_TRAINING = {"adamw_foreach": "adamw", "adamw_fused": "adamw"}
"""Implementations of an optimizer, and the one the reference uses."""
RECIPE = ("clip_norm", "schedule", "decay", "labels", "dropout", "balance_weight", "documents")
"""Fields of the recipe; at their defaults, the plainest training."""
_NOT_IDENTITY = {"time_limit_seconds", "expect", "system"}
"""Fields excluded from the cell id; changing them does not change what is measured."""


class Cell(BaseModel):
    """One strategy with its options, workload, number of devices, precision and batch size."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    strategy: str
    """Name of the strategy, see `bench list strategies`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the strategy; those not given keep their defaults."""
    defaults: dict[str, Any] = Field(default_factory=dict)
    """Values, when the cell was planned, of options not given. Filled in by the suite, not by a
    matrix."""
    workload: str = "llama-mini"
    """Name of the workload, see `bench list workloads`."""
    data: str = "stdlib"
    """`stdlib`, `images`, `text:FILE`, `parquet:FILE` or `hf:DATASET`."""
    sequence_length: int = Field(default=64, ge=2)
    """Tokens per sample (ignored by image workloads)."""
    devices: int = Field(default=1, ge=1)
    """Number of GPUs, or groups of CPU cores, that the strategy uses."""
    nodes: int = Field(default=1, ge=1)
    """Number of machines, with equally many devices each."""
    links: str = ""
    """Emulated links between the nodes: `none` (not shaped), `1gbit`, `1gbit 1ms` (rate, one-way
    delay); empty: the nodes' real network."""
    strategy_digest: str = ""
    """Digest of the user's file that defines the strategy, if one does. Filled in by the suite."""
    workload_digest: str = ""
    """Digest of the user's file that defines the workload, if one does. Filled in by the suite."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Type of the devices: CPU cores or GPUs."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Autocast precision, or the precision that the strategy itself sets up (AMP)."""
    regime: Literal["strong", "weak"] = "strong"
    """strong: the global batch is constant over device counts; weak: the batch per device is."""
    global_batch: int = Field(default=8, ge=1)
    """Samples per optimizer step over all devices."""
    micro_batches: int = Field(default=1, ge=1)
    """Number of parts of each rank's share of the batch: gradient accumulation, or a pipeline's
    micro-batches."""
    recompute: Literal["none", "selective", "full"] = "none"
    """What each block recomputes in the backward pass: nothing, all but matrix products and
    attention, or everything."""
    compile: Literal["none", "block", "block_cudagraphs"] = "none"
    """What torch.compile compiles before the timed steps: nothing, or each block separately;
    `block_cudagraphs` also replays kernels as CUDA graphs (mode `reduce-overhead`)."""
    checkpoint: Literal["none", "full", "sharded", "async"] = "none"
    """How the state is saved before all ranks are killed and new ones load it: in one file, in
    each rank's shards, or in shards while training goes on."""
    checkpoint_from: str = ""
    """Strategy and devices that save the checkpoint, such as `fsdp2 x2`; empty: the cell's own."""
    optimizer: Literal["adamw", "adamw_foreach", "adamw_fused", "adamw_8bit", "muon", "sgd"] = (
        "adamw"
    )
    """AdamW by torch's default, by tensor lists (foreach), in one kernel (fused) or with 8-bit
    moments; Muon for the blocks' matrices, with AdamW for the rest; or SGD with momentum 0.9."""
    learning_rate: float = Field(default=1e-3, gt=0)
    weight_decay: float = Field(default=0.01, ge=0)
    epsilon: float = Field(default=1e-5, gt=0)
    """AdamW's eps.

    The default follows Llama's recipe: at 1e-8 AdamW hides a wrong gradient scale and amplifies
    rounding noise.
    """
    clip_norm: float | None = Field(default=None, gt=0)
    """Largest 2-norm of all gradients together, to which they are clipped; None: not clipped."""
    schedule: Literal["constant", "warmup_cosine"] = "constant"
    """Learning rate over the parity segment: constant, or a linear warm-up and a cosine to 10 %."""
    decay: Literal["all", "matrices"] = "all"
    """Parameters with weight decay: all, or only those with two dimensions or more."""
    labels: Literal["all", "padded"] = "all"
    """Tokens with a label: all, or a random number of each sample's first ones."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of hidden states that is dropped after the embedding and each residual branch."""
    balance_weight: float = Field(default=0.0, ge=0)
    """Weight of the routers' balancing loss of each rank's micro-batch."""
    documents: Literal["one", "packed"] = "one"
    """Documents in each sample: one, or several, whose positions and attention are separate."""
    seed: int = Field(default=0, ge=0)
    warmup_steps: int = Field(default=3, ge=1)
    """Number of first steps, recorded but excluded from timings."""
    timed_steps: int = Field(default=10, ge=1)
    parity_steps: int = Field(default=13, ge=1, le=20)
    """Number of steps, from step 0, compared with the reference run."""
    launcher: Literal["elastic", "spawn"] = "elastic"
    """torchrun's elastic agent, or torch.multiprocessing.spawn."""
    threads_per_device: int = Field(default=1, ge=1)
    """Number of CPU cores that each device's rank is pinned to, and of its intra-op threads."""
    memory_limit_bytes: int | None = Field(default=None, ge=1)
    """Memory limit of a rank in bytes, beyond its imports (CPU) or in total (GPU)."""
    time_limit_seconds: float = Field(default=120.0, gt=0)
    expect: Literal["ok", "diverged"] = "ok"
    """Expected parity; with `diverged` a divergence is no failure."""
    system: str = ""
    """System under which the matrix files the cell, such as `DeepSpeed ZeRO`."""

    @field_validator("links", mode="before")
    @classmethod
    def _normalise_link(cls, value: object) -> str:
        try:
            return link_text(value)
        except ValueError as error:
            raise PydanticCustomError("link", "{reason}", {"reason": str(error)}) from None

    @property
    def id(self) -> str:
        """Twelve hex digits, equal for equal measurements on every host: a hash of the fields that
        are not at their defaults, and of all options.

        A new field therefore keeps the ids of existing cells, if its default is what they did.
        Defaults never change.
        """
        identity = self.model_dump(
            mode="json", exclude={"defaults", *_NOT_IDENTITY}, exclude_defaults=True
        )
        identity["options"] = {**self.defaults, **self.options}
        for field in ("strategy", "workload"):
            if f"{field}_digest" in identity:
                # The digest identifies a file, wherever it is.
                identity[field] = Path(identity[field]).name
        text = json.dumps(identity, sort_keys=True)
        return hashlib.blake2s(text.encode(), digest_size=6).hexdigest()

    @property
    def label(self) -> str:
        """Strategy with its options, as in reports: `ddp(static_graph=true)`."""
        shown = [
            f"{k}={json.dumps(v) if not isinstance(v, str) else v}"
            for k, v in sorted(self.options.items())
        ]
        shown += [f"{k}={getattr(self, k)}" for k in ("launcher", *TECHNIQUES) if self.is_set(k)]
        if self.checkpoint_from:
            shown.append(f"from {self.checkpoint_from}")
        if self.optimizer != "adamw":
            shown.append(self.optimizer)
        return self.strategy + (f"({', '.join(shown)})" if shown else "")

    @property
    def name(self) -> str:
        """Label with further fields: `ddp(static_graph=true) llama-mini x2 fp32 batch 8`."""
        weak = " weak" if self.regime == "weak" else ""
        on = f" on {self.nodes} nodes" if self.nodes > 1 else ""
        if self.links:
            on += f" {over(self.links)}"
        recipe = f" {self.recipe}" if self.recipe else ""
        return (
            f"{self.label} {self.workload} x{self.devices}{on} {self.precision} batch"
            f" {self.global_batch}{weak}{recipe}"
        )

    @property
    def recipe(self) -> str:
        """Recipe as text, such as `clip_norm=0.5, schedule=warmup_cosine`; empty by default."""
        return ", ".join(f"{k}={getattr(self, k)}" for k in RECIPE if self.is_set(k))

    @property
    def plain(self) -> bool:
        """Whether it uses no technique."""
        return not any(map(self.is_set, TECHNIQUES))

    def is_set(self, name: str) -> bool:
        """Whether a field is not at its default."""
        return bool(getattr(self, name) != type(self).model_fields[name].default)

    @property
    def moments(self) -> int:
        """Number of optimizer tensors per parameter, each of its size."""
        return 1 if self.optimizer == "sgd" else 2

    @property
    def has_tokens(self) -> bool:
        """Returns whether samples are sequences of tokens: not known of a user's own data."""
        return self.data != "images" and not self.workload_digest

    @property
    def total_steps(self) -> int:
        """Number of steps of a trial, enough for timing and for parity."""
        return max(self.warmup_steps + self.timed_steps, self.parity_steps)

    def reference(self, strategy: str = BASELINE, options: Mapping[str, Any] | None = None) -> Cell:
        """Returns the parity reference: the same training in one process, in the same precision.

        `strategy` and `options` say how that process rounds.
        """
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
