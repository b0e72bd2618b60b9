"""A workload: a transformers model by its config with seeded random weights, its loss, and how it
can be split."""

from __future__ import annotations

import contextlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from harness.spec.errors import Refused

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from harness.spec.cell import Cell
    from harness.spec.training import Layout, Retained, Tolerance


Kind = Literal["causal", "classification", "image"]


class Split(ABC):
    """How a family's model falls into embedding, blocks and head: pipeline, tensor and 3D
    strategies read it."""

    blocks: ClassVar[str]
    """Path of the ModuleList of blocks."""
    embedding: ClassVar[tuple[str, ...]]
    """Paths of the modules that only the first stage holds."""
    head: ClassVar[tuple[str, ...]]
    """Paths of the modules that only the last stage holds."""
    tied: ClassVar[dict[str, str]] = {}
    """Name of a parameter on the last stage -> the parameter on the first stage that it is the same
    as."""

    @abstractmethod
    def embed(self, model: Any, inputs: Tensor) -> Tensor:
        """(samples, tokens) ids -> (samples, tokens, hidden)."""

    @abstractmethod
    def block(self, model: Any, block: Any, hidden: Tensor, tokens: int) -> Tensor:
        """One block; `tokens` is the whole sequence's length, also where `hidden` holds a part of
        it."""

    @abstractmethod
    def output(self, model: Any, hidden: Tensor) -> Tensor:
        """(samples, tokens, hidden) -> logits."""

    def tensor_plan(self, sequence_parallel: bool) -> dict[str, Any]:
        """Parallel styles (torch.distributed.tensor.parallel) by path within the stage's model, `*`
        for any block."""
        raise Refused(
            "this model family describes no tensor-parallel split; use a gpt2 or llama workload"
        )

    def prepare_tensor(self, model: nn.Module, size: int) -> dict[str, Callable[[Tensor], Tensor]]:
        """Exchanges what cannot be split as it is; returns how whole tensors go back to the
        workload's own layout."""
        return {}


@dataclass(frozen=True)
class Family:
    """Models of one architecture in several sizes."""

    name: str
    kind: Kind
    config_class: str
    model_class: str
    sizes: dict[str, dict[str, Any]]
    common: dict[str, Any]
    split: Split | None = None
    batch_norm: bool = False
    image_size: Callable[[str], int] = lambda size: 0
    sized: Callable[[int, int], dict[str, Any]] | None = None
    """(hidden size, blocks) -> the size named `HIDDENxBLOCKS`, for families that grow block by
    block."""
    without_zero_gradient: Callable[[str, Any], Any] = lambda name, tensor: tensor
    """(parameter name, tensor) -> the tensor without directions whose gradient is analytically
    zero."""

    def size(self, name: str) -> dict[str, Any] | None:
        """What the config of this size says; None where there is no such size."""
        numbers = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", name)
        if numbers and self.sized:
            return self.sized(int(numbers[1]), int(numbers[2]))
        return self.sizes.get(name)


@dataclass(frozen=True, eq=False)
class Workload:
    """Model + loss. Everything a strategy may ask of the model, without naming one."""

    name: str
    kind: Kind
    config: dict[str, Any]
    family: Family | None
    pretrained: str | None = None
    """Path or hub id of a model with weights of its own (`hf:`)."""
    image_size: int = 0
    num_labels: int = 0
    vocabulary: int = 0
    max_tokens: int = 0
    blocks: int = 0
    heads: int = 0
    """Attention heads (of keys and values where they are fewer): what tensor parallelism deals out.
    """
    split: Split | None = None
    block_path: str = ""
    """Path of the ModuleList of blocks, for strategies that wrap block by block; empty where it is
    not known."""
    batch_norm: bool = False
    without_zero_gradient: Callable[[str, Any], Any] = field(default=lambda name, tensor: tensor)
    requires: tuple[str, ...] = ()
    """Packages beyond transformers; a missing one makes the cell `unavailable`."""

    @property
    def version(self) -> str:
        """Tells weights in a local folder from other weights there at another time; empty where the
        name says it all."""
        folder = Path(self.pretrained or "")
        files = sorted(folder.iterdir()) if self.pretrained and folder.is_dir() else []
        return " ".join(f"{f.name} {f.stat().st_size} {f.stat().st_mtime_ns}" for f in files)

    def hf_config(self) -> Any:
        """A new transformers config: no dropout (it would make every layout another training), no
        key-value cache."""
        import transformers

        if self.pretrained:
            config = transformers.AutoConfig.from_pretrained(
                self.pretrained, trust_remote_code=False
            )
            for name, value in vars(config).items():
                if "drop" in name and isinstance(value, float):
                    setattr(config, name, 0.0)
            config.use_cache = False
            return config
        assert self.family is not None
        return getattr(transformers, self.family.config_class)(**self.config)

    def build(
        self,
        seed: int,
        device: torch.device | None = None,
        saved_weights: bool = True,
        drawn_on: torch.device | None = None,
    ) -> nn.Module:
        """The model in fp32 and training mode on `device` (the CPU by default).

        `drawn_on`: the device whose generator draws the initial weights, by default `device`
        itself. The same seed gives the same weights only on the same kind of device, so all ranks
        of a cell draw on the same kind, whatever device their model is then kept on. On a GPU cell
        that is a GPU: billions of random numbers take a CPU minutes. An `hf:` model has its own
        weights, unless there are none or `saved_weights` is false.
        """
        import torch
        import transformers

        config = self.hf_config()
        home = device or torch.device("cpu")
        origin = drawn_on or home
        gpus = [origin] if origin.type == "cuda" else []
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=gpus))
            for gpu in gpus:
                stack.enter_context(gpu)
            torch.manual_seed(seed)
            if self.pretrained is None:
                assert self.family is not None
                model = getattr(transformers, self.family.model_class)(config)
            else:
                auto: Any = (
                    transformers.AutoModelForCausalLM
                    if self.kind == "causal"
                    else transformers.AutoModelForSequenceClassification
                )
                if saved_weights and has_weights(self.pretrained):
                    model = auto.from_pretrained(
                        self.pretrained, config=config, dtype=torch.float32, trust_remote_code=False
                    )
                else:
                    model = auto.from_config(config)
        built: nn.Module = model.train()
        if not gpus:
            return built
        built = built.to(home)
        if home.type != "cuda":
            # The GPU only drew the weights: its memory is the training ranks'.
            torch.cuda.empty_cache()
        return built

    def logits(self, model: Callable[..., Any], inputs: Tensor) -> Tensor:
        out = model(inputs)
        logits: Tensor = out if hasattr(out, "flatten") else out.logits
        return logits

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Mean cross entropy; labels are already shifted for causal models. fp32, also for
        half-precision logits."""
        from torch.nn import functional as F

        return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten())

    @property
    def suffixes(self) -> tuple[str, ...]:
        """What makes it a variant of its base (see harness/workloads/variants.py)."""
        return ()

    @property
    def partly_frozen(self) -> bool:
        """Whether only some of its parameters are trained."""
        return False

    @property
    def arithmetic(self) -> str | None:
        """Precision of its arithmetic where that is not the cell's."""
        return None

    @property
    def in_fp32(self) -> str | None:
        """Name of the workload that differs by keeping its weights in fp32; None where they are."""
        return None

    def check(self, cell: Cell, shards_parameters: bool) -> None:
        """Raises Refused where this cell's strategy or precision does not go with the model.

        `shards_parameters`: whether the strategy cuts parameters into parts.
        """

    def tolerance(self, cell: Cell) -> Tolerance | None:
        """How far two correct trainings of the model may be apart, where rounding makes that more
        than EXACT."""
        return None

    def held(self, model: nn.Module) -> Iterator[Retained]:
        """What its layers keep between steps beside parameters and buffers."""
        return iter(())

    def countable(self) -> Workload:
        """The workload with the same parameters and FLOPs that can be built without memory
        (FakeTensorMode)."""
        return self

    def stored_bytes(self, model: nn.Module) -> tuple[int, int]:
        """Bytes of the parameters, and of what the layers keep beside them; `model` is built from
        `countable`."""
        parameters = sum(p.numel() * p.element_size() for p in model.parameters())
        return parameters, sum(b.numel() * b.element_size() for b in model.buffers())

    def check_split(self, layout: Layout) -> None:
        """Raises Refused where the model cannot be cut like this."""
        if self.split is None:
            raise Refused(
                f"{self.name} does not say how it can be split; use a gpt2, llama or bert workload"
            )
        if self.blocks < layout.pipeline:
            raise Refused(
                f"{self.name} has {self.blocks} blocks, too few for {layout.pipeline} stages"
            )
        if self.heads % layout.tensor:
            raise Refused(
                f"{self.name} has {self.heads} attention heads, which do not divide by"
                f" {layout.tensor}"
            )

    def sample_inputs(self, samples: int, sequence_length: int) -> Tensor:
        """Inputs of the right shape, all zero: for counting FLOPs."""
        import torch

        if self.kind == "image":
            return torch.zeros(samples, 3, self.image_size, self.image_size)
        return torch.zeros(samples, sequence_length, dtype=torch.long)


def has_weights(path: str) -> bool:
    """Whether a local folder holds weights; a hub id is taken to."""
    folder = Path(path)
    return not folder.is_dir() or any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))
