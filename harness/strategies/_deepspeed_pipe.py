"""Compute methods and buffers of DeepSpeed's pipeline engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from harness.strategy import Retained

if TYPE_CHECKING:
    from deepspeed.runtime.pipe.engine import PipelineEngine


def timed_instructions(engine: PipelineEngine) -> list[tuple[object, str]]:
    """Returns the engine's compute methods, for TrainState.

    The engine looks methods up in its class; this makes it use the instance's, which the harness
    wraps to time them.
    """
    names = {kind: method.__name__ for kind, method in engine._INSTRUCTION_MAP.items()}
    engine._INSTRUCTION_MAP = {kind: _by_name(name) for kind, name in names.items()}
    computing = ("_exec_forward_pass", "_exec_backward_pass", "_exec_optimizer_step")
    return [(engine, name) for name in computing]


def _by_name(name: str) -> Callable[..., object]:
    return lambda engine, **arguments: getattr(engine, name)(**arguments)


def pipeline_buffers(engine: PipelineEngine) -> Iterator[Retained]:
    """Yields activations and gradients that the engine keeps until the next batch."""
    import torch
    from torch.utils._pytree import tree_leaves

    kept = (engine.pipe_buffers, engine.pipe_recv_buf, engine.grad_layer, engine._grad_layer_buf)
    for leaf in tree_leaves(kept):
        if isinstance(leaf, torch.Tensor):
            yield "library", "activations in the pipeline", leaf
