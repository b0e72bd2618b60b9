"""The one seam: a strategy is a frozen set of options with one required method, `setup(job) ->
TrainStep`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict

from harness import warn_renamed
from harness.spec.cell import Cell

if TYPE_CHECKING:
    from harness.workloads import Workload
    from harness.workloads.counts import ModelFacts
from harness.spec.training import EXACT, Layout, States, Tolerance, TrainStep
from harness.strategy.job import Job


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
    install: ClassVar[str] = ""
    """How to install them where `pip install 'parallelism-bench[PACKAGE]'` is not enough."""
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
    recomputes_whole_blocks: ClassVar[bool] = False
    """Whether its library computes blocks again to their end, where torch's checkpoint stops at the
    last tensor that backward needs."""
    compiles: ClassVar[tuple[str, ...]] = ()
    """Values of the cell's compile axis with which it trains the same."""
    further_optimizers: ClassVar[tuple[str, ...]] = ()
    """Optimizers that it can use beside AdamW and SGD, see harness/strategy/optimizers.py."""
    fixed_steps: ClassVar[bool] = False
    """Whether it must know beforehand how many steps it takes: its launches take as many as the
    cell says, however short they are."""
    max_devices: ClassVar[int | None] = None
    """The largest number of devices it can use; None for any."""
    least_devices: ClassVar[int] = 1
    """The smallest number of devices on which it means something."""
    wraps_ddp: ClassVar[str | None] = None
    """Name of the library whose wrapper around DDP's mathematics it shows; such cells are compared
    side by side."""

    wraps: ClassVar[str] = ""
    """Name of the strategy whose library does most of its work beside the model's own; empty: it
    does all itself."""

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

    def tolerance(self, cell: Cell, workload: Workload) -> Tolerance:
        """How far its training may be from the reference; stricter than EXACT does not exist."""
        former: Callable[[Cell, Workload], Tolerance] | None = getattr(self, "deviation", None)
        if former is None:
            return EXACT
        warn_renamed(f"{type(self).__name__}.deviation", "tolerance")
        return former(cell, workload)

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
    def library(self) -> str:
        """Name of the strategy whose library does most of the work in this cell, `wraps` unless
        options change it; empty: its own does all."""
        return self.wraps

    @property
    def not_set_back(self) -> str:
        """Why the harness cannot set its state back to an earlier step and train on from there;
        empty: it can.

        The harness sets back what the strategy registers: parameters, buffers, states, and the
        numbers in the optimizers.
        """
        return "the number of its steps is fixed" if self.fixed_steps else ""

    @property
    def shards_parameters(self) -> bool:
        """Whether it cuts parameters into parts that are put together when their layer runs."""
        return False

    @property
    def copies_to_flat_buffers(self) -> bool:
        """Whether its library copies all parameters or gradients to and from flat buffers."""
        return self.shards_parameters

    @property
    def zero_stage(self) -> int:
        """What its data axis shards, as the stages of ZeRO say it (arXiv 1910.02054): 0 nothing, 1
        the optimizer's state, 2 gradients too, 3 parameters too."""
        return 3 if self.shards_parameters else 0

    def states(self, cell: Cell, layout: Layout, facts: ModelFacts) -> States | None:
        """What the fullest rank keeps between steps by the formula, for the dtypes and copies the
        library keeps; None: no formula."""
        return None

    def activation_bytes(self, cell: Cell, layout: Layout, workload: Workload) -> float | None:
        """The most that forward, loss and backward of a micro-batch hold in a rank beside states
        and gradients, in fp32; counted once for a model (see harness/workloads/activations.py).
        None: no formula, as where ranks hold parts of the model and do not say which."""
        if layout.tensor > 1 or layout.pipeline > 1:
            return None
        return self.counted_activations(cell, layout, workload)

    def counted_activations(
        self, cell: Cell, layout: Layout, workload: Workload, sequence_parallel: bool = False
    ) -> float:
        """Those of a rank's part of the tokens and of each layer; `sequence_parallel`: see
        harness/workloads/activations.py."""
        from harness.workloads.activations import activation_bytes

        samples = max(1, cell.global_batch // layout.shares // cell.micro_batches)
        tokens = cell.sequence_length // layout.sequence
        split = {"tensor_ranks": layout.tensor, "sequence_parallel": sequence_parallel}
        return float(activation_bytes(workload, samples, tokens, cell.recompute, **split))

    def traffic(self, cell: Cell, layout: Layout, facts: ModelFacts) -> float | None:
        """Bytes that a rank must send per step for the collectives that its library calls, mean of
        the ranks; None: no formula.

        Counted as harness/measure/collectives.py does: an all-reduce of S bytes over N ranks is
        2(N-1)/N S, a reduce-scatter or an all-gather (N-1)/N S. The docstring says where the
        library differs from the paper.
        """
        return None

    def messages(self, cell: Cell, layout: Layout, facts: ModelFacts) -> float | None:
        """Collectives and transfers that a rank waits for in a step, one after the other, mean of
        the steps of its cycle, as its library's code calls them; None: no formula. Those that run
        beside backward count a part, see `BESIDE_BACKWARD`."""
        return None

    def recomputed_flops(self, cell: Cell, workload: Workload) -> float:
        """Floating-point operations that recomputation adds to a step, over all ranks; counted once
        for a model (see harness/workloads/activations.py)."""
        if cell.recompute == "none":
            return 0.0
        from harness.workloads.activations import recomputed_flops

        return float(
            cell.global_batch
            * recomputed_flops(
                workload, cell.sequence_length, cell.recompute, self.recomputes_whole_blocks
            )
        )

    def moved_bytes(self, cell: Cell, layout: Layout, facts: ModelFacts) -> float:
        """Bytes that a step takes to and from a disk, or through one process in host memory; all
        ranks together, about."""
        return 0.0

    @property
    def in_memory(self) -> bool:
        """Whether ranks of a node exchange tensors through memory that they share, or within one
        process, instead of by TCP as gloo does."""
        return False

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
        not under this one. Raises Refused, with the reason, where it is another than the launcher.
        """
        return None

    @abstractmethod
    def setup(self, job: Job) -> TrainStep:
        """Builds, wraps and places model and optimizer; returns the training step.

        Runs in every rank.
        """
