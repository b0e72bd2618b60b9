"""A family: models of one architecture in several sizes, and how such a model can be split."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from harness.spec.errors import Refused

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.tensor.parallel import ParallelStyle

Kind = Literal["causal", "classification", "image"]
ModelConfig: TypeAlias = dict[str, Any]
"""Keyword arguments of a transformers config class."""


class Split(ABC):
    """How a family's model is divided into embedding, blocks and head, for pipeline, tensor and 3D
    parallelism.

    Paths are dotted names of modules within the model, as nn.Module.get_submodule takes them.
    """

    blocks: ClassVar[str]
    """Path of the ModuleList of blocks."""
    embedding: ClassVar[tuple[str, ...]]
    """Paths of the modules that only the first stage holds."""
    head: ClassVar[tuple[str, ...]]
    """Paths of the modules that only the last stage holds."""
    tied: ClassVar[dict[str, str]] = {}
    """Name of a parameter of the last stage -> name of the first stage's parameter that is the same
    tensor in the unsplit model."""
    by_column: ClassVar[tuple[str, ...]] = ()
    """Paths of a block's linear layers that tensor parallelism splits by their outputs; `*` stands
    for any block."""
    by_row: ClassVar[tuple[str, ...]] = ()
    """The same of those that it splits by their inputs; behind each an all-reduce adds the ranks'
    parts."""
    mixture: ClassVar[str] = ""
    """Path within a block of its mixture of experts, with the modules `gate`, the router, and
    `experts`; empty where the family has none."""
    sequence_parallel: ClassVar[bool] = False
    """Whether `tensor_plan` also describes a split of the sequence."""
    by_vocabulary: ClassVar[tuple[str, ...]] = ()
    """Paths of the layers that are split by their rows, one for each token of the vocabulary, where
    the sequence is split too."""

    @abstractmethod
    def embed(self, model: nn.Module, inputs: Tensor) -> Tensor:
        """(samples, tokens) ids -> (samples, tokens, hidden)."""

    def block(self, model: nn.Module, block: nn.Module, hidden: Tensor, tokens: int) -> Tensor:
        """(samples, tokens, hidden) -> the same shape, through one block.

        `tokens`: length of the whole sequence, of which `hidden` may be a part.
        """
        output: Tensor = block(hidden)
        return output

    @abstractmethod
    def output(self, model: nn.Module, hidden: Tensor) -> Tensor:
        """(samples, tokens, hidden) -> logits: (samples, tokens, vocabulary) of a causal model,
        (samples, classes) of a classifier."""

    def logits(self, model: nn.Module, inputs: Tensor) -> Tensor:
        """The whole model's, by its parts."""
        hidden = self.embed(model, inputs)
        for block in model.get_submodule(self.blocks).children():
            hidden = self.block(model, block, hidden, inputs.shape[1])
        return self.output(model, hidden)

    def check_tensor(self, sequence_parallel: bool) -> None:
        """Raises Refused where the family has no tensor-parallel split of this kind."""
        if not self.by_column:
            raise Refused(
                "this model family describes no tensor-parallel split; use a gpt2 or llama workload"
            )
        if sequence_parallel and not self.sequence_parallel:
            raise Refused(
                "sequence parallelism is described for llama workloads only; use one of them, or"
                " sequence_parallel=false"
            )

    def tensor_plan(self, sequence_parallel: bool) -> dict[str, ParallelStyle]:
        """Parallel style of each module by its path, in which `*` stands for any block; raises as
        `check_tensor`."""
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        self.check_tensor(sequence_parallel)
        return {
            **{name: ColwiseParallel() for name in self.by_column},
            **{name: RowwiseParallel() for name in self.by_row},
        }

    def is_split(self, parameter: str, sequence_parallel: bool = False) -> bool:
        """Whether tensor parallelism splits the parameter of this name: weights, and the biases of
        layers that are split by their outputs."""
        layer, _, kind = parameter.rpartition(".")
        by_output = (*self.by_column, *(self.by_vocabulary if sequence_parallel else ()))
        if any(fnmatch(layer, path) for path in by_output):
            return True
        return kind == "weight" and any(fnmatch(layer, path) for path in self.by_row)

    def leave_a_share(self, model: nn.Module, ranks: int, sequence_parallel: bool = False) -> None:
        """Cuts the model down to what one rank of tensor parallelism computes with, in place.

        With its part of the sequence it computes by `logits`: the model's own forward does not
        know how long the whole is.
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
        """Replaces, in place, modules that cannot be split over `size` ranks as they are.

        Returns, by parameter name, the function that turns the whole tensor back into the layout
        that the family's own model has.
        """
        return {}


@dataclass(frozen=True)
class Family:
    """Models of one architecture in several sizes."""

    name: str
    kind: Kind
    config_class: str
    """Name of the config's class in transformers."""
    model_class: str
    """Name of the model's class in transformers."""
    sizes: Mapping[str, ModelConfig]
    """What each size sets in the config."""
    common: ModelConfig
    """What all sizes set in the config."""
    split: Split | None = None
    hidden_size_key: str = "hidden_size"
    """Entry of the config that says how wide the hidden states between two blocks are."""
    batch_norm: bool = False
    """Whether the models have BatchNorm layers."""
    image_size: Callable[[str], int] = lambda size: 0
    """Size -> height and width of an image in pixels."""
    sized: Callable[[int, int], ModelConfig] | None = None
    """(hidden size, blocks) -> what the size named `HIDDENxBLOCKS` sets, for families of which any
    number of blocks can be asked for."""
    without_zero_gradient: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor
    """(parameter name, tensor) -> the tensor without the elements whose gradient is analytically
    zero: in these, rounding errors are all that two correct trainings could be compared by."""

    def size(self, name: str) -> ModelConfig | None:
        """What this size sets in the config; None where there is no such size."""
        numbers = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", name)
        if numbers and self.sized:
            return self.sized(int(numbers[1]), int(numbers[2]))
        return self.sizes.get(name)
