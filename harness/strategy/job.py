"""What the harness hands to a strategy, and what a strategy shows the harness."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from harness.spec.cell import Cell

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from typing_extensions import Unpack

    from harness.workloads import Workload
    from harness.workloads.workload import HasLogits
from harness.spec.training import Batch, Layout, Retained
from harness.strategy.optimizers import optimizer_class, optimizer_of
from harness.workloads.recompute import recompute_blocks

COMPILE_MODES = {"block": None, "block_cudagraphs": "reduce-overhead"}
"""Mode of torch.compile by value of a cell's compile axis.

No GPU has run `block_cudagraphs` yet. A strategy may use it if a block's weights stay at their
addresses from step to step, and if its collectives are no part of a block: FSDP2 gathers weights
anew, tensor parallelism communicates within the block.
"""
Recompute = Callable[["nn.Module", "Sequence[nn.Module]", str], None]
"""(model, its blocks, `selective` or `full`): changes the blocks in place."""
Wire = Literal["gloo", "ring"]
Wait = tuple[object, str, Literal["communication", "bubble", "offload", "optimizer", "data"]]
"""Object or module, name of its function, and the component of a step that its time belongs to."""
Sender = tuple[object, str, str]
"""Object or module, name of its function, and the collective operation that it does."""


@dataclass(frozen=True)
class Router:
    """A module that chooses the experts of each token."""

    module: nn.Module
    tokens: Callable[[Any], Tensor]
    """Output of the module -> tokens of each expert, (experts,)."""


@dataclass
class TrainState:
    """What a strategy shows the harness: looked at before and after the steps, never during a timed
    one."""

    model: nn.Module
    optimizers: Sequence[Optimizer]
    restore: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    """Parameter name -> function from the whole tensor as the strategy holds it to the workload's
    own layout."""
    compute: Sequence[tuple[object, str]] = ()
    """(object, method name) pairs that are this rank's computation; timed in a pass of its own for
    the pipeline bubble."""
    gather: Callable[[], Iterator[tuple[str, Tensor]]] | None = None
    """Whole tensors by name, where walking the model does not give them.

    Called on all ranks together.
    """
    states: Callable[[], Iterable[Retained]] | None = None
    """Everything this rank keeps between steps, where walking model and optimizers does not find it
    or names it wrongly."""
    library: Callable[[], Iterable[Retained]] | None = None
    """Buffers of the library by name, beside what is found in model and optimizers."""
    offload_folder: Path | None = None
    """Folder of a disk that states are kept on; what is read from and written to the disk is then
    recorded."""
    waits: Sequence[Wait] = ()
    """Functions in which a rank waits, where torch's profiler cannot see it. Their time belongs to
    the component where nothing computes meanwhile. Wrapped in a pass of its own."""
    collectives: Sequence[Sender] = ()
    """Functions that send their first argument among all ranks without torch.distributed."""
    wire: Wire = "gloo"
    """Whose algorithms move the bytes: torch's gloo backend's, or rings."""
    routers: Mapping[int, Router] | None = None
    """Of a mixture of experts, by number of the block, where the workload's own modules have
    others in their place."""
    over_tcp: bool = True
    """Whether CPU ranks speak over TCP alone, where their bytes can be counted; elsewhere those
    sent are unknown."""
    counters: Sequence[tuple[object, str]] = ()
    """(object, attribute name) pairs: numbers of steps that a library counts outside of the
    optimizers, and that decide what it does in a step."""


class Shown(TypedDict, total=False):
    """Keyword arguments of `Job.register`: the fields of TrainState, all optional."""

    restore: Mapping[str, Callable[[Tensor], Tensor]]
    compute: Sequence[tuple[object, str]]
    gather: Callable[[], Iterator[tuple[str, Tensor]]] | None
    states: Callable[[], Iterable[Retained]] | None
    library: Callable[[], Iterable[Retained]] | None
    offload_folder: Path | None
    waits: Sequence[Wait]
    collectives: Sequence[Sender]
    wire: Wire
    routers: Mapping[int, Router] | None
    over_tcp: bool
    counters: Sequence[tuple[object, str]]


@dataclass
class Job:
    """What the harness hands to a strategy: factories made from the cell, and the place of this
    rank."""

    cell: Cell
    workload: Workload
    layout: Layout
    device: torch.device
    rank: int
    scratch: Path
    """A folder of this trial, shared by the ranks of a node and kept across an elastic restart."""
    restart_count: int = 0
    interface: str | None = None
    """Network interface that reaches all ranks, for libraries that choose one themselves; None
    leaves it to them."""
    node: str = ""
    """Name of this rank's node; empty where the cell has but one."""
    local_processes: int = 1
    """Ranks of this node."""
    threads: int = 1
    """Intra-op threads of this rank."""
    weights_device: torch.device | None = None
    """Where initial weights are drawn, by default on `device`. In a GPU cell it is a GPU on every
    rank, also on one that keeps its model in host memory: the CPU's generator would draw other
    weights than the reference's.
    """
    train_state: TrainState | None = None
    recomputes: bool = False
    """Whether `model` has made blocks recompute."""
    compiles: bool = False
    """Whether `model` has marked blocks to be compiled."""

    @property
    def devices(self) -> list[torch.device]:
        """The devices that this process drives: its own, or all of the cell's where one process
        drives several."""
        return self.layout.driven(self.device)

    def model(self, recompute: Recompute = recompute_blocks) -> nn.Module:
        """The workload's model with its seeded weights, on this rank's device, in training mode.

        `recompute`: how its blocks are made to recompute what the cell says, for libraries with
        means of their own.
        """
        model = self.workload.build(self.cell.seed, self.device, drawn_on=self.weights_device)
        if self.cell.recompute != "none":
            recompute(model, self.workload.blocks_of(model), self.cell.recompute)
            self.recomputes = True
        if self.cell.compile != "none":
            # Compiled when they are first called: by then they are wrapped, split or sharded.
            for block in self.workload.blocks_of(model):
                block.compile(mode=COMPILE_MODES[self.cell.compile])
            self.compiles = True
        return model

    def require_model(self) -> None:
        """Raises RuntimeError where the cell asks for what `model` does, and it was not called."""
        cell = self.cell
        for made, done, axis, value in (
            (self.recomputes, "recomputed", "recompute", cell.recompute),
            (self.compiles, "compiled", "compile", cell.compile),
        ):
            if value != "none" and not made:
                raise RuntimeError(
                    f"strategy {cell.strategy!r} did not build its model by job.model(), so that"
                    f" nothing is {done}, and the cell asks for {axis} {value}"
                )

    def optimizer_class(self) -> tuple[type[Optimizer], dict[str, Any]]:
        """The cell's optimizer as (class, keyword arguments), for libraries that make their own
        instance."""
        return optimizer_class(self.cell)

    def optimizer(self, parameters: Iterable[nn.Parameter | Tensor]) -> Optimizer:
        """The cell's optimizer of these parameters."""
        factory, kwargs = self.optimizer_class()
        return factory(parameters, **kwargs)

    def optimizer_of(self, model: nn.Module) -> Optimizer:
        """The cell's optimizer of all parameters of a model, by their names: also one that treats
        them differently."""
        return optimizer_of(self.cell, model)

    def dtype(self) -> torch.dtype:
        """The cell's precision as torch names it."""
        import torch

        return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[
            self.cell.precision
        ]

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Autocast in the cell's precision; does nothing in fp32."""
        import torch

        if self.cell.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype())

    def loss(self, model: Callable[[Tensor], Tensor | HasLogits], batch: Batch) -> Tensor:
        """Forward and mean loss, under the cell's autocast."""
        with self.autocast():
            return self.workload.loss(self.workload.logits(model, batch.inputs), batch.labels)

    def register(self, model: nn.Module, *optimizers: Optimizer, **shown: Unpack[Shown]) -> None:
        """Shows the harness the trained module and optimizers (see `TrainState`).

        Every strategy calls it once.
        """
        self.train_state = TrainState(model, optimizers, **shown)
