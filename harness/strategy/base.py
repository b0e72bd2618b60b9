"""The one seam: a strategy is a frozen set of options with one required method, `setup(job) ->
TrainStep`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict

from harness.spec.cell import Cell

if TYPE_CHECKING:
    from harness.workloads import Workload
from harness.spec.training import EXACT, Layout, Tolerance, TrainStep
from harness.strategy.costs import CostModel
from harness.strategy.job import Job


@dataclass(frozen=True)
class Export:
    """How a strategy runs outside the suite (see harness/export): what differs between it and all
    others."""

    template: str
    """Its training script, in the folder `templates` next to the strategy's file; extends
    harness/export/templates/train.py.j2."""
    values: dict[str, Any] = field(default_factory=dict)
    """What the template needs to know besides the cell, the model and the strategy's options."""
    files: dict[str, str] = field(default_factory=dict)
    """Config files next to the script, by name."""
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables of the ranks."""
    needs: tuple[str, ...] = ()
    """Packages beyond torch and transformers."""


@dataclass(frozen=True)
class Capabilities:
    """What a strategy can do, and what it needs of the harness, whatever its options."""

    preload: tuple[str, ...] = ()
    """Modules that every rank would import, so the fork server imports them once for all."""
    precisions: tuple[str, ...] = ("fp32", "bf16", "fp16")
    """Values of the cell's precision axis that it can honour."""
    process_group: bool = True
    """Whether its ranks need torch.distributed."""
    synchronizes_batch_norm: bool = False
    """Whether BatchNorm sees the whole global batch."""
    max_restarts: int = 0
    """Elastic restarts that a trial may take."""
    compiles: tuple[str, ...] = ()
    """Values of the cell's compile axis with which it trains the same."""
    extra_optimizers: tuple[str, ...] = ()
    """Optimizers that it can use besides AdamW and SGD, see harness/strategy/optimizers.py."""
    fixed_steps: bool = False
    """Whether it must know the number of steps beforehand: its trials take exactly as many as the
    cell says, however short they are."""
    max_devices: int | None = None
    """Largest number of devices it can use; None for any."""
    min_devices: int = 1
    """Smallest number of devices on which it means something."""
    compiled_parts: Callable[[], dict[str, str]] = dict
    """Returns its library's compiled parts by name, as `bench doctor` shows them: `built`, or the
    command that builds them."""


@dataclass(frozen=True)
class OwnLauncher:
    """A launcher of the strategy's own, which starts ranks on one node only."""

    name: str
    command: Callable[[Cell, Path], list[str]]
    """(cell, scratch folder for the files it reads) -> command line that starts the ranks, to which
    the rank's own is appended."""


class Strategy(BaseModel, ABC):
    """One way to spread training over devices.

    Fields are its options; the first docstring line describes it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    requires: ClassVar[tuple[str, ...]] = ()
    """Packages beyond torch; a missing one makes the cell `unavailable`."""
    install: ClassVar[str] = ""
    """How to install them if `pip install 'parallelism-bench[PACKAGE]'` is not enough."""
    capabilities: ClassVar[Capabilities] = Capabilities()

    def layout(self, devices: int) -> Layout:
        """Data x pipeline x tensor for this many devices; raises Refused if there is none."""
        return Layout(data=devices)

    def check(self, cell: Cell, workload: Workload) -> None:
        """Raises Refused or Unavailable, with the reason, for a cell that this strategy cannot
        run."""

    def tolerance(self, cell: Cell, workload: Workload) -> Tolerance:
        """How far its training may be from the reference; stricter than EXACT does not exist."""
        return EXACT

    def stand_in(self, cell: Cell) -> str | None:
        """What it runs in place of the real thing on this device; None: the real thing."""
        return None

    def ddp_equivalent_of(self, cell: Cell) -> str | None:
        """Name of the library that wraps plain DDP in this cell; None: it does not train as DDP
        does. Such cells are compared side by side."""
        return None

    @property
    def cycle(self) -> int:
        """Steps after which its work repeats: more than 1 if some steps do what others do not, such
        as communicate."""
        return 1

    @property
    def rewind_skipped_reason(self) -> str:
        """Why the harness cannot rewind it to an earlier step and train on from there; empty: it
        can.

        The harness rewinds what the strategy registers: parameters, buffers, states, and the
        numbers in the optimizers.
        """
        return "the number of its steps is fixed" if self.capabilities.fixed_steps else ""

    @property
    def own_launcher(self) -> OwnLauncher | None:
        """The launcher that starts its ranks; None: the cell's launcher does."""
        return None

    @property
    def costs(self) -> CostModel[Any]:
        """Formulas of what a step costs."""
        return CostModel(self)

    def export(self, cell: Cell, to: str) -> Export | None:
        """How the cell runs outside the suite under the launcher `to` (see harness/export); None:
        not under this one. Raises Refused, with the reason, if it is another than the launcher.
        """
        return None

    @abstractmethod
    def setup(self, job: Job) -> TrainStep:
        """Builds, wraps and places model and optimizer; returns the training step.

        Runs in every rank.
        """
