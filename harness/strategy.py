"""The one seam: a strategy is a frozen set of options with one required method, `setup(job) ->
TrainStep`."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from harness.cell import Cell

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from harness.workloads import Workload
    from harness.workloads.facts import ModelFacts


@dataclass(frozen=True)
class Layout:
    """How devices are used: data x pipeline x tensor, tensor innermost; as data, so that the
    harness can read it."""

    data: int = 1
    pipeline: int = 1
    tensor: int = 1
    devices_per_process: int = 1
    """More than 1 where one process drives several devices (DataParallel)."""
    servers: int = 0
    """Processes beside the devices', after them in rank, that hold the model and see no samples (a
    parameter server)."""

    @property
    def devices(self) -> int:
        return self.data * self.pipeline * self.tensor

    @property
    def processes(self) -> int:
        return self.devices // self.devices_per_process + self.servers

    def driven(self, device: torch.device) -> list[torch.device]:
        """The devices that the process of this one drives: itself, or all where one process drives
        several."""
        import torch

        count = self.devices_per_process
        return (
            [device]
            if count == 1
            else [torch.device(device.type, number) for number in range(count)]
        )

    @property
    def shares(self) -> int:
        """Into how many parts the global batch is cut before ranks receive it."""
        return self.data // self.devices_per_process

    def share(self, rank: int) -> int:
        """Which part of the global batch a rank receives; a server is handed the last one's and
        leaves it alone."""
        return min(rank // (self.pipeline * self.tensor), self.shares - 1)


@dataclass(frozen=True)
class Deviation:
    """How far a strategy's training may be from the reference, and why."""

    loss: float
    """Largest |loss - reference| / |reference| at any step of the segment."""
    update: float
    """Largest norm of (parameters - reference parameters), relative to the reference's update, of
    any tensor."""
    reason: str


# Calibrated on every exact strategy of matrix `full` (2 and 8 gloo ranks): see docs/parity.md for
# the figures.
EXACT = Deviation(
    loss=1e-5, update=1e-3, reason="the same training; only the order of additions differs"
)


@dataclass(frozen=True)
class Batch:
    """A rank's share of the global batch of one step.

    `inputs`: (samples, ...), `labels`: (samples, ...).
    """

    step: int
    inputs: Tensor
    labels: Tensor

    def split(self, parts: int) -> Iterator[Batch]:
        for inputs, labels in zip(self.inputs.chunk(parts), self.labels.chunk(parts), strict=True):
            yield Batch(self.step, inputs, labels)


@dataclass(frozen=True)
class States:
    """Bytes that a rank keeps between two steps: model states (ZeRO, arXiv 1910.02054, section 3.1)
    and the library's own buffers."""

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    library: float = 0.0
    """Copies and buffers that the library keeps beside them: communication buckets, masters, pools.
    """
    transient: float = 0.0
    """The most that a step needs beside these for a while and then frees: gradients until the
    update, gathered parameters."""

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.library


StateKind = Literal["parameters", "gradients", "optimizer", "library"]
Held = tuple[StateKind, str, "Tensor | int"]
"""Kind, name, and the tensor that is kept (or its bytes, where the library shows only those)."""


TrainStep = Callable[[Batch], "Tensor | None"]
"""One optimizer step on one global batch; the mean loss of this rank's samples, None where this
rank has no loss."""


@dataclass
class Exposed:
    """What a strategy shows the harness: looked at before and after the steps, never during a timed
    one."""

    model: nn.Module
    optimizers: Sequence[Optimizer]
    restore: dict[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    """Parameter name -> function from the whole tensor as the strategy holds it to the workload's
    own layout."""
    compute: Sequence[tuple[Any, str]] = ()
    """(object, method name) pairs that are this rank's computation; timed in a pass of its own for
    the pipeline bubble."""
    gather: Callable[[], Iterator[tuple[str, Tensor]]] | None = None
    """Whole tensors by name, where walking the model does not give them.

    Called on all ranks together.
    """
    states: Callable[[], Iterable[Held]] | None = None
    """Everything this rank keeps between steps, where walking model and optimizers does not find it
    or names it wrongly."""
    library: Callable[[], Iterable[Held]] | None = None
    """Buffers of the library by name, beside what is found in model and optimizers."""
    offload_folder: Path | None = None
    """Folder of a disk that states are kept on; what is read from and written to the disk is then
    recorded."""
    waits: Sequence[
        tuple[Any, str, Literal["communication", "bubble", "offload", "optimizer", "data"]]
    ] = ()
    """(object or module, function name, component) whose time, where nothing computes in it,
    belongs to that component; for waits that torch's profiler cannot see. Wrapped in a pass of its
    own.
    """
    collectives: Sequence[tuple[Any, str, str]] = ()
    """(object or module, function name, operation) that send their first argument among all ranks
    without torch.distributed."""
    wire: Literal["gloo", "ring"] = "gloo"
    """Whose algorithms move the bytes: torch's gloo backend's, or rings."""
    over_tcp: bool = True
    """Whether CPU ranks speak over TCP alone, where their bytes can be counted; elsewhere those
    sent are unknown."""


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
    exposed: Exposed | None = None

    @property
    def devices(self) -> list[torch.device]:
        """The devices that this process drives: its own, or all of the cell's where one process
        drives several."""
        return self.layout.driven(self.device)

    def model(self) -> nn.Module:
        """The workload's model with its seeded weights, on this rank's device, in training mode."""
        return self.workload.build(self.cell.seed, self.device, drawn_on=self.weights_device)

    def optimizer_class(self) -> tuple[type[Optimizer], dict[str, Any]]:
        """The cell's optimizer as (class, keyword arguments), for libraries that make their own
        instance."""
        import torch

        cell = self.cell
        if cell.optimizer == "sgd":
            return torch.optim.SGD, {
                "lr": cell.learning_rate,
                "momentum": 0.9,
                "weight_decay": cell.weight_decay,
            }
        kwargs = {
            "lr": cell.learning_rate,
            "betas": (0.9, 0.95),
            "eps": cell.epsilon,
            "weight_decay": cell.weight_decay,
        }
        return torch.optim.AdamW, kwargs

    def optimizer(self, parameters: Any) -> Optimizer:
        factory, kwargs = self.optimizer_class()
        return factory(parameters, **kwargs)

    def dtype(self) -> torch.dtype:
        import torch

        return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[
            self.cell.precision
        ]

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Autocast in the cell's precision; does nothing in fp32."""
        import torch

        if self.cell.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype())

    def loss(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        """Forward and mean loss, under the cell's autocast."""
        with self.autocast():
            return self.workload.loss(self.workload.logits(model, batch.inputs), batch.labels)

    def expose(self, model: nn.Module, *optimizers: Optimizer, **more: Any) -> None:
        """Shows the harness the trained module and optimizers (see `Exposed`).

        Every strategy calls it once.
        """
        self.exposed = Exposed(model, optimizers, **more)


@dataclass(frozen=True)
class Export:
    """How a strategy runs outside the suite (see harness/export): what differs between it and all
    others."""

    template: str
    """Its training script, in the folder `templates` beside the strategy's file; extends
    harness/export/templates/train.py.j2."""
    values: dict[str, Any] = field(default_factory=dict)
    """What the template needs to know beside the cell, the model and the strategy's options."""
    files: dict[str, str] = field(default_factory=dict)
    """Config files beside the script, by name."""
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables of the ranks."""
    needs: tuple[str, ...] = ()
    """Packages beyond torch and transformers."""


class Strategy(BaseModel, ABC):
    """One way to spread training over devices.

    Fields are its options; the first docstring line describes it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    requires: ClassVar[tuple[str, ...]] = ()
    """Packages beyond torch; a missing one makes the cell `unavailable`."""
    preload: ClassVar[tuple[str, ...]] = ()
    """Their modules that every rank would import, and that the fork server therefore imports for
    all."""
    precisions: ClassVar[tuple[str, ...]] = ("fp32", "bf16", "fp16")
    """Values of the cell's precision axis that the strategy can honour."""
    process_group: ClassVar[bool] = True
    """Whether its ranks need torch.distributed."""
    synchronizes_batch_norm: ClassVar[bool] = False
    """Whether BatchNorm sees the whole global batch."""
    max_restarts: ClassVar[int] = 0
    """Elastic restarts that a trial may take."""
    max_devices: ClassVar[int | None] = None
    """The largest number of devices it can use; None for any."""
    least_devices: ClassVar[int] = 1
    """The smallest number of devices on which it means something."""
    wraps_ddp: ClassVar[str | None] = None
    """Name of the library whose wrapper around DDP's mathematics it shows; such cells are compared
    side by side."""

    @classmethod
    def compiled(cls) -> dict[str, str]:
        """Compiled parts of its library by name, as `bench doctor` shows them: `built`, or the
        command that builds them."""
        return {}

    def layout(self, devices: int) -> Layout:
        """Data x pipeline x tensor for this many devices; raises Refused where there is none."""
        return Layout(data=devices)

    def check(self, cell: Cell, workload: Workload) -> None:
        """Raises Refused or Unavailable, with the reason, for a cell that this strategy cannot
        run."""

    def deviation(self, cell: Cell, workload: Workload) -> Deviation:
        """How far its training may be from the reference; stricter than EXACT does not exist."""
        return EXACT

    def stand_in(self, cell: Cell) -> str | None:
        """What it runs instead of the real thing on this device, None where it is the real
        thing."""
        return None

    @property
    def cycle(self) -> int:
        """Steps after which its work repeats: more than 1 where some of them do what others do not,
        such as communicate."""
        return 1

    @property
    def shards_parameters(self) -> bool:
        """Whether it cuts parameters into parts that are put together when their layer runs."""
        return False

    def states(self, cell: Cell, layout: Layout, facts: ModelFacts) -> States | None:
        """What the fullest rank keeps between steps by the formula, for the dtypes and copies the
        library keeps; None: no formula."""
        return None

    def traffic(self, cell: Cell, layout: Layout, facts: ModelFacts) -> float | None:
        """Bytes that a rank must send per step for the collectives that its library calls, mean of
        the ranks; None: no formula.

        Counted as harness/measure/collectives.py does: an all-reduce of S bytes over N ranks is
        2(N-1)/N S, a reduce-scatter or an all-gather (N-1)/N S. The docstring says where the
        library differs from the paper.
        """
        return None

    def moved_bytes(self, cell: Cell, layout: Layout, facts: ModelFacts) -> float:
        """Bytes that a step takes to and from a disk, or through one process in host memory; all
        ranks together, about."""
        return 0.0

    @property
    def one_node(self) -> str | None:
        """Name of the launcher of its own (see `command`), which starts ranks on one node only;
        None where it has none."""
        return None

    def same_as_ddp(self, cell: Cell) -> str | None:
        """Who wraps DDP's mathematics in this cell, `wraps_ddp` unless options change the
        mathematics."""
        return self.wraps_ddp if not self.model_fields_set else None

    def command(self, cell: Cell, scratch: Path) -> list[str] | None:
        """Command line that starts the ranks, to which the rank's own is appended, where it brings
        a launcher of its own.

        Files that it reads are written to `scratch`. None: the cell's launcher starts them.
        """
        return None

    def export(self, cell: Cell, to: str) -> Export | None:
        """How the cell runs outside the suite under the launcher `to` (see harness/export); None:
        not under this one."""
        return None

    @abstractmethod
    def setup(self, job: Job) -> TrainStep:
        """Builds, wraps and places model and optimizer; returns the training step.

        Runs in every rank.
        """
