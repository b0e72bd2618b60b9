"""The strategy interface: frozen options with one required method, `setup(job) -> TrainStep`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict

from harness.cell.cell import Cell
from harness.cell.schedules import FORWARDS_FIRST, Schedule
from harness.cell.training import EXACT, Layout, States, Tolerance, TrainStep
from harness.seam.formulas import blocks_of_stage, in_flight
from harness.seam.job import Job

if TYPE_CHECKING:
    from harness.workloads import Workload
    from harness.workloads.counts import ModelFacts

StrategyT_co = TypeVar("StrategyT_co", bound="Strategy", covariant=True)


@dataclass(frozen=True)
class Export:
    """Strategy-specific parts of a standalone script (see harness/export)."""

    template: str
    """Training script in `templates` next to the strategy's file, extending train.py.j2."""
    values: dict[str, Any] = field(default_factory=dict)
    """Values for the template, in addition to the cell, the model and the options."""
    files: dict[str, str] = field(default_factory=dict)
    """Config files by name, placed next to the script."""
    variables: dict[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    """Packages beyond torch and transformers."""
    arguments: tuple[str, ...] = ()
    """Further arguments of the launcher."""


@dataclass(frozen=True)
class Capabilities:
    """What a strategy can do and requires, whatever its options."""

    preload: tuple[str, ...] = ()
    """Modules that every rank would import, so the fork server imports them once for all ranks."""
    precisions: tuple[str, ...] = ("fp32", "bf16", "fp16")
    process_group: bool = True
    """Whether ranks need torch.distributed."""
    synchronizes_batch_norm: bool = False
    """Whether BatchNorm sees the whole global batch."""
    checkpoints: tuple[str, ...] = ("full", "sharded", "async")
    """Supported values of the checkpoint axis."""
    reshards: bool = True
    """Whether other strategies and numbers of ranks can load its checkpoints (torch's format)."""
    stages: bool = False
    """Whether blocks run as pipeline stages."""
    max_restarts: int = 0
    compiles: tuple[str, ...] = ()
    """Values of the compile axis that do not change the training."""
    fused_loss: bool = False
    """Whether the model's head may compute the loss (`Cell.loss`)."""
    extra_optimizers: tuple[str, ...] = ()
    """Supported optimizers beyond AdamW and SGD."""
    fixed_steps: bool = False
    """Whether trials must take exactly the cell's steps."""
    skips_parameters: bool = False
    """Whether its ranks may use different parameters in a step."""
    unverified: str = ""
    """Why no reference run can check what it trains; empty if one can."""
    max_devices: int | None = None
    """Maximum number of devices; None if there is no limit."""
    min_devices: int = 1
    compiled_parts: Callable[[], dict[str, str]] = dict
    """Function that returns, for `bench doctor`, each compiled part with `built` or with how to
    build it."""


@dataclass(frozen=True)
class OwnLauncher:
    """A strategy's own launcher, for one node."""

    name: str
    command: Callable[[Cell, Path], list[str]]
    """Function from cell and scratch folder to the launcher's command, to which the rank's own
    command is appended."""


class CostModel:
    """Formulas of a strategy's memory, traffic and recomputation. They return None where a strategy
    has no formula."""

    capabilities: ClassVar[Capabilities]

    @property
    def shards_parameters(self) -> bool:
        """Whether parameters are sharded, and gathered when their layer runs."""
        return False

    @property
    def zero_stage(self) -> int:
        """ZeRO stage of the data axis (arXiv 1910.02054). Stage 0 shards nothing, 1 optimizer
        states, 2 also gradients, 3 also parameters."""
        return 3 if self.shards_parameters else 0

    @property
    def accumulates_whole_gradients(self) -> bool:
        """Whether ranks hold whole gradients until the last micro-batch reduces them."""
        return False

    @property
    def recomputes_whole_blocks(self) -> bool:
        """Whether recomputation runs whole blocks. torch's recomputation stops at the last tensor
        that backward needs."""
        return False

    def states(self, cell: Cell, layout: Layout, facts: ModelFacts) -> States | None:
        """Returns bytes that the fullest rank keeps between steps, with the library's copies."""
        return None

    @property
    def pipeline_schedule(self) -> Schedule:
        """Order of a pipeline's forwards and backwards."""
        return "1f1b"

    def pipeline_stages(self, layout: Layout) -> Sequence[tuple[int, ...]]:
        """Returns the stages of each pipeline rank."""
        return [(stage,) for stage in range(layout.pipeline)]

    def activation_bytes(self, cell: Cell, layout: Layout, workload: Workload) -> float | None:
        """Returns a rank's peak bytes in forward, loss and backward of all micro-batches in flight,
        without states and gradients (harness/workloads/operators.py). None if unknown."""
        if layout.tensor > 1:
            return None
        return self.counted_activations(cell, layout, workload)

    def counted_activations(
        self, cell: Cell, layout: Layout, workload: Workload, sequence_parallel: bool = False
    ) -> float:
        """Counts activations of a rank's tokens and layers. In a pipeline, counts those of the
        fullest rank."""
        from harness.workloads.operators import activation_bytes, activations_by_depth

        if cell.activations == "host" and cell.device == "cuda":
            # Only the current block's tensors are on the device.
            workload = workload.with_blocks(1) or workload
        samples = max(1, cell.global_batch // layout.shares // cell.micro_batches)
        tokens = cell.sequence_length // layout.sequence
        size = (samples, tokens, cell.recompute)
        split = (cell.precision, layout.tensor, sequence_parallel, cell.loss)
        if not self.capabilities.stages:
            return float(activation_bytes(workload, *size, *split))
        ends, block, recomputed = activations_by_depth(workload, *size, *split)
        rank_stages, most = self.pipeline_stages(layout), 0.0
        count, forwards_first = sum(map(len, rank_stages)), self.pipeline_schedule in FORWARDS_FIRST
        for rank, stages in enumerate(rank_stages):
            blocks = sum(len(blocks_of_stage(workload.blocks, stage, count)) for stage in stages)
            forwards = in_flight(
                self.pipeline_schedule, rank, len(rank_stages), len(stages), cell.micro_batches
            )
            held = forwards / len(stages) * blocks * block + recomputed
            if count - 1 in stages:
                held += ends * (cell.micro_batches if forwards_first else 1)
            else:
                # Add gradients of a block's results; the last stage has those of its head.
                held += (block + recomputed) / 2
            most = max(most, held)
        return most

    def traffic(self, cell: Cell, layout: Layout, facts: ModelFacts) -> float | None:
        """Returns the bytes that a rank must send per step in its library's collectives, averaged
        over ranks (see harness/measure/rank_traffic.py)."""
        return None

    def recomputed_flops(self, cell: Cell, workload: Workload) -> float:
        """Returns the FLOPs of recomputation per step, over all ranks."""
        if cell.recompute == "none":
            return 0.0
        from harness.workloads.operators import recomputed_flops

        per_sample = recomputed_flops(
            workload, cell.sequence_length, cell.recompute, self.recomputes_whole_blocks
        )
        return float(cell.global_batch * per_sample)


class Strategy(CostModel, BaseModel, ABC):
    """One way to spread training over devices. Its fields are options; its docstring's first line
    describes it."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    requires: ClassVar[tuple[str, ...]] = ()
    """Packages beyond torch; a missing one makes the cell `unavailable`."""
    install: ClassVar[str] = ""
    """How to install the packages. Empty means `how_to_install(PACKAGE)`."""
    capabilities: ClassVar[Capabilities] = Capabilities()

    def layout(self, devices: int) -> Layout:
        """Returns the numbers of ranks on each axis. Raises Refused if the devices do not divide
        evenly."""
        return Layout(data=devices)

    def check(self, cell: Cell, workload: Workload) -> None:
        """Raises Refused or Unavailable if the strategy cannot run the cell."""

    def tolerance(self, cell: Cell, workload: Workload) -> Tolerance:
        """Returns the allowed deviation from the reference, EXACT or looser."""
        return EXACT

    def reference(self, cell: Cell) -> Cell:
        """Returns the reference: the same training in one process, by `single` unless that would
        round or train differently."""
        return cell.reference()

    def stand_in(self, cell: Cell) -> str | None:
        """Returns what the cell's device runs instead of the real strategy; None if it runs the
        real one."""
        return None

    def ddp_equivalent_of(self, cell: Cell) -> str | None:
        """Returns the library or launcher through which the cell runs plain DDP; None if it runs
        anything else."""
        return None

    @property
    def cycle(self) -> int:
        """Number of steps after which the work repeats, such as a period of averaging."""
        return 1

    @property
    def settling_steps(self) -> int:
        """Number of first steps that allocate something, such as the optimizer's state."""
        return 1

    def rewind_skipped_reason(self, cell: Cell) -> str:
        """Returns why restoring the registered state cannot rewind training; empty if it can."""
        return "the number of its steps is fixed" if self.capabilities.fixed_steps else ""

    @property
    def checkpoints(self) -> tuple[str, ...]:
        """Supported values of the checkpoint axis with these options."""
        return self.capabilities.checkpoints

    @property
    def own_launcher(self) -> OwnLauncher | None:
        """Launcher of the ranks; None for the cell's launcher."""
        return None

    def export(self, cell: Cell, to: str) -> Export | None:
        """Returns how to run the cell under launcher `to` without the suite; None if that is not
        supported. Raises Refused if anything but the launcher prevents it."""
        return None

    @abstractmethod
    def setup(self, job: Job) -> TrainStep:
        """Builds, wraps and places model and optimizer; returns the training step."""


class Emulation(Strategy):
    """Reference that emulates ranks in one process, each with its part of the batch."""

    @property
    @abstractmethod
    def emulated_ranks(self) -> int: ...

    def ranks_agree(self, step: int) -> bool:
        """Returns whether the emulated ranks have equal parameters after this step."""
        return True
