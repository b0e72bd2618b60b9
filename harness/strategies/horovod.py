"""Horovod: whole model on each rank, gradients averaged by its ring all-reduce while backward
runs."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from harness.parity.verdict import widest
from harness.spec.cell import Cell
from harness.spec.errors import Refused, Unavailable
from harness.spec.training import Layout, Retained, States, Tolerance, TrainStep
from harness.strategies import _horovod
from harness.strategy.base import Strategy
from harness.strategy.formulas import all_reduced, model_states
from harness.strategy.job import Job
from harness.strategy.step import standard_step

if TYPE_CHECKING:
    from torch import nn

    from harness.workloads import Workload
    from harness.workloads.counts import ModelFacts

HALF = Tolerance(1e-4, 0.05, "gradients travel in fp16")


class Horovod(Strategy):
    """Horovod's DistributedOptimizer: gradients are averaged by a ring all-reduce, fused into one
    buffer, during backward.

    Parameters and optimizer state are broadcast from rank 0 after wrapping, the state as rank 0's
    state_dict. Not by `broadcast_optimizer_state`: where an optimizer is new, it first takes a real
    step with zero gradients, so that weights are decayed and steps counted once too often; under
    plain SGD, which keeps no state, it leaves out the learning rate. Before wrapping it would be in
    vain: wrapping makes a new optimizer without the old one's state. An all-reduce of bf16 does not
    exist; gradients under autocast are fp32. The fusion buffer is allocated as large as its
    threshold when two gradients are first fused; on a CPU it costs address space at once, and
    memory only as far as gradients fill it.
    """

    requires = ("horovod",)
    install = "make setup builds it from its source release (needs g++ and make)"
    preload = ("horovod.torch",)

    controller: Literal["gloo", "mpi"] = "gloo"
    """Who coordinates the ranks and carries the tensors: Gloo's ring, or MPI_Allreduce of the ranks
    that mpirun starts."""
    transport: Literal["auto", "tcp"] = "auto"
    """What MPI carries bytes by; auto: shared memory within a node, where the bytes sent are not
    known.

    Gloo's is always TCP.
    """
    op: Literal["average", "adasum"] = "average"
    """How gradients are combined; Adasum, which combines the ranks' updates, over MPI only."""
    compression: Literal["none", "fp16"] = "none"
    """Compression of gradients on their way."""
    fusion_threshold_mib: float = Field(default=128.0, ge=0)
    """Size of the buffer that small gradients are fused in; 0: no fusion."""
    cycle_time_ms: float = Field(default=1.0, gt=0)
    """Pause between two looks for gradients that all ranks have ready."""

    @classmethod
    def compiled(cls) -> dict[str, str]:
        return {
            f"Horovod's controller {name}": _horovod.missing(name, "cpu") or "built"
            for name in ("gloo", "mpi")
        }

    def check(self, cell: Cell, workload: Workload) -> None:
        if workload.arithmetic == "bf16":
            raise Refused(
                "Horovod has no all-reduce of bf16: keep the weights in fp32 and set the precision"
                " to bf16"
            )
        if self.op == "adasum":
            if self.controller != "mpi":
                raise Refused("Horovod has Adasum over MPI only: set controller to mpi")
            if cell.devices & (cell.devices - 1):
                raise Refused(
                    f"Adasum combines ranks in pairs: it needs a power of two, not {cell.devices}"
                )
            if cell.precision == "fp16":
                raise Refused(
                    "Adasum updates during backward, before the loss scale can be taken off: use"
                    " bf16 or fp32"
                )
        if self.controller == "mpi" and cell.launcher == "spawn":
            raise Refused(
                "the ranks of the MPI controller are started by mpirun: leave the launcher out"
            )
        if lacks := _horovod.missing(self.controller, cell.device):
            raise Unavailable(lacks)

    def tolerance(self, cell: Cell, workload: Workload) -> Tolerance:
        """Adasum adds in steps of two ranks, and each of them adds what differs, where the
        reference averages it."""
        reasons = [HALF] if self.compression == "fp16" else []
        if self.op == "adasum" and cell.devices > 1:
            steps = math.log2(cell.devices)
            reasons.append(
                Tolerance(
                    3e-2 * steps,
                    1.0 * steps,
                    "Adasum adds what differs between the ranks' updates: another training",
                )
            )
        return widest(*reasons)

    def states(self, cell: Cell, layout: Layout, facts: ModelFacts) -> States:
        """Everything on every rank, and the fusion buffer; Adasum also keeps what each update
        started from."""
        kept = self._buffer_size + (4.0 * facts.parameters if self.op == "adasum" else 0.0)
        return dataclasses.replace(
            model_states(cell, facts), library=kept if cell.devices > 1 else 0.0
        )

    def traffic(self, cell: Cell, layout: Layout, facts: ModelFacts) -> float | None:
        """An all-reduce of every gradient.

        Adasum adds in pairs of ranks at growing distances instead, which has no formula here.
        """
        half = 2 if self.compression == "fp16" else 1
        return (
            all_reduced(layout.data, facts.trained_bytes / half) if self.op == "average" else None
        )

    def same_as_ddp(self, cell: Cell) -> str | None:
        return "Horovod" if self.model_fields_set <= {"controller", "transport"} else None

    @property
    def one_node(self) -> str | None:
        return "mpirun" if self.controller == "mpi" else None

    def command(self, cell: Cell, scratch: Path) -> list[str] | None:
        return (
            _horovod.mpirun(cell.devices, scratch, self.transport == "tcp")
            if self.controller == "mpi"
            else None
        )

    def setup(self, job: Job) -> TrainStep:
        _horovod.initialize(job, self.controller, self._buffer_size, self.cycle_time_ms)
        model = job.model()
        optimizer = self.wrap(job, model)
        over_tcp = self.controller == "gloo" or self.transport == "tcp"
        job.register(
            model,
            optimizer,
            library=lambda: self._buffers(job, optimizer),
            over_tcp=over_tcp,
            wire="ring",
            **_horovod.shown(),
        )
        around = (lambda: self.whole(optimizer)) if self.op == "average" else contextlib.nullcontext
        return standard_step(job, model, optimizer, around_update=around)

    def wrap(self, job: Job, model: nn.Module) -> Any:
        """The distributed optimizer; every rank starts from rank 0's."""
        import horovod.torch as hvd

        optimizer = hvd.DistributedOptimizer(
            job.optimizer(model.parameters()),
            named_parameters=model.named_parameters(),
            compression=(
                hvd.Compression.fp16 if self.compression == "fp16" else hvd.Compression.none
            ),
            backward_passes_per_step=job.cell.micro_batches,
            op=hvd.Adasum if self.op == "adasum" else hvd.Average,
        )
        self.broadcast(model, optimizer)
        return optimizer

    def broadcast(self, model: nn.Module, optimizer: Any) -> None:
        """Rank 0's parameters, buffers, optimizer state and learning rate to all."""
        import horovod.torch as hvd

        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer.load_state_dict(hvd.broadcast_object(optimizer.state_dict(), root_rank=0))

    @contextlib.contextmanager
    def whole(self, optimizer: Any) -> Iterator[None]:
        """Gradients are averaged before GradScaler looks at them, and once: step() would do it
        again."""
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            yield

    @property
    def _buffer_size(self) -> int:
        return int(self.fusion_threshold_mib * 2**20)

    def _buffers(self, job: Job, optimizer: Any) -> Iterator[Retained]:
        yield (
            "library",
            "fusion buffer, as allocated",
            self._buffer_size if job.cell.devices > 1 else 0,
        )
        for start in getattr(optimizer, "_starting_models", {}).values():
            yield "library", "Adasum's starting points", start
