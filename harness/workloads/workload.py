"""A workload: a transformers model with seeded random weights, its loss, and its split."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from harness.cell.errors import Refused, UsageError
from harness.cell.training import Tolerance
from harness.host.environment import version_of
from harness.host.folders import cache_folder
from harness.host.packages import hide
from harness.host.user_code import one_line
from harness.workloads.family import HAS_DECODER, Family, Kind, ModelConfig, Split
from harness.workloads.structure import split_sizes

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from transformers import PretrainedConfig, PreTrainedModel

    from harness.cell.cell import Cell
    from harness.cell.training import Layout, Retained


# If torchao is installed, transformers and peft import it, which initialises CUDA if a GPU is
# visible. They look for it only once.
hide("torchao")


OTHER_EXPERTS = Tolerance(
    2e-3,
    0.35,
    "in half precision, the order of additions sends some tokens to other experts, so these experts"
    " and their router are trained on other tokens",
    other_kinds=0.05,
)
"""Tolerance for routers in half precision, where rounding decides between similar scores."""
NEARLY_EQUAL_SCORES = Tolerance(
    1e-5,
    0.02,
    "two experts' scores may differ only by the order of additions, which then decides where a"
    " token goes",
)
"""Tolerance for routers in fp32 (docs/studies/parity-deviations.md)."""
_DEPTH_KEYS = ("num_hidden_layers", "n_layer")
"""Config entries with the number of blocks."""
AUTO: dict[Kind, str] = {
    "causal": "AutoModelForCausalLM",
    "masked": "AutoModelForMaskedLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "speech": "AutoModelForSpeechSeq2Seq",
    "classification": "AutoModelForSequenceClassification",
    "tokens": "AutoModelForTokenClassification",
    "image": "AutoModelForImageClassification",
}
"""Class of transformers that builds a model, by kind."""


class HasLogits(Protocol):
    logits: Tensor
    aux_loss: Tensor
    """Balancing loss of the mixture of experts. Only models that were asked for it have one."""


@dataclass(frozen=True, eq=False)
class Workload:
    """A model and its loss, as strategies see them."""

    name: str
    kind: Kind
    config: ModelConfig
    """Config entries; empty for a model from a folder or hub."""
    family: Family | None
    pretrained: str | None = None
    """Path or hub id of an `hf:` model."""
    image_size: int = 0
    """Height and width of images in pixels; 0 for text."""
    unused: tuple[str, ...] = ()
    """Names of parameters that take no part in the loss, and are not trained."""
    skipped: tuple[str, ...] = ()
    """Names of parameters that take part in the losses of some samples only."""
    repeated: tuple[str, ...] = ()
    """Names of parameters that get a gradient several times in a backward pass, as in a module that
    reentrant checkpoints run several times."""
    stateful: bool = False
    """Whether its forward changes what the next one computes, as spectral norm's does."""
    built_frozen: bool = False
    """Whether its class freezes some parameters."""
    spectrum: tuple[int, int] | None = None
    """Mel bins and frames of a speech model's input."""
    num_labels: int = 0
    vocabulary: int = 0
    """Tokens in the vocabulary; 0 for images."""
    max_tokens: int = 0
    """Maximum sequence length in tokens; 0 means no limit."""
    cannot_train: str = ""
    """Why no strategy can train it."""
    blocks: int = 0
    heads: int = 0
    """Number of heads that tensor parallelism divides: the key and value heads in grouped-query
    attention."""
    query_heads: int = 0
    head_width: int = 0
    """Elements per token in one head's query or key."""
    experts: int = 0
    experts_per_token: int = 0
    split: Split | None = None
    no_split: str = "does not say how it can be split; use a gpt2, llama or bert workload"
    block_paths: tuple[str, ...] = ()
    """Paths of the ModuleLists of blocks; empty if unknown."""
    tied: bool = False
    no_sequence: str = ""
    """Why ranks cannot share a sample's tokens; empty if they can."""
    window: int = 0
    """Number of tokens that attention is limited to; 0 means no limit. See `Structure.window`."""
    batch_norm: bool = False
    without_zero_gradient: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor
    """See `Family.without_zero_gradient`."""
    requires: tuple[str, ...] = ()
    """Packages needed beyond transformers."""

    @property
    def version(self) -> str:
        """Text that changes with a local model's files; empty if the name identifies the model."""
        folder = Path(self.pretrained or "")
        files = sorted(folder.iterdir()) if self.pretrained and folder.is_dir() else []
        return " ".join(f"{f.name} {f.stat().st_size} {f.stat().st_mtime_ns}" for f in files)

    @property
    def of_one_and_two_blocks(self) -> tuple[str, str] | None:
        """Names of the workload with one and two blocks, to extrapolate from.

        None unless the name is FAMILY-HIDDENxBLOCKS.
        """
        name, plus, suffixes = self.name.partition("+")
        base, separator, blocks = name.rpartition("x")
        named_by_blocks = separator and blocks.isdecimal() and self.family and self.family.sized
        if not (named_by_blocks and self.block_path and self.blocks > 2):
            return None
        return f"{base}x1{plus}{suffixes}", f"{base}x2{plus}{suffixes}"

    def with_blocks(self, blocks: int) -> Workload | None:
        """Returns the same model with this many blocks; None if no config entry says how many."""
        return _with_blocks(self, blocks)

    @property
    def notes(self) -> list[str]:
        """Sentences on what was found in the model, which a plan shows."""
        return []

    @property
    def block_path(self) -> str:
        """Path of the only ModuleList of blocks; empty if there is none, or several."""
        return self.block_paths[0] if len(self.block_paths) == 1 else ""

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states between blocks; 0 if the config names none."""
        if self.family is None:
            return int(getattr(self.hf_config(), "hidden_size", 0))
        return int(self.config[self.family.hidden_size_key])

    def hf_config(self) -> PretrainedConfig:
        """Returns a config without key-value cache, and without dropout, whose random numbers would
        depend on the layout."""
        import transformers

        if self.pretrained:
            config: PretrainedConfig = transformers.AutoConfig.from_pretrained(
                self.pretrained, trust_remote_code=False
            )
            without_noise(config)
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
        """Returns the model in fp32 and training mode on `device` (default: the CPU).

        `drawn_on`: device that draws the initial weights (default: `device`); a seed gives the same
        weights only on the same kind of device. An `hf:` model gets its saved weights if it has
        any, unless `saved_weights` is false.
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
            # The GPU only drew the weights, and the training ranks need its memory.
            torch.cuda.empty_cache()
        return built

    def fetch(self) -> None:
        """Downloads the files of a model on the hub, since ranks may have no network. Leaves errors
        to the ranks, which report them."""
        if self.pretrained and not Path(self.pretrained).exists():
            with contextlib.suppress(Exception):
                from huggingface_hub import snapshot_download

                unused = ["*/*", "*.h5", "*.msgpack", "*.onnx", "*.ot"]
                snapshot_download(self.pretrained, ignore_patterns=unused)

    def _new_model(self, saved_weights: bool) -> nn.Module:
        import torch
        import transformers

        from harness.workloads.dropout import without_dropout

        config = self.hf_config()
        model: PreTrainedModel
        if self.pretrained is None:
            assert self.family is not None
            model = getattr(transformers, self.family.model_class)(config)
            return model
        auto = getattr(transformers, AUTO[self.kind])
        if saved_weights and has_weights(self.pretrained):
            model = auto.from_pretrained(
                self.pretrained, config=config, dtype=torch.float32, trust_remote_code=False
            )
        else:
            model = auto.from_config(config)
        without_dropout(model)
        for name in self.unused:
            model.get_parameter(name).requires_grad_(False)
        if self.kind == "classification" and model.config.pad_token_id is None:
            # Some models look for a sample's last token before its padding, and samples have no
            # padding.
            model.config.pad_token_id = -1
        return model

    def on_meta(self) -> nn.Module:
        import torch

        with torch.device("meta"):
            return self._new_model(saved_weights=False)

    def logits(self, model: Callable[[Tensor], Tensor | HasLogits], inputs: Tensor) -> Tensor:
        """Returns logits; `model` may be wrapped and return a plain tensor."""
        return self.logits_of(self.output(model, inputs))

    @property
    def counted_samples(self) -> int:
        """Number of samples whose operations are counted."""
        return 1

    @property
    def fewest_samples(self) -> int:
        """Number of samples that a part of the batch needs, at least."""
        return 1

    @property
    def depends_on_batch(self) -> bool:
        """Whether a sample's loss depends on the other samples of its batch."""
        return False

    def counted(self, model: nn.Module, sequence_length: int) -> Tensor:
        """Returns the loss of `counted_samples`."""
        inputs, labels = self.sample(self.counted_samples, sequence_length)
        return self.loss(self.logits(model, inputs), labels)

    def sample(self, samples: int, sequence_length: int) -> tuple[Tensor, Tensor]:
        """Returns inputs and labels for counting."""
        inputs = self.sample_inputs(samples, sequence_length)
        return inputs, self.sample_labels(inputs)

    def require_trainable(self, sequence_length: int) -> None:
        """Raises UsageError if a user's own model cannot be trained; costs a few steps."""
        fits = not self.max_tokens or sequence_length <= self.max_tokens
        if self.pretrained and fits:
            require_steady(self, sequence_length)

    def output(
        self, model: Callable[..., Tensor | HasLogits], inputs: Tensor, **more: Tensor
    ) -> Tensor | HasLogits:
        """Returns the output; splits `inputs` between encoder and decoder if the model has both."""
        if self.kind in HAS_DECODER:
            inputs, target = inputs.split(_halves(inputs.shape[1]), dim=1)
            more["decoder_input_ids"] = target
        return model(made_up_spectra(inputs, *self.spectrum) if self.spectrum else inputs, **more)

    def logits_of(self, output: Tensor | HasLogits) -> Tensor:
        return cast("Tensor", getattr(output, "logits", output))

    def loss(self, logits: Tensor, labels: Tensor, label_tokens: float | None = None) -> Tensor:
        """Returns mean cross entropy, or its sum over `label_tokens`; always in fp32.

        `logits`: (samples, tokens, vocabulary) or (samples, classes); `labels`: (samples, tokens)
        or (samples,), already shifted for causal models; -100 is no label.
        """
        from torch.nn import functional as F

        rows, targets = logits.flatten(0, -2).float(), labels.flatten()
        if label_tokens is None:
            return F.cross_entropy(rows, targets)
        return F.cross_entropy(rows, targets, reduction="sum") / label_tokens

    @property
    def suffixes(self) -> tuple[str, ...]:
        """See harness/workloads/workload_variants.py."""
        return ()

    @property
    def partly_frozen(self) -> bool:
        return self.built_frozen or bool(self.unused)

    @property
    def arithmetic(self) -> str | None:
        """Precision of the arithmetic, `bf16` or `fp16`; None for the cell's precision."""
        return None

    @property
    def double(self) -> str:
        """Name of the first parameter in fp64; empty if there is none."""
        return ""

    @property
    def in_fp32(self) -> str | None:
        """Name of the same workload with fp32 weights; None if this one has them."""
        return None

    def check(self, cell: Cell, shards_parameters: bool) -> None:
        """Raises Refused if the cell's strategy or precision cannot train the model."""
        if self.cannot_train:
            raise Refused(f"{self.name} {self.cannot_train}")

    def check_recompute(self, recompute: str) -> None:
        """Raises Refused if the blocks cannot be recomputed this way."""
        if not self.block_paths:
            raise Refused(
                f"{self.name} does not say which modules are its blocks, and recomputation is"
                " block by block; use a gpt2, llama or bert workload, or recompute none"
            )

    def blocks_of(self, model: nn.Module) -> list[nn.Module]:
        return [
            block for path in self.block_paths for block in model.get_submodule(path).children()
        ]

    def dropouts_of(self, model: nn.Module) -> list[str]:
        paths = self.family.dropouts if self.family else ()
        names = [name for name, _ in model.named_modules()]
        return [name for name in names if any(fnmatch(name, path) for path in paths)]

    @property
    def mixture_path(self) -> str:
        """Path within a block, see `Split.mixture`."""
        return self.split.mixture if self.split else ""

    def mixtures_of(self, model: nn.Module) -> list[str]:
        ends = f".{self.mixture_path}.gate"
        names = [name for name, _ in model.named_modules()] if self.mixture_path else []
        return [name.removesuffix(".gate") for name in names if name.endswith(ends)]

    def stand_in(self, cell: Cell) -> str | None:
        return None

    def tolerance(self, cell: Cell) -> Tolerance | None:
        """Returns the tolerance that a correct training needs. None means EXACT."""
        if not self.experts:
            return None
        return NEARLY_EQUAL_SCORES if cell.precision == "fp32" else OTHER_EXPERTS

    def retained(self, model: nn.Module) -> Iterator[Retained]:
        """Yields what layers keep between steps beyond parameters and buffers."""
        return iter(())

    def countable(self) -> Workload:
        """Returns a workload with the same parameters and FLOPs that supports fake tensors."""
        return self

    def stored_bytes(self, model: nn.Module) -> tuple[int, int, int]:
        """Returns bytes of parameters, buffers and quantised weights' scales of a `countable`
        model."""
        parameters = sum(p.numel() * p.element_size() for p in model.parameters())
        return parameters, sum(b.numel() * b.element_size() for b in model.buffers()), 0

    def check_split(self, layout: Layout) -> None:
        """Raises Refused if the model cannot be split into these pipeline and tensor sizes."""
        if self.split is None:
            raise Refused(f"{self.name} {self.no_split}")
        if self.blocks < layout.pipeline:
            raise Refused(
                f"{self.name} has {self.blocks} blocks, too few for {layout.pipeline} stages"
            )
        if self.heads % layout.tensor:
            raise Refused(
                f"{self.name} has {self.heads} attention heads, which are not divisible by"
                f" {layout.tensor}"
            )
        if layout.tensor > 1:
            for path, size in self._split_sizes:
                if size % layout.tensor:
                    raise Refused(
                        f"{self.name}: {path} has {size} rows or columns to split, which are not"
                        f" divisible by {layout.tensor}"
                    )

    @functools.cached_property
    def _split_sizes(self) -> list[tuple[str, int]]:
        assert self.split is not None
        model = self.on_meta()
        self.split.prepare_tensor(model, 1)
        by_rows = split_sizes(model, self.split.by_column, 0)
        return [*by_rows, *split_sizes(model, self.split.by_row, 1)]

    def check_sequence(self, layout: Layout, tokens: int) -> None:
        """Raises Refused if sequence-parallel ranks cannot share samples of `tokens` tokens."""
        ranks = layout.sequence
        if self.kind != "causal":
            raise Refused(
                f"{self.name} is not a causal language model, and only those let ranks share the"
                " tokens of a sample; use a llama workload"
            )
        if tokens % ranks:
            raise Refused(
                f"sequences of {tokens} tokens do not divide into {ranks} equal parts; use a"
                f" multiple of {ranks} as sequence_length"
            )

        if self.no_sequence:
            raise Refused(f"ranks cannot share the tokens of a sample: {self.no_sequence}")
        if 0 < self.window < tokens:
            raise Refused(
                f"some blocks of {self.name} attend to only {self.window} tokens, but ranks that"
                f" share a sample's tokens attend to all {tokens}; use a sequence_length of at most"
                f" {self.window}"
            )

    def sample_inputs(self, samples: int, sequence_length: int) -> Tensor:
        """Returns zeros for counting: ids (samples, tokens) or pixels (samples, 3, size, size)."""
        import torch

        if self.kind == "image":
            return torch.zeros(samples, 3, self.image_size, self.image_size)
        return torch.zeros(samples, sequence_length, dtype=torch.long)

    def sample_labels(self, inputs: Tensor) -> Tensor:
        """Returns zeros for counting: a class per sample, or a class or id per labelled token."""
        if self.kind in ("classification", "image"):
            return inputs.new_zeros(len(inputs)).long()
        tokens = inputs.shape[1]
        return inputs.new_zeros(
            len(inputs), _halves(tokens)[1] if self.kind in HAS_DECODER else tokens
        )


@functools.cache
def _with_blocks(workload: Workload, blocks: int) -> Workload | None:
    key = next((key for key in _DEPTH_KEYS if key in workload.config), None)
    if key is None or not workload.block_path or workload.suffixes:
        return None
    config: ModelConfig = {**workload.config, key: blocks}
    return dataclasses.replace(workload, config=config, blocks=blocks)


def _halves(tokens: int) -> tuple[int, int]:
    return tokens - tokens // 2, tokens // 2


def made_up_spectra(ids: Tensor, bins: int, frames: int) -> Tensor:
    """Returns log-mel features between -1 and 1 (samples, bins, frames), with equally
    many frames per token."""
    import torch

    places = torch.arange(frames, device=ids.device) * ids.shape[1] // frames
    pitches = torch.arange(1, bins + 1, device=ids.device)[:, None]
    # Whole numbers, so that each device computes the same.
    return (ids[:, None, places] + 7) * pitches % 201 / 100 - 1


def without_noise(config: PretrainedConfig) -> None:
    """Sets dropout and jitter to 0 in a config and the configs within it."""
    from transformers import PretrainedConfig

    for name, value in list(vars(config).items()):
        if isinstance(value, PretrainedConfig):
            without_noise(value)
        elif isinstance(value, float) and ("drop" in name or "jitter" in name):
            setattr(config, name, 0.0)


def cache_file(folder: str, workload: Workload, counted: str) -> Path:
    versions = " ".join(
        str(version_of(package)) for package in ("torch", "transformers", *workload.requires)
    )
    identity = f"{workload.name} {workload.config} {counted} {versions}"
    name = hashlib.blake2s(identity.encode(), digest_size=8).hexdigest()
    return cache_folder() / folder / f"{name}.json"


MEAN_WITHIN = 1e-3
"""Relative difference allowed between a batch's loss and the mean of its samples' losses."""
REPEATED_WITHIN = 1e-5
"""Relative difference allowed between two losses of the same batch."""
MOST_TRIED = 100_000_000
"""Maximum number of parameters of a model that is tried with real tensors before a run."""


def losses_differ(a: Tensor | float, b: Tensor | float, within: float = MEAN_WITHIN) -> bool:
    return not math.isclose(float(a), float(b), rel_tol=within, abs_tol=1e-6)


@functools.cache
def require_steady(workload: Workload, sequence_length: int) -> None:
    """Raises UsageError if the loss is random, or a sample's loss depends on other samples."""
    if sum(p.numel() for p in workload.on_meta().parameters()) > MOST_TRIED:
        return
    try:
        first, again, both, alone = _losses(workload, sequence_length)
    except Exception as error:  # whatever a model raises for incompatible sizes
        raise UsageError(f"{workload.name} computes no loss ({one_line(error)})") from None
    if losses_differ(first, again, REPEATED_WITHIN):
        raise UsageError(
            f"the loss of {workload.name} is random even without dropout, and its random numbers"
            " would depend on how ranks share the batch; turn that off in its config.json"
        )
    if losses_differ(both, alone):
        raise UsageError(
            f"a sample's loss in {workload.name} depends on the other samples of its batch, which"
            " ranks would share differently; give a model whose samples are independent"
        )


def _losses(workload: Workload, sequence_length: int) -> tuple[float, float, float, float]:
    """Returns losses of two samples: twice in train mode, once in eval mode, and the mean of the
    losses one by one."""
    import torch

    model = workload.build(0, saved_weights=False)
    inputs = workload.sample_inputs(2, sequence_length)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        inputs = (
            torch.rand_like(inputs)
            if inputs.is_floating_point()
            else torch.randint_like(inputs, max(1, workload.vocabulary))
        )
        labels = workload.sample_labels(inputs)

        def loss(rows: slice) -> float:
            return float(workload.loss(workload.logits(model, inputs[rows]), labels[rows]))

        first, again = loss(slice(2)), loss(slice(2))
        model.eval()
        return first, again, loss(slice(2)), (loss(slice(1)) + loss(slice(1, 2))) / 2


WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")
"""Files in which transformers saves a model's weights."""


def has_weights(path: str) -> bool:
    """Returns whether a local folder holds weights; assumes that a hub id does."""
    folder = Path(path)
    return not folder.is_dir() or any(True for kind in WEIGHTS for _ in folder.glob(kind))
