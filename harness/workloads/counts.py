from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, TypeVar
from unittest import mock

from harness.cell.cell import Cell
from harness.cell.durable import read_cached, write_cached
from harness.cell.errors import UsageError
from harness.cell.yaml_text import parsed
from harness.host.environment import (
    HIDE_GPUS,
    LEAVE_CUDA_ALONE,
    cuda_is_initialized,
    device_type,
)
from harness.host.process import Ended, call_apart
from harness.host.user_code import one_line
from harness.workloads.catalog import make_workload
from harness.workloads.recompute import experts_backward, grouped_products
from harness.workloads.workload import Workload, cache_file

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.autograd.function import BackwardCFunction

Counted = TypeVar("Counted")

MOST_WITH_MEMORY = 100_000_000
"""Maximum number of parameters of a model that is counted with real tensors."""
APART_LIMIT_SECONDS = 600.0
"""Time limit in seconds for counting in a separate process, which may import from a slow disk."""


@dataclass(frozen=True)
class ModelFacts:
    trainable: tuple[str, ...]
    """Names of trained parameters. A tied parameter appears once."""
    parameters: int
    flops_per_sample: int
    """FLOPs of forward and backward; 0 if they were not counted."""
    sizes: tuple[int, ...]
    """Elements of each trainable parameter, in order."""
    parameter_bytes: int = 0
    """Bytes of all parameters; 0 means fp32."""
    trained_bytes: int = 0
    """Bytes of trainable parameters, which are also those of gradients or of one moment. 0 means
    that they are fp32."""
    buffer_bytes: int = 0
    """Bytes of buffers, and of quantised weights' scales."""
    scale_bytes: int = 0
    """Part of `buffer_bytes` that is scales, which are not buffers of a module."""

    def __post_init__(self) -> None:
        for name, elements in (
            ("parameter_bytes", self.parameters),
            ("trained_bytes", sum(self.sizes)),
        ):
            if not getattr(self, name):
                object.__setattr__(self, name, 4 * elements)


@functools.cache
def model_facts(workload: Workload, sequence_length: int | None = None) -> ModelFacts:
    """Returns facts, cached by model and library versions; raises RuntimeError if counting fails.

    Without a sequence length, the model is built but does not run, so FLOPs are not counted.
    """
    if facts := _from_smaller(workload, sequence_length):
        return facts
    file = cache_file("facts", workload, f"5 {sequence_length}")
    text = None if workload.pretrained else read_cached(file)
    if text is not None:
        return parsed(ModelFacts, text)
    if initialises_cuda(workload):
        facts = count_apart(model_facts, workload, sequence_length)
    else:
        facts = _count(workload, sequence_length)
    write_cached(file, json.dumps(asdict(facts)))
    return facts


def initialises_cuda(workload: Workload) -> bool:
    """Returns whether counting may initialise CUDA here, after which ranks cannot be forked."""
    libraries = not set(workload.requires) <= LEAVE_CUDA_ALONE
    return libraries and device_type() == "cuda" and not cuda_is_initialized()


def count_apart(count: Callable[..., Counted], workload: Workload, *arguments: object) -> Counted:
    """Calls `count` in a process that sees no GPU."""
    answer: Counted | Ended = call_apart(
        _count_without_gpus, count, workload.name, arguments, limit=APART_LIMIT_SECONDS
    )
    if isinstance(answer, Ended):
        raise RuntimeError(f"counting in {workload.name} failed: {answer.reason}")
    return answer


def _count_without_gpus(
    count: Callable[..., Counted], name: str, arguments: Sequence[object]
) -> Counted:
    os.environ |= HIDE_GPUS
    return count(make_workload(name), *arguments)


def _from_smaller(workload: Workload, sequence_length: int | None) -> ModelFacts | None:
    """Extrapolates FAMILY-HIDDENxBLOCKS linearly from one and two blocks; None for other names."""
    if not (pair := workload.of_one_and_two_blocks):
        return None
    smallest, next_one = (model_facts(make_workload(name), sequence_length) for name in pair)
    more = workload.blocks - 1

    def grown(of_one: int, of_two: int) -> int:
        return of_one + more * (of_two - of_one)

    of_two = dict(zip(next_one.trainable, next_one.sizes, strict=True))
    trainable = list(smallest.trainable)
    sizes = [
        grown(size, of_two[name])
        for name, size in zip(smallest.trainable, smallest.sizes, strict=True)
    ]
    of_first = [
        i for i, name in enumerate(trainable) if name.startswith(f"{workload.block_path}.0.")
    ]
    after = of_first[-1] + 1 if of_first else 0  # prompt parameters belong to no block
    for block in reversed(range(1, workload.blocks)):
        trainable[after:after] = [trainable[i].replace(".0.", f".{block}.", 1) for i in of_first]
        sizes[after:after] = [sizes[i] for i in of_first]
    return ModelFacts(
        tuple(trainable),
        grown(smallest.parameters, next_one.parameters),
        grown(smallest.flops_per_sample, next_one.flops_per_sample),
        tuple(sizes),
        grown(smallest.parameter_bytes, next_one.parameter_bytes),
        grown(smallest.trained_bytes, next_one.trained_bytes),
        grown(smallest.buffer_bytes, next_one.buffer_bytes),
        grown(smallest.scale_bytes, next_one.scale_bytes),
    )


def _count(workload: Workload, sequence_length: int | None) -> ModelFacts:
    import transformers

    transformers.utils.logging.set_verbosity_error()
    return fake_or_real(workload, sequence_length, lambda: _counted(workload, sequence_length))


def fake_or_real(
    workload: Workload, sequence_length: int | None, count: Callable[[], Counted]
) -> Counted:
    """Calls `count` on fake tensors, or on real tensors if a user's model cannot use fake ones.
    Raises UsageError if that model is too large for real tensors, or fails on them as well."""
    try:
        with without_memory():
            return count()
    except UsageError:
        raise
    except Exception as error:  # e.g. from reading a fake tensor's values
        if workload.family is not None:
            raise
        parameters = sum(p.numel() for p in workload.on_meta().parameters())
        if parameters > MOST_WITH_MEMORY:
            raise UsageError(
                f"{workload.name} cannot be counted without memory for its {parameters} parameters"
                f" ({one_line(error)})"
            ) from None
    try:
        return count()
    except UsageError:
        raise
    except Exception as error:  # whatever a model raises for incompatible sizes
        raise UsageError(
            f"{workload.name} cannot compute a sample of {sequence_length} tokens"
            f" ({one_line(error)})"
        ) from None


def _counted(workload: Workload, sequence_length: int | None) -> ModelFacts:
    model = workload.countable().build(seed=0, saved_weights=False)
    flops = 0
    if sequence_length is not None:
        try:
            flops = model_flops(model, lambda: workload.counted(model, sequence_length))
        except RuntimeError as error:
            # torch's counter fails if forward calls autograd.grad, as gradient penalties do.
            if workload.kind != "custom" or "_will_engine_execute_node" not in str(error):
                raise
        flops //= workload.counted_samples
    parameter_bytes, buffer_bytes, scale_bytes = workload.stored_bytes(model)
    named = dict(model.named_parameters())
    trained = {name: p for name, p in named.items() if p.requires_grad}
    unused = [name for name, p in trained.items() if p.grad is None]
    if unused and workload.pretrained and sequence_length is not None:
        raise UsageError(
            f"{len(unused)} parameters of {workload.name} take no part in its loss, such as"
            f" {unused[0]}; strategies would train them differently, so give a model without them"
        )
    return ModelFacts(
        trainable=tuple(trained),
        parameters=sum(p.numel() for p in named.values()),
        flops_per_sample=flops,
        sizes=tuple(p.numel() for p in trained.values()),
        parameter_bytes=parameter_bytes,
        trained_bytes=sum(p.numel() * p.element_size() for p in trained.values()),
        buffer_bytes=buffer_bytes + scale_bytes,
        scale_bytes=scale_bytes,
    )


def parameters_of(cell: Cell) -> int:
    return model_facts(make_workload(cell.workload)).parameters


def model_flops(model: nn.Module, forward: Callable[[], Tensor]) -> int:
    """Returns FLOPs of `forward`, which returns a scalar, and its backward: matrix products,
    convolutions and attention, 2 per multiply-add (torch's FlopCounterMode)."""
    from torch.utils.flop_counter import FlopCounterMode

    config = getattr(model, "config", None)
    if config is not None and hasattr(config, "_attn_implementation"):
        # The counter does not know fused attention on every device.
        config._attn_implementation = "eager"
    with FlopCounterMode(display=False, custom_mapping=dict(grouped_products())) as counter:
        forward().backward()
    return int(counter.get_total_flops())


@contextlib.contextmanager
def without_memory() -> Iterator[None]:
    """Makes new tensors fake, to count a model without allocating it. Experts use transformers'
    grouped product, because torch's product supports fake tensors only in bf16."""
    import torch
    import transformers
    from torch._library.custom_ops import OPDEFS
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import masking_utils
    from transformers.integrations import moe

    experts = OPDEFS["transformers::grouped_mm_fallback"]
    backward = experts._backward_fn if experts_backward() else _without_numbers_of_rows

    def stay(module: nn.Module, *_: object, **__: object) -> nn.Module:
        return module

    with (
        FakeTensorMode(),
        mock.patch.object(torch.nn.Module, "to", stay),
        mock.patch.object(moe, "_can_use_grouped_mm", return_value=False),
        mock.patch.object(experts, "_backward_fn", backward),
        mock.patch.object(masking_utils, "find_packed_sequence_indices", return_value=None),
        # Some models redraw weights until they are in range, but fake weights cannot be read.
        mock.patch.object(transformers.PreTrainedModel, "initialize_weights"),
    ):
        yield


def _without_numbers_of_rows(
    ctx: BackwardCFunction, gradient: Tensor
) -> tuple[Tensor, Tensor, None]:
    """Computes a grouped product's gradients. transformers' own backward would read how many rows
    each expert has, which fake tensors cannot tell."""
    rows, matrices = tuple(ctx.saved_tensors)
    rows.T @ gradient  # for the count: each row contributes to one matrix's gradient
    return gradient @ matrices[0].T, matrices.new_zeros(matrices.shape), None
