"""A workload: a transformers model by its config with seeded random weights, its loss, and how it
can be split."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from harness.host.hidden_packages import hide
from harness.spec.errors import Refused
from harness.spec.training import Tolerance
from harness.workloads.family import Family, Kind, ModelConfig, Split

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from transformers import PretrainedConfig, PreTrainedModel

    from harness.spec.cell import Cell
    from harness.spec.training import Layout, Retained


# transformers and peft import torchao where it is installed, and importing it initialises CUDA
# where a GPU is visible. They look once.
hide("torchao")


OTHER_EXPERTS = Tolerance(
    2e-3,
    1.0,
    "in half precision rounding sends some tokens to other experts than in fp32, and these experts"
    " and their router are then trained on others",
)
"""A router's choice is not continuous: of two experts with nearly the same score rounding decides.

Verified over 13 steps of mixtral-micro and qwen3-moe-micro (8 x 64 tokens): bf16 autocast deviates
by 0.19 and 0.35, largest in the routers, with 4 % and 14 % of the tokens at other experts. Given
the experts that fp32 chooses, bf16 deviates by 0.017 and 0.032, as a model without experts does
(llama-micro: 0.032); fp32 given the experts that bf16 chooses, by 0.19 and 0.35."""


NEARLY_EQUAL_SCORES = Tolerance(
    1e-5,
    0.02,
    "the scores of two experts may be equal but for the order of additions, which then decides"
    " which of them a token is sent to",
)
"""Of mixtral-micro's 16 x 64 tokens one in step 5 had scores of its second and third expert that
are 1.1e-7 apart. DeepSpeed's stage 3 sent it to the third in each launch: the router of that block
was off by 2.5e-3 of its update, and the step's loss by 5.6e-7."""


class HasLogits(Protocol):
    """What a transformers model returns."""

    logits: Tensor


@dataclass(frozen=True, eq=False)
class Workload:
    """A model and its loss: all that a strategy may know of them.

    Strategies ask this object and never compare names of models.
    """

    name: str
    kind: Kind
    config: ModelConfig
    """Empty where the model is loaded from a folder or a hub, which has its own config."""
    family: Family | None
    """None where the model is loaded from a folder or a hub."""
    pretrained: str | None = None
    """Path or hub id that transformers loads the model from (`hf:`)."""
    image_size: int = 0
    """Height and width in pixels; 0 for text."""
    num_labels: int = 0
    """Classes of a classifier; 0 for causal models."""
    vocabulary: int = 0
    """Tokens that the model knows; 0 for images."""
    max_tokens: int = 0
    """Longest sequence; 0: no limit."""
    blocks: int = 0
    heads: int = 0
    """Attention heads (of keys and values where these are fewer), which tensor parallelism divides
    among the ranks."""
    query_heads: int = 0
    """Attention heads of queries."""
    head_width: int = 0
    """Elements of a head's query or key of one token."""
    experts: int = 0
    """Experts of each mixture of experts; 0: there is none."""
    experts_per_token: int = 0
    """Experts that each token is sent to."""
    split: Split | None = None
    block_path: str = ""
    """Path of the ModuleList of blocks, for strategies that wrap block by block; empty where it is
    not known."""
    batch_norm: bool = False
    without_zero_gradient: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor
    """See Family."""
    requires: tuple[str, ...] = ()
    """Packages beyond transformers; a missing one makes the cell `unavailable`."""

    @property
    def version(self) -> str:
        """Changes when the files of a model in a local folder change; empty where the name alone
        identifies the model."""
        folder = Path(self.pretrained or "")
        files = sorted(folder.iterdir()) if self.pretrained and folder.is_dir() else []
        return " ".join(f"{f.name} {f.stat().st_size} {f.stat().st_mtime_ns}" for f in files)

    @property
    def of_one_and_two_blocks(self) -> tuple[str, str] | None:
        """Of a model named FAMILY-HIDDENxBLOCKS, or of a variant of it, the names of those of one
        and two blocks: what it needs grows by as much with each block. None for other names, and
        where it has no more blocks itself."""
        name, plus, suffixes = self.name.partition("+")
        base, separator, blocks = name.rpartition("x")
        named_by_blocks = separator and blocks.isdecimal() and self.family and self.family.sized
        if not (named_by_blocks and self.block_path and self.blocks > 2):
            return None
        return f"{base}x1{plus}{suffixes}", f"{base}x2{plus}{suffixes}"

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states between two blocks."""
        if self.family is None:
            return int(self.hf_config().hidden_size)
        return int(self.config[self.family.hidden_size_key])

    def hf_config(self) -> PretrainedConfig:
        """A new transformers config, without key-value cache and without dropout, whose random
        numbers would differ between layouts of the same training."""
        import transformers

        if self.pretrained:
            config: PretrainedConfig = transformers.AutoConfig.from_pretrained(
                self.pretrained, trust_remote_code=False
            )
            for name, value in vars(config).items():
                if "drop" in name and isinstance(value, float):
                    setattr(config, name, 0.0)
            config.use_cache = False
            return config
        assert self.family is not None
        of_family: PretrainedConfig = getattr(transformers, self.family.config_class)(**self.config)
        return of_family

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
        that is a GPU: billions of random numbers take a CPU minutes. An `hf:` model has its saved
        weights, unless there are none or `saved_weights` is false.
        """
        import torch

        home = device or torch.device("cpu")
        origin = drawn_on or home
        gpus = [origin] if origin.type == "cuda" else []
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=gpus))
            for gpu in gpus:
                stack.enter_context(gpu)
            torch.manual_seed(seed)
            built: nn.Module = self._new_model(saved_weights).train()
        if not gpus:
            return built
        built = built.to(home)
        if home.type != "cuda":
            # The GPU only drew the weights: its memory is the training ranks'.
            torch.cuda.empty_cache()
        return built

    def _new_model(self, saved_weights: bool) -> PreTrainedModel:
        """The model by its transformers class, with saved weights or weights drawn now."""
        import torch
        import transformers

        config = self.hf_config()
        model: PreTrainedModel
        if self.pretrained is None:
            assert self.family is not None
            model = getattr(transformers, self.family.model_class)(config)
            return model
        auto = (
            transformers.AutoModelForCausalLM
            if self.kind == "causal"
            else transformers.AutoModelForSequenceClassification
        )
        if saved_weights and has_weights(self.pretrained):
            model = auto.from_pretrained(
                self.pretrained, config=config, dtype=torch.float32, trust_remote_code=False
            )
        else:
            model = auto.from_config(config)  # type: ignore[no-untyped-call]
        return model

    def logits(self, model: Callable[[Tensor], Tensor | HasLogits], inputs: Tensor) -> Tensor:
        """What the model computes for these inputs; `model` may be wrapped, and return a tensor."""
        output = model(inputs)
        return cast("Tensor", getattr(output, "logits", output))

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Mean cross entropy in fp32, also of half-precision logits.

        `logits`: (samples, tokens, vocabulary) or (samples, classes); `labels`: (samples, tokens)
        or (samples,), already shifted by one token for causal models.
        """
        from torch.nn import functional as F

        return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten())

    @property
    def suffixes(self) -> tuple[str, ...]:
        """The suffixes of its name, which make it a variant (see harness/workloads/variants.py)."""
        return ()

    @property
    def partly_frozen(self) -> bool:
        """Whether only some of its parameters are trained."""
        return False

    @property
    def arithmetic(self) -> str | None:
        """Precision of its arithmetic, `bf16` or `fp16`; None: the cell's own precision."""
        return None

    @property
    def in_fp32(self) -> str | None:
        """Name of the same workload with weights in fp32; None where this one has them in fp32."""
        return None

    def check(self, cell: Cell, shards_parameters: bool) -> None:
        """Raises Refused where the model cannot be trained with this cell's strategy or precision.

        `shards_parameters`: whether the strategy divides single parameters among the ranks.
        """

    def check_recompute(self, recompute: str) -> None:
        """Raises Refused where the model's blocks cannot be computed again in this way."""
        if not self.block_path:
            raise Refused(
                f"{self.name} does not say which modules its blocks are, and recomputation is block"
                " by block; use a gpt2, llama or bert workload, or recompute none"
            )

    def blocks_of(self, model: nn.Module) -> list[nn.Module]:
        """The blocks of a model that `build` made; none where the workload does not say which they
        are."""
        return list(model.get_submodule(self.block_path).children()) if self.block_path else []

    @property
    def mixture_path(self) -> str:
        """Path of the mixture of experts within a block, with the modules `gate`, the router, and
        `experts`; empty where there is none or it is not known."""
        return self.split.mixture if self.split else ""

    def mixtures_of(self, model: nn.Module) -> list[str]:
        """Paths of the mixtures of experts in a model that `build` made, one for each block."""
        ends = f".{self.mixture_path}.gate"
        names = [name for name, _ in model.named_modules()] if self.mixture_path else []
        return [name.removesuffix(".gate") for name in names if name.endswith(ends)]

    def stand_in(self, cell: Cell) -> str | None:
        """What its arithmetic is replaced by on the cell's device; None where it is the real
        one."""
        return None

    def tolerance(self, cell: Cell) -> Tolerance | None:
        """How far two correct trainings of the model may be apart; None: EXACT holds, as rounding
        does not make it more."""
        if not self.experts:
            return None
        return NEARLY_EQUAL_SCORES if cell.precision == "fp32" else OTHER_EXPERTS

    def retained(self, model: nn.Module) -> Iterator[Retained]:
        """What the model's layers keep between steps beside parameters and buffers."""
        return iter(())

    def countable(self) -> Workload:
        """A workload with the same parameters and FLOPs that can be built without memory for its
        tensors (torch's FakeTensorMode)."""
        return self

    def stored_bytes(self, model: nn.Module) -> tuple[int, int]:
        """Bytes of the parameters, and bytes of what the layers keep beside them.

        `model`: built by `countable()`.
        """
        parameters = sum(p.numel() * p.element_size() for p in model.parameters())
        return parameters, sum(b.numel() * b.element_size() for b in model.buffers())

    def check_split(self, layout: Layout) -> None:
        """Raises Refused where the model cannot be divided by this pipeline and tensor size."""
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

    def check_sequence(self, layout: Layout, tokens: int) -> None:
        """Raises Refused where samples of so many tokens cannot be divided among these
        sequence-parallel ranks."""
        ranks = layout.sequence
        if self.kind != "causal":
            raise Refused(
                f"the tokens of a sample are split over ranks, and {self.name} has one label for"
                " all of them; use a causal workload, such as a llama"
            )
        if tokens % ranks:
            raise Refused(
                f"sequences of {tokens} tokens do not divide into {ranks} equal parts; use a"
                f" multiple of {ranks} as sequence_length"
            )

    def sample_inputs(self, samples: int, sequence_length: int) -> Tensor:
        """Inputs of the right shape, all zero, for counting: (samples, tokens) ids or (samples, 3,
        size, size) pixels."""
        import torch

        if self.kind == "image":
            return torch.zeros(samples, 3, self.image_size, self.image_size)
        return torch.zeros(samples, sequence_length, dtype=torch.long)


def has_weights(path: str) -> bool:
    """Whether a local folder holds weights; a hub id is assumed to have some."""
    folder = Path(path)
    return not folder.is_dir() or any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))
