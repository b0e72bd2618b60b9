from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from harness.cell.errors import Refused

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.tensor.parallel import ParallelStyle

Kind = Literal[
    "causal", "masked", "seq2seq", "speech", "classification", "tokens", "image", "custom"
]
"""Training objective. `causal`: next tokens. `masked`: masked tokens. `seq2seq` and `speech`: a
decoder's next tokens, after text or speech. `classification`, `tokens` and `image`: a class per
sample, token or image. `custom`: a user's own loss."""
HAS_DECODER = ("seq2seq", "speech")
ModelConfig: TypeAlias = dict[str, Any]
"""Keyword arguments of a transformers config class."""


class Split(ABC):
    """Division of a model into embedding, blocks and head. Paths are for
    nn.Module.get_submodule."""

    blocks: str
    embedding: tuple[str, ...]
    """Paths of modules on the first stage only."""
    head: tuple[str, ...]
    """Paths of modules on the last stage only."""
    by_column: tuple[str, ...] = ()
    """Paths of linear layers split by outputs; `*` stands for any block."""
    by_row: tuple[str, ...] = ()
    """Paths of linear layers split by inputs, each followed by an all-reduce."""
    mixture: str = ""
    """Path of a block's mixture of experts, with modules `gate` (router) and `experts`; empty if
    blocks have none."""
    sequence_parallel: bool = False
    """Whether `tensor_plan` can also split the sequence."""
    by_vocabulary: tuple[str, ...] = ()
    """Paths of layers that are split along with the sequence, by rows: one row per vocabulary
    token."""
    one_reduction_each: bool = True
    """Whether each split layer communicates by a single all-reduce."""
    exported: str = ""
    """Why its stages cannot be exported as a script."""

    def __init__(self, tied: Mapping[str, str] | None = None) -> None:
        """`tied`: names of shared parameters on the last stage -> on the first."""
        self.tied = dict(tied or {})

    @abstractmethod
    def stage(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        hidden: Tensor,
        tokens: int,
        *,
        first: bool,
        last: bool,
    ) -> Tensor:
        """Runs these blocks on hidden states, or on ids if `first`; returns hidden states, or
        logits if `last`."""

    def absent(self, module: nn.Module) -> nn.Module:
        from torch import nn

        return nn.Identity()

    def logits(self, model: nn.Module, inputs: Tensor) -> Tensor:
        blocks = list(model.get_submodule(self.blocks).children())
        return self.stage(model, blocks, inputs, inputs.shape[1], first=True, last=True)

    def check_tensor(self, sequence_parallel: bool) -> None:
        if not self.by_column:
            raise Refused(
                "this model family has no tensor-parallel split; use a gpt2 or llama workload"
            )
        if sequence_parallel and not self.sequence_parallel:
            raise Refused(
                "sequence parallelism is available for llama workloads only; use one of them, or"
                " sequence_parallel=false"
            )
        if sequence_parallel and self.tied:
            raise Refused(
                "sequence parallelism splits embedding and head, which share a weight in this"
                " model; use sequence_parallel=false"
            )

    def tensor_plan(self, sequence_parallel: bool) -> dict[str, ParallelStyle]:
        """Returns parallel styles by path; raises as `check_tensor` does."""
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        self.check_tensor(sequence_parallel)
        return {
            **{name: ColwiseParallel() for name in self.by_column},
            **{name: RowwiseParallel() for name in self.by_row},
        }

    def is_split(self, parameter: str, sequence_parallel: bool = False) -> bool:
        layer, _, kind = parameter.rpartition(".")
        by_output = (*self.by_column, *(self.by_vocabulary if sequence_parallel else ()))
        if any(fnmatch(layer, path) for path in by_output):
            return True
        return kind == "weight" and any(fnmatch(layer, path) for path in self.by_row)

    def leave_a_share(self, model: nn.Module, ranks: int, sequence_parallel: bool = False) -> None:
        """Reduces the model, in place, to one tensor-parallel rank's share.

        If the sequence is split, call `logits` instead of the model.
        """
        from torch.nn import Parameter

        self.prepare_tensor(model, ranks)
        for name, parameter in list(model.named_parameters()):
            if self.is_split(name, sequence_parallel):
                layer, _, kind = name.rpartition(".")
                across = int(kind == "weight" and any(fnmatch(layer, p) for p in self.by_row))
                share = parameter.chunk(ranks, across)[0].clone()
                setattr(model.get_submodule(layer), kind, Parameter(share))
        if sequence_parallel:
            from harness.workloads.sequence_share import share_sequence

            share_sequence(model, self.tensor_plan(sequence_parallel=True), ranks)

    def prepare_tensor(self, model: nn.Module, size: int) -> dict[str, Callable[[Tensor], Tensor]]:
        """Replaces modules that cannot be split over `size` ranks, in place.

        Returns functions that restore a whole tensor's layout, by parameter name.
        """
        return {}


class SplitByParts(Split):
    """Split of a model whose embedding, blocks and head run one after another."""

    @abstractmethod
    def embed(self, model: nn.Module, inputs: Tensor) -> Tensor:
        """Maps ids (samples, tokens) to hidden states (samples, tokens, hidden)."""

    def block(self, model: nn.Module, block: nn.Module, hidden: Tensor, tokens: int) -> Tensor:
        """Runs one block on hidden states (samples, tokens, hidden), keeping their shape.

        `tokens`: length of the whole sequence.
        """
        output: Tensor = block(hidden)
        return output

    @abstractmethod
    def output(self, model: nn.Module, hidden: Tensor) -> Tensor:
        """Maps hidden states to logits: (samples, tokens, vocabulary) or (samples, classes)."""

    def stage(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        hidden: Tensor,
        tokens: int,
        *,
        first: bool,
        last: bool,
    ) -> Tensor:
        if first:
            hidden = self.embed(model, hidden)
        for block in blocks:
            hidden = self.block(model, block, hidden, tokens)
        return self.output(model, hidden) if last else hidden


@dataclass(frozen=True)
class Family:
    name: str
    kind: Kind
    config_class: str
    model_class: str
    """Class names in transformers."""
    sizes: Mapping[str, ModelConfig]
    common: ModelConfig
    split: Split | None = None
    dropouts: tuple[str, ...] = ()
    """Paths of dropout layers on hidden states; `*` stands for any block. Excludes dropout in fused
    attention, which draws masks of its own."""
    hidden_size_key: str = "hidden_size"
    batch_norm: bool = False
    image_size: Callable[[str], int] = lambda size: 0
    """Height and width in pixels of a size's images."""
    sized: Callable[[int, int], ModelConfig] | None = None
    """Config entries of `HIDDENxBLOCKS`, if the family allows any depth."""
    without_zero_gradient: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor
    """Function from (parameter name, tensor) to the tensor without elements whose gradient is
    analytically zero. Their rounding errors are all that could be compared."""

    def size(self, name: str) -> ModelConfig | None:
        numbers = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", name)
        if numbers and self.sized:
            return self.sized(int(numbers[1]), int(numbers[2]))
        return self.sizes.get(name)
