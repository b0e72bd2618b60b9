"""Workloads that users write themselves: a model, its batches and its loss in one class."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, Protocol, TypeVar, cast

from harness.cell.errors import UsageError
from harness.host.user_code import UserClass, first_line
from harness.workloads.structure import block_lists, has_batch_norm, key_biases, tied_parameters
from harness.workloads.workload import (
    MOST_TRIED,
    REPEATED_WITHIN,
    HasLogits,
    Workload,
    losses_differ,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from harness.workloads.family import Split

Result = TypeVar("Result")


class UserModel(Protocol):
    """Methods of a user's class, which may also have these attributes:

    - `weight(labels)`: the samples' total weight; `loss` then returns a weighted sum
    - `blocks`: paths of the lists of blocks
    - `split`: a `Split` for pipeline and tensor parallelism, with `hidden_size`
    """

    def build(self) -> nn.Module:
        """Returns the model in fp32. Torch is seeded, and new tensors are on the right device."""

    def batch(self, samples: Tensor) -> tuple[Tensor, Tensor]:
        """Returns inputs and labels of these samples on the CPU, with a row per sample.

        `samples`: sample numbers (int64), counted over all steps.
        """

    def loss(self, output: Tensor, labels: Tensor) -> Tensor:
        """Returns mean loss of the samples, given the model's output."""


@dataclass(frozen=True, eq=False, kw_only=True)
class UserWorkload(Workload):
    user: UserModel
    digest: str

    @property
    def version(self) -> str:
        return self.digest

    @property
    def hidden_size(self) -> int:
        return int(getattr(self.user, "hidden_size", 0))

    def _new_model(self, saved_weights: bool) -> nn.Module:
        from torch import nn

        from harness.workloads.dropout import without_dropout

        model: object = self.user.build()
        if not isinstance(model, nn.Module):
            self.reject(f"build() must return an nn.Module, it returned {type(model).__name__}")
        without_dropout(model)
        return model

    def logits_of(self, output: Tensor | HasLogits) -> Tensor:
        """Returns the output, in fp32 if it was in half precision."""
        import torch

        is_half = getattr(output, "dtype", None) in (torch.bfloat16, torch.float16)
        return cast("Tensor", output).float() if is_half else cast("Tensor", output)

    def loss(self, logits: Tensor, labels: Tensor, label_tokens: float | None = None) -> Tensor:
        loss = self.user.loss(logits, labels)
        shape = getattr(loss, "shape", None)
        if shape is None or len(shape):
            kind = type(loss).__name__ if shape is None else f"shape {tuple(shape)}"
            self.reject(f"loss() must return a scalar tensor, not {kind}")
        return loss if label_tokens is None else loss / label_tokens

    def weight(self, samples: Sequence[int]) -> float | None:
        """Returns the samples' total weight; None if all samples count equally."""
        weigh = getattr(self.user, "weight", None)
        return None if weigh is None else float(weigh(self.rows(samples)[1]))

    def counted(self, model: nn.Module, sequence_length: int) -> Tensor:
        inputs, labels = self.rows([0])
        return self.loss(model(inputs), labels)

    def sample_inputs(self, samples: int, sequence_length: int) -> Tensor:
        return self.rows(range(samples))[0]

    def sample_labels(self, inputs: Tensor) -> Tensor:
        return self.rows(range(len(inputs)))[1]

    def rows(self, samples: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Returns samples by number; raises UsageError if the user's batch has another shape."""
        import torch

        made = self.user.batch(torch.tensor(samples))
        if not (isinstance(made, tuple) and len(made) == 2):
            self.reject("batch() must return a tuple of inputs and labels")
        for name, part in zip(("inputs", "labels"), made, strict=True):
            if not isinstance(part, torch.Tensor):
                self.reject(
                    f"batch() must return tensors, but its {name} are {type(part).__name__}"
                )
            if part.ndim == 0 or len(part) != len(samples):
                self.reject(
                    f"batch() got {len(samples)} samples, but its {name} have shape"
                    f" {tuple(part.shape)}; their first dimension must be {len(samples)}"
                )
        return made

    def reject(self, why: str) -> NoReturn:
        raise UsageError(f"workload {self.name!r}: {why}")

    def require_trainable(self, sequence_length: int) -> None:
        """Raises UsageError if training would fail or depend on the number of ranks."""
        import torch

        model = self._try("build()", lambda: self.build(0))
        parameters = list(model.parameters())
        if not any(p.requires_grad for p in parameters):
            self.reject("build() returned a model without trainable parameters")
        if sum(p.numel() for p in parameters) > MOST_TRIED:
            return
        again = self.build(0)
        if not all(torch.equal(a, b) for a, b in zip(parameters, again.parameters(), strict=True)):
            self.reject(
                "build() returned other weights the second time; draw them from torch's generator"
            )
        self._try("training", lambda: self._loss(model, [0, 1]).backward())
        with torch.no_grad():
            first, second = self._loss(model, [0, 1]), self._loss(again, [0, 1])
            if losses_differ(first, second, REPEATED_WITHIN):
                self.reject(
                    "its loss is random, so it would depend on how ranks share the batch; use"
                    " nn.Dropout, which is turned off, or no dropout"
                )
            model.eval()
            both = self._loss(model, [0, 1])
            alone = sum(self._loss(model, [sample]) for sample in (0, 1))
        weighted = self.weight([0, 1]) is not None
        if losses_differ(both, alone if weighted else alone / 2):
            kind = "sum, as it has weight()" if weighted else "mean"
            self.reject(f"loss() must be the {kind} of the samples' losses, for any batch")

    def _loss(self, model: nn.Module, samples: Sequence[int]) -> Tensor:
        inputs, labels = self._try("batch()", lambda: self.rows(samples))
        output = self._try("the model", lambda: model(inputs))
        loss: Tensor = self._try("loss()", lambda: self.loss(output, labels))
        return loss

    def _try(self, what: str, call: Callable[[], Result]) -> Result:
        try:
            return call()
        except UsageError:
            raise
        except Exception as error:  # whatever a user's code raises
            self.reject(f"{what} failed: {first_line(error)}")


def from_class(found: UserClass) -> UserWorkload:
    """Returns the workload of a user's class; raises UsageError if it lacks a method."""
    lacks = [name for name in ("build", "batch", "loss") if not hasattr(found.loaded, name)]
    if lacks:
        raise UsageError(
            f"workload {found.name!r}: {found.loaded.__name__} has no {', '.join(lacks)}; it needs"
            " build(), batch(samples) and loss(output, labels)"
        )
    try:
        user = found.loaded()
    except Exception as error:  # whatever a user's code raises
        raise UsageError(
            f"workload {found.name!r} cannot be instantiated without arguments: {first_line(error)}"
        ) from None
    workload = UserWorkload(
        name=found.name,
        kind="custom",
        config={"digest": found.digest},
        family=None,
        user=user,
        digest=found.digest,
    )
    return _with_structure(workload)


def _with_structure(workload: UserWorkload) -> UserWorkload:

    try:
        model = workload.on_meta()
    except UsageError:
        raise
    except Exception:  # some models can only be built with real tensors
        model = workload._try("build()", lambda: workload.build(0))
    split: Split | None = getattr(workload.user, "split", None)
    blocks = getattr(workload.user, "blocks", None) or block_lists(model)
    paths = (blocks,) if isinstance(blocks, str) else tuple(blocks)
    names = {name for name, _ in model.named_modules()}
    if missing := [path for path in paths if path not in names]:
        workload.reject(f"its `blocks` names {missing[0]!r}, which its model does not have")
    return dataclasses.replace(
        workload,
        block_paths=paths,
        blocks=sum(len(list(model.get_submodule(path).children())) for path in paths),
        split=split,
        no_split="does not say how it can be split; give its class a `split`, or use ddp",
        tied=bool(tied_parameters(model)),
        batch_norm=has_batch_norm(model),
        without_zero_gradient=_without_key_biases(model),
    )


def _without_key_biases(model: nn.Module) -> Callable[[str, Tensor], Tensor]:
    """Returns a function that drops attention key biases, the middle third of
    nn.MultiheadAttention's bias."""
    import torch
    from torch import nn

    absent = frozenset(key_biases(model))
    packed = {
        f"{name}.in_proj_bias".removeprefix(".")
        for name, module in model.named_modules()
        if isinstance(module, nn.MultiheadAttention)
    }

    def without(name: str, tensor: Tensor) -> Tensor:
        if name in packed:
            query, _, value = tensor.chunk(3)
            return torch.cat([query, value])
        return tensor[:0] if name in absent else tensor

    return without
