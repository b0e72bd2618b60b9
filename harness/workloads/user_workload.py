"""Workloads that users write themselves: a model, its batches and its loss in one class."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import math
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, Protocol, TypeVar, cast

from harness.cell.durable import read_cached, write_cached
from harness.cell.errors import Refused, UsageError
from harness.cell.training import Tolerance, of_each_tensor
from harness.host.user_code import UserClass, first_line, one_line
from harness.workloads.structure import block_lists, has_batch_norm, key_biases, tied_parameters
from harness.workloads.used import NOT_SHARDED, TRIED_SAMPLES, find_used, first_with
from harness.workloads.workload import (
    MOST_TRIED,
    REPEATED_WITHIN,
    HasLogits,
    Workload,
    cache_file,
    losses_differ,
)
from harness.workloads.workload_variants import TOLERANCES

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from harness.cell.cell import Cell
    from harness.cell.training import Layout
    from harness.workloads.family import Split

Result = TypeVar("Result")
STATEFUL = Tolerance(
    1e-3, 0.1, "forward changes what the next one computes, and libraries differ in their calls"
)
ZERO_GRADIENT = 1e-12
"""Fraction of the largest gradient in fp64 below which a gradient is only rounding."""


class UserModel(Protocol):
    """Methods of a user's class, which may also have these attributes:

    - `dataset`, with `collate`, instead of `batch`: a map-style dataset, and a function from a list
      of its samples to a batch (default: torch's `default_collate`)
    - `weight(labels)`: the samples' total weight; `loss` then returns a weighted sum
    - `blocks`: paths of the lists of blocks
    - `split`: a `Split` for pipeline and tensor parallelism, with `hidden_size`
    """

    dataset: Sequence[object]

    def build(self) -> nn.Module:
        """Returns the model. Torch is seeded, and new tensors are on the right device."""

    def batch(self, samples: Tensor) -> object:
        """Returns inputs and labels of these samples on the CPU, or one dict with both.

        Inputs and labels are tensors, or tensors in tuples, lists and dicts. The model is called
        with a tuple as `model(*inputs)` and with a dict as `model(**inputs)`, without the entries
        that its forward does not take. `samples`: sample numbers (int64), counted over all steps.
        """

    def loss(self, output: object, labels: object) -> Tensor:
        """Returns mean loss of the samples, given the model's output, and the labels or the dict
        of the batch. Without this method, the output has the loss, as transformers' models do."""


@dataclass(frozen=True, eq=False, kw_only=True)
class UserWorkload(Workload):
    user: UserModel
    digest: str
    takes: frozenset[str] | None = None
    """Names of forward's parameters; None if it takes any."""
    positional: int = 1
    """Number of forward's positional parameters without a default."""

    @property
    def version(self) -> str:
        return self.digest

    @property
    def hidden_size(self) -> int:
        return int(getattr(self.user, "hidden_size", 0))

    def _new_model(self, saved_weights: bool) -> nn.Module:
        import torch
        from torch import nn

        from harness.workloads.dropout import without_dropout

        model: object = self.user.build()
        if not isinstance(model, nn.Module):
            self.reject(f"build() must return an nn.Module, it returned {type(model).__name__}")
        without_dropout(model)
        if any(nn.parameter.is_lazy(tensor) for tensor in model.parameters()):
            device = torch.get_default_device()
            inputs, _ = of_each_tensor(lambda t: t.to(device), self.rows([0, 1]))
            with torch.no_grad():
                self.output(model.eval(), inputs)
        for name in self.unused:
            model.get_parameter(name).requires_grad_(False)
        return model

    def on_meta(self) -> nn.Module:
        try:
            return super().on_meta()
        except UsageError:
            raise
        except Exception:  # some models can only be built with real tensors
            return self._try("build()", lambda: self.build(0))

    @functools.cached_property
    def _meta(self) -> nn.Module:
        """Model to inspect."""
        return self.on_meta()

    def output(
        self, model: Callable[..., Tensor | HasLogits], inputs: object, **more: Tensor
    ) -> Tensor | HasLogits:
        if isinstance(inputs, dict):
            taken = self.takes or inputs
            return model(**{name: inputs[name] for name in inputs if name in taken}, **more)
        if isinstance(inputs, tuple) or (isinstance(inputs, list) and self.positional > 1):
            return model(*inputs, **more)
        return model(inputs, **more)

    def logits_of(self, output: Tensor | HasLogits) -> Tensor:
        """Returns the output, in fp32 if it was in half precision."""
        import torch

        half = (torch.bfloat16, torch.float16)
        return cast("Tensor", of_each_tensor(lambda t: t.float() if t.dtype in half else t, output))

    def loss(self, logits: Tensor, labels: Tensor, label_tokens: float | None = None) -> Tensor:
        loss = self.user.loss(logits, labels) if _has(self.user, "loss") else _own_loss(logits)
        shape = getattr(loss, "shape", None)
        if shape is None or len(shape):
            kind = type(loss).__name__ if shape is None else f"shape {tuple(shape)}"
            self.reject(f"{self._loss_name} must return a scalar tensor, not {kind}")
        return loss if label_tokens is None else loss / label_tokens

    @property
    def _loss_name(self) -> str:
        return "loss()" if _has(self.user, "loss") else "forward, without a loss() of the class,"

    def weight(self, samples: Sequence[int]) -> float | None:
        """Returns the samples' total weight; None if all samples count equally."""
        weigh = getattr(self.user, "weight", None)
        return None if weigh is None else float(weigh(self.rows(samples)[1]))

    @property
    def counted_samples(self) -> int:
        return 2  # in training mode, BatchNorm needs several values

    def sample(self, samples: int, sequence_length: int) -> tuple[Tensor, Tensor]:
        return self.rows(range(samples))

    def rows(self, samples: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Returns inputs and labels of samples by number, fake ones in torch's fake mode. Raises
        UsageError if the user's batch has another form."""
        from torch._guards import detect_fake_mode
        from torch.utils._python_dispatch import _disable_current_modes

        fake = detect_fake_mode()
        with _disable_current_modes():  # a batch may read numbers, which fake tensors lack
            rows = self._real_rows(samples)
        return of_each_tensor(fake.from_tensor, rows) if fake else rows

    def _real_rows(self, samples: Sequence[int]) -> tuple[Tensor, Tensor]:
        import torch

        batch = self._batch(samples)
        inputs = labels = dict(batch) if isinstance(batch, Mapping) else batch
        if _has(self.user, "loss") and not isinstance(inputs, dict):
            if not (isinstance(batch, tuple | list) and len(batch) == 2):
                self.reject(
                    "batch() must return inputs and labels, or one dict with both, not"
                    f" {_kind(batch)}; tensors of several inputs go into a tuple or a dict"
                )
            inputs, labels = batch
        for name, part in (("inputs", inputs), ("labels", labels)):
            if not _tensors(part):
                self.reject(f"batch() returned {name} without a tensor: {_kind(part)}")
            if isinstance(part, torch.Tensor) and (part.ndim == 0 or len(part) != len(samples)):
                self.reject(
                    f"batch() got {len(samples)} samples, but its {name} have shape"
                    f" {tuple(part.shape)}; their first dimension must be {len(samples)}"
                )
        return cast("Tensor", inputs), cast("Tensor", labels)

    def _batch(self, samples: Sequence[int]) -> object:
        import torch
        from torch.utils.data import default_collate

        if _has(self.user, "batch"):
            return self.user.batch(torch.tensor(samples, device="cpu"))
        dataset = self.user.dataset
        if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
            kind = type(dataset).__name__
            self.reject(f"its dataset needs len(dataset) and dataset[number]; {kind} lacks them")
        collate = getattr(self.user, "collate", default_collate)
        return collate([dataset[sample % len(dataset)] for sample in samples])

    @functools.cached_property
    def divisible(self) -> bool:
        """Whether each tensor of a batch has a row per sample, so that micro-batches can be cut."""
        return all(t.ndim and len(t) == 2 for t in _tensors(self.rows([0, 1])))

    @functools.cached_property
    def fewest_samples(self) -> int:
        """Number of samples that a part of the batch needs in training mode."""
        import torch

        if self._too_large_to_try:
            return 2 if self.batch_norm else 1
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.output(self.build(0), self.rows([0])[0])
        except (Exception, SystemExit) as error:  # whatever a user's code raises
            return 2 if "more than 1 value per channel" in str(error) else 1
        return 1

    def check(self, cell: Cell, shards_parameters: bool) -> None:
        cuts = cell.micro_batches > 1 or cell.strategy == "data_parallel"
        if cuts and not self.divisible:
            raise Refused(
                f"a batch of {self.name} has tensors without a row per sample, which cannot be cut"
                " into parts; use one micro-batch, and not data_parallel"
            )
        if self.double and cell.precision != "fp32":
            raise Refused(
                f"{self.double} in {self.name} is in fp64, which stays fp64 in {cell.precision};"
                " build the model in fp32, or use precision fp32"
            )
        properties = self._first_with
        if name := properties["sparse gradient"]:
            raise Refused(
                f"the gradient of {name} in {self.name} is sparse, and {cell.optimizer} takes dense"
                " ones; use sparse=False in the module"
            )
        for what, instead in NOT_SHARDED.items():
            if shards_parameters and (name := properties[what]):
                raise Refused(
                    f"{name} in {self.name} {what}, and {cell.strategy} {instead}, or use ddp"
                )
        blocks = self.blocks_of(self._meta)
        if cell.optimizer == "muon" and all(p.ndim != 2 for b in blocks for p in b.parameters()):
            raise Refused(
                f"Muon updates the blocks' matrices, and the blocks of {self.name} have no"
                " parameter with two dimensions; use adamw"
            )
        if cell.strategy == "data_parallel" and not _has(self.user, "loss"):
            raise Refused(
                f"{self.name} computes its loss in forward, and DataParallel would return one for"
                " each device; give the class a loss(output, labels), or use ddp"
            )

    def check_split(self, layout: Layout) -> None:
        super().check_split(layout)
        if (
            self._too_large_to_try
            or layout.tensor == 1
            or not (self.split and self.split.by_column)
        ):
            return
        model, inputs = self.build(0), self.rows([0, 1])[0]
        try:
            self.split.leave_a_share(model, layout.tensor)
            self.logits(model, inputs)
        except Exception as error:  # whatever a model raises if its heads do not divide
            raise Refused(
                f"{self.name} does not run with 1 of {layout.tensor} parts of its split layers"
                f" ({one_line(error)}); its numbers of heads and features must divide by"
                f" {layout.tensor}"
            ) from None

    @property
    def double(self) -> str:
        return self._first_with["is in fp64"]

    def tolerance(self, cell: Cell) -> Tolerance | None:
        kinds = {str(p.dtype) for p in self._meta.parameters()}
        half = "bf16" if "torch.bfloat16" in kinds else "fp16" if "torch.float16" in kinds else ""
        return TOLERANCES.get(half) or (STATEFUL if self.stateful else super().tolerance(cell))

    @functools.cached_property
    def _first_with(self) -> dict[str, str]:
        return first_with(self._meta)

    def reject(self, why: str) -> NoReturn:
        raise UsageError(f"workload {self.name!r}: {why}")

    @property
    def notes(self) -> list[str]:
        lists = " and ".join(self.block_paths)
        blocks = f"{lists}, {self.blocks}" if lists else "none found; name a list with +blocks=PATH"
        notes = {
            f"blocks: {blocks}": self.digest,  # a script's control has none
            f"{', '.join(self.unused[:3])}, {len(self.unused)} in all, took part in no loss of"
            f" {TRIED_SAMPLES} samples, so no strategy trains them": self.unused,
            f"some samples skip {', '.join(self.skipped[:1])}, so DDP gets"
            " find_unused_parameters": self.skipped,
            f"{', '.join(self.repeated[:1])} gets its gradient in parts, as in reentrant"
            " checkpoints of one module, so DDP gets static_graph": self.repeated,
        }
        return [note for note, applies in notes.items() if applies]

    def require_trainable(self, sequence_length: int) -> None:
        """Raises UsageError if training would fail or depend on the number of ranks."""
        assert self._is_trainable

    @functools.cached_property
    def _is_trainable(self) -> bool:
        """Returns True, or raises UsageError. Cached, as every cell asks for it."""
        import torch

        large = self._too_large_to_try
        model = self._meta if large else self._try("build()", lambda: self.build(0))
        parameters = list(model.parameters())
        if any("_orig_mod" in name for name, _ in model.named_parameters()):
            self.reject("build() compiled the model; return it uncompiled (docs/compile.md)")
        if not any(p.requires_grad for p in parameters):
            self.reject("build() returned a model without trainable parameters")
        if large:
            return True
        if any(p.is_meta for p in parameters):
            self.reject("build() returned parameters on the meta device, which have no values")
        again = self.build(0)
        if not all(torch.equal(a, b) for a, b in zip(parameters, again.parameters(), strict=True)):
            self.reject(
                "build() returned other weights the second time; draw them from torch's generator"
            )
        self._try("training", lambda: self.loss_of(model, [0, 1]).backward())
        self._require_steady()
        weighted, (both, added) = self.weight([0, 1]) is not None, self._together_and_added
        if losses_differ(both, added) if weighted else not losses_differ(both, added):
            self.reject(
                f"{self._loss_name} must be the {'sum' if weighted else 'mean'} of the samples'"
                f" losses, as it has {'a' if weighted else 'no'} weight(labels), for any batch"
            )
        return True

    def _require_steady(self) -> None:
        """Raises UsageError if the same batch may give another loss."""
        import numpy as np
        import torch

        def losses(seed: int, calls: int) -> float:
            model = self.build(0)
            for _ in range(calls):
                for set_seed in (torch.manual_seed, random.seed, np.random.seed):
                    set_seed(seed)
                loss = self.loss_of(model, [0, 1])
            return float(loss)

        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            first, second_call = losses(0, 1), losses(0, 2)
            if not math.isfinite(first):
                self.reject(f"its first loss is {first}, so its training cannot be compared")
            others = [losses(seed, 1) for seed in range(1, 4)]
            if losses_differ(first, losses(0, 1), REPEATED_WITHIN):
                self.reject(
                    "its loss changes from call to call with equal seeds, as by the time, a"
                    " generator without a seed, or calls that batch() or loss() count; compute what"
                    " changes from the samples' numbers"
                )
            if any(losses_differ(first, other, REPEATED_WITHIN) for other in others):
                self.reject(
                    "its loss is random, so it would depend on how ranks share the batch; draw the"
                    " numbers in batch(), from a generator seeded with the sample's number, and"
                    " give them to the model as an input (nn.Dropout needs no change: it is off)"
                )
            if losses_differ(first, second_call, REPEATED_WITHIN):
                self.reject(
                    "its model keeps a state in forward that changes the next loss, such as a"
                    " counter, and ranks call forward differently often; compute it in batch() from"
                    " the samples' numbers, and give it to the model as an input"
                )

    @functools.cached_property
    def depends_on_batch(self) -> bool:
        """Whether a sample's loss depends on the other samples of its batch, apart from BatchNorm's
        statistics. Unknown for models that are too large to try, which count as independent."""
        both, added = self._together_and_added
        return losses_differ(both, added if self.weight([0, 1]) is not None else added / 2)

    @functools.cached_property
    def _too_large_to_try(self) -> bool:
        return sum(p.numel() for p in self._meta.parameters()) > MOST_TRIED

    @functools.cached_property
    def _together_and_added(self) -> tuple[float, float]:
        """Loss of two samples, and the sum of their losses; zeros for a large model."""
        import torch
        from torch.nn.modules.batchnorm import _BatchNorm

        if self._too_large_to_try:
            return 0.0, 0.0
        model = self.build(0)
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                module.eval()
        with torch.no_grad():
            both, *alone = (float(self.loss_of(model, rows)) for rows in ([0, 1], [0], [1]))
        return both, sum(alone)

    def drop_zero_gradient(self, name: str, tensor: Tensor) -> Tensor:
        """Drops elements whose gradient is only rounding, which an optimizer turns into a step of
        any direction. Biases of attention keys are an example: softmax ignores an equal shift of
        all scores."""
        import torch

        dropped = self._zero_gradients.get(name)
        if not dropped:
            return tensor
        trained = torch.ones(len(tensor), dtype=torch.bool, device=tensor.device)
        trained[dropped] = False
        return tensor[trained]

    @functools.cached_property
    def _zero_gradients(self) -> dict[str, list[int]]:
        """Elements with a zero gradient, by name of a parameter with one dimension."""
        file = cache_file("zero_gradients", self, "3")
        if (text := read_cached(file)) is None:
            text = json.dumps(self._find_zero_gradients())
            write_cached(file, text)
        found: dict[str, list[int]] = json.loads(text)
        return found

    def _find_zero_gradients(self) -> dict[str, list[int]]:
        """Compares gradients in fp32 and fp64: rounding shrinks, and small gradients stay. Models
        that are too large, or cannot compute in fp64, have the key biases that names reveal."""
        import torch

        model = self._meta
        by_name = {name: list(range(len(model.get_parameter(name)))) for name in key_biases(model)}
        if self._too_large_to_try:
            return by_name
        try:
            for count in (2, 16):  # in two samples, rounding errors may cancel too
                single, double = (self._gradients(d, count) for d in (torch.float32, torch.float64))
                if all(g.any() for g in single.values() if g.ndim == 1):
                    break
        except Exception:  # whatever a model raises in fp64
            return by_name
        most = max((float(g.abs().max()) for g in double.values() if g.numel()), default=0.0)
        zero = {name: (g.abs() < ZERO_GRADIENT * most) for name, g in double.items() if g.ndim == 1}
        return {
            name: where.nonzero().flatten().tolist()
            for name, where in zero.items()
            if (where & (single[name] != 0)).any()
        }

    def _gradients(self, dtype: torch.dtype, samples: int) -> dict[str, Tensor]:
        model = self.build(0).to(dtype)
        inputs, labels = of_each_tensor(
            lambda t: t.to(dtype) if t.is_floating_point() else t, self.rows(range(samples))
        )
        self.loss(self.logits(model, inputs), labels).backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return {name: g.to_dense() if g.is_sparse else g for name, g in gradients.items()}

    def loss_of(self, model: nn.Module, samples: Sequence[int]) -> Tensor:
        """Returns the loss of samples by number; raises UsageError if the user's code fails."""
        inputs, labels = self._try("batch()", lambda: self.rows(samples))
        output = self._try("the model", lambda: self.output(model, inputs))
        logits = self.logits_of(output)
        loss: Tensor = self._try(self._loss_name, lambda: self.loss(logits, labels))
        return loss

    def _try(self, what: str, call: Callable[[], Result]) -> Result:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # ranks log them
                return call()
        except UsageError:
            raise
        except (Exception, SystemExit) as error:  # whatever a user's code raises
            self.reject(f"{what} failed: {first_line(error)}")


def _own_loss(output: object) -> Tensor:
    """Returns the loss that a model computed: its output, or the output's `loss` or first entry."""
    if isinstance(output, Mapping):
        return cast("Tensor", output.get("loss"))
    if isinstance(output, tuple | list) and not hasattr(output, "loss"):
        return cast("Tensor", output[0])
    return cast("Tensor", getattr(output, "loss", output))


def _tensors(nested: object) -> list[Tensor]:
    import torch
    from torch.utils import _pytree as pytree

    return [leaf for leaf in pytree.tree_leaves(nested) if isinstance(leaf, torch.Tensor)]


def _kind(value: object) -> str:
    kind = type(value).__name__
    return f"{kind} of {len(value)}" if isinstance(value, tuple | list | Mapping) else kind


def _has(user: object, name: str) -> bool:
    return getattr(user, name, None) is not None  # a base class may say None


def from_class(found: UserClass, blocks: tuple[str, ...] = ()) -> UserWorkload:
    """Returns the workload of a user's class; raises UsageError if it lacks a method. `blocks`:
    paths of its lists of blocks; the class's own, or the largest list, if empty."""
    try:
        user = found.loaded()
    except (Exception, SystemExit) as error:  # whatever a user's code raises
        raise UsageError(
            f"workload {found.name!r} cannot be instantiated without arguments: {first_line(error)}"
        ) from None
    lacks = [] if _has(user, "build") else ["build()"]
    lacks += [] if _has(user, "batch") or _has(user, "dataset") else ["batch() or dataset"]
    if lacks:
        raise UsageError(
            f"workload {found.name!r}: {found.loaded.__name__} has no {', no '.join(lacks)}; it"
            " needs build(), batch(samples) or a dataset, and loss(output, labels) unless its model"
            " returns the loss"
        )
    workload = UserWorkload(
        name=found.name,
        kind="custom",
        config={"digest": found.digest},
        family=None,
        user=user,
        digest=found.digest,
    )
    return _with_structure(workload, blocks)


_KINDS: dict[object, str] = {
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "",
    inspect.Parameter.VAR_KEYWORD: "**",
}


def _with_structure(workload: UserWorkload, blocks: tuple[str, ...]) -> UserWorkload:
    from torch import nn

    model = workload.on_meta()
    split: Split | None = getattr(workload.user, "split", None)
    chosen = blocks or getattr(workload.user, "blocks", None) or block_lists(model)
    paths = (chosen,) if isinstance(chosen, str) else tuple(chosen)
    modules = dict(model.named_modules())
    if missing := [path for path in paths if path not in modules]:
        lists = [
            path for path, m in modules.items() if isinstance(m, nn.ModuleList | nn.Sequential)
        ]
        workload.reject(
            f"its model has no blocks {missing[0]!r}; its lists of modules are:"
            f" {', '.join(filter(None, lists)) or 'none'}"
        )
    forward = inspect.signature(model.forward).parameters
    kinds = [_KINDS.get(p.kind, "=") if p.default is p.empty else "=" for p in forward.values()]
    large = sum(p.numel() for p in model.parameters()) > MOST_TRIED
    used = find_used(workload, workload.loss_of, in_fake_mode=large)
    found = dataclasses.replace(
        workload,
        **vars(used),
        block_paths=paths,
        blocks=sum(len(list(model.get_submodule(path).children())) for path in paths),
        split=split,
        no_split="does not say how it can be split; give its class a `split`, or use ddp",
        tied=bool(tied_parameters(model)),
        batch_norm=has_batch_norm(model),
        takes=None if "**" in kinds else frozenset(forward),
        positional=kinds.count(""),
    )
    return dataclasses.replace(found, without_zero_gradient=found.drop_zero_gradient)
