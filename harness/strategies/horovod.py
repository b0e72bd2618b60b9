from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path
from typing import Literal

from pydantic import Field

from harness.cell.errors import Refused, Unavailable
from harness.cell.training import Layout, States, Tolerance, TrainStep
from harness.parity.verdict import widest
from harness.seam import Capabilities, Cell, Export, Job, ModelFacts, OwnLauncher, Strategy
from harness.seam.formulas import all_reduced, in_half, model_states
from harness.seam.job import standard_step
from harness.strategies import _horovod
from harness.workloads import Workload

HALF = Tolerance(1e-4, 0.03, "gradients travel in fp16")


class Horovod(Strategy):
    """Horovod's DistributedOptimizer: fused gradients, averaged by ring all-reduce in backward."""

    requires = ("horovod",)
    install = "make setup builds it from its source release (needs g++ and make)"
    capabilities = Capabilities(
        preload=("horovod.torch",),
        compiled_parts=_horovod.compiled,
        checkpoints=("full",),
        reshards=False,
    )

    controller: Literal["gloo", "mpi"] = "gloo"
    """Controller and CPU backend: Gloo's ring, or MPI_Allreduce under mpirun."""
    transport: Literal["auto", "tcp"] = "auto"
    """Transport of MPI (Gloo's is TCP). `auto` uses shared memory within a node, where bytes sent
    are unknown."""
    mpi_yield_when_idle: bool = False
    """Open MPI's setting that lets a waiting thread give up its core, which a rank's own thread
    needs if they share one."""
    op: Literal["average", "adasum"] = "average"
    """How gradients are combined; `adasum` combines updates and needs MPI."""
    compression: Literal["none", "fp16"] = "none"
    """Compression of gradients during communication."""
    fusion_threshold_mib: float = Field(default=128.0, ge=0)
    """Size in MiB of the buffer that fuses small gradients. 0 turns fusion off."""
    cycle_time_ms: float = Field(default=1.0, gt=0)
    """Milliseconds between checks for gradients that are ready on all ranks."""

    def check(self, cell: Cell, workload: Workload) -> None:
        if workload.arithmetic == "bf16":
            raise Refused(
                "Horovod has no all-reduce of bf16: keep the weights in fp32 and set the precision"
                " to bf16"
            )
        if self.op == "adasum":
            self._check_adasum(cell)
        if self.controller == "gloo" and self.transport == "tcp":
            raise Refused("Gloo's transport is always TCP: leave transport out, or use mpi")
        if self.controller == "gloo" and cell.options.get("mpi_yield_when_idle"):
            raise Refused(
                "mpi_yield_when_idle is Open MPI's: set controller to mpi, or leave it out"
            )
        if self.controller == "mpi" and cell.launcher == "spawn":
            raise Refused("mpirun starts the MPI controller's ranks: leave the launcher out")
        if lacks := _horovod.missing(self.controller, cell.device):
            raise Unavailable(lacks)

    def _check_adasum(self, cell: Cell) -> None:
        if self.controller != "mpi":
            raise Refused("Horovod supports Adasum over MPI only: set controller to mpi")
        if cell.devices & (cell.devices - 1):
            raise Refused(
                f"Adasum combines ranks in pairs: it needs a power of two, not {cell.devices}"
            )
        if cell.clip_norm is not None:
            raise Refused(
                "Adasum updates during backward, before all gradients are known: use op average to"
                " clip them"
            )
        if cell.precision == "fp16":
            raise Refused(
                "Adasum updates during backward, before the loss scale can be removed: use bf16 or"
                " fp32"
            )

    def tolerance(self, cell: Cell, workload: Workload) -> Tolerance:
        reasons = [HALF] if self.compression == "fp16" else []
        if self.op == "adasum" and cell.devices > 1:
            steps = math.log2(cell.devices)
            reason = "Adasum adds what differs between the ranks' updates instead of averaging it"
            reasons.append(Tolerance(3e-2 * steps, 1.0 * steps, reason))
        return widest(*reasons)

    def ddp_equivalent_of(self, cell: Cell) -> str | None:
        plain = {"controller", "transport", "mpi_yield_when_idle"}
        return "Horovod" if self.model_fields_set <= plain else None

    @property
    def own_launcher(self) -> OwnLauncher | None:
        return OwnLauncher("mpirun", self._mpirun) if self.controller == "mpi" else None

    def _mpirun(self, cell: Cell, scratch: Path) -> list[str]:
        return _horovod.mpirun(self._documented(cell), scratch)

    def _documented(self, cell: Cell) -> list[str]:
        return _horovod.documented(cell.devices, self.mpi_yield_when_idle, self.transport == "tcp")

    def export(self, cell: Cell, to: str) -> Export | None:
        variables = _horovod.variables(self.controller, self._buffer_size, self.cycle_time_ms)
        return _horovod.export(to, self.controller, self._documented(cell), variables)

    def setup(self, job: Job) -> TrainStep:
        _horovod.initialize(job, self.controller, self._buffer_size, self.cycle_time_ms)
        model = job.model()
        adasum = self.op == "adasum"
        optimizer = _horovod.wrap(job, model, self.compression == "fp16", adasum)
        over_tcp = self.controller == "gloo" or self.transport == "tcp"
        _horovod.register(job, model, optimizer, self._buffer_size, over_tcp)
        update = functools.partial(_horovod.around_update, optimizer, adasum)
        return standard_step(job, model, optimizer, around_update=update)

    @property
    def _buffer_size(self) -> int:
        return int(self.fusion_threshold_mib * 2**20)

    def states(self, cell: Cell, layout: Layout, facts: ModelFacts) -> States:
        """Returns a full copy, the fusion buffer and, with Adasum, each update's starting point.

        On CPUs, only the part of the buffer that gradients fill takes memory.
        """
        starts = 4.0 * facts.parameters if self.op == "adasum" else 0.0
        buffer_bytes = self._buffer_size + starts if cell.devices > 1 else 0.0
        states = model_states(cell, facts)
        return dataclasses.replace(states, library=states.library + buffer_bytes)

    def traffic(self, cell: Cell, layout: Layout, facts: ModelFacts) -> float | None:
        if self.op == "adasum":
            return None
        compressed = self.compression == "fp16"
        return all_reduced(layout.data, in_half(facts) if compressed else facts.trained_bytes)
