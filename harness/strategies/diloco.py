from __future__ import annotations

import dataclasses
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, cast

import psutil
from pydantic import Field

from harness.cell.errors import Refused
from harness.cell.training import EMULATED, Layout, States, Tolerance, TrainStep
from harness.host.tcp_store import LOOPBACK, open_store
from harness.seam import Capabilities, Cell, Job, ModelFacts, Strategy
from harness.seam.checkpoints import StateFiles, Tensors
from harness.seam.formulas import model_states
from harness.seam.job import standard_step
from harness.strategies._replicas import replicas_of
from harness.workloads import Workload

if TYPE_CHECKING:
    from torchft.coordination import ManagerServer
    from torchft.manager import Manager


_LISTENING: list[object] = []
"""Servers that live as long as this rank."""


class DiLoCo(Strategy):
    """DiLoCo (torchft): local training with periodic steps of an outer optimizer.

    The outer gradient is a rank's starting point minus its current parameters; the outer optimizer
    is SGD with Nesterov momentum (arXiv 2311.08105). outer_learning_rate=1 and outer_momentum=0
    average the parameters.
    """

    requires: ClassVar[tuple[str, ...]] = ("torchft",)
    # With fp16 loss scaling, one rank alone could skip a step and shift its period.
    capabilities = Capabilities(
        precisions=("fp32", "bf16"), checkpoints=("sharded",), reshards=False
    )

    period: int = Field(default=4, ge=1)
    """Inner steps between outer steps."""
    outer_learning_rate: float = Field(default=0.7, gt=0)
    """Learning rate of the outer optimizer."""
    outer_momentum: float = Field(default=0.9, ge=0, lt=1)
    """Momentum of the outer optimizer; Nesterov unless 0."""

    @property
    def cycle(self) -> int:
        return self.period

    def check(self, cell: Cell, workload: Workload) -> None:
        if self.period > cell.parity_steps:
            compared = f"the {cell.parity_steps} steps that are compared with the reference"
            raise Refused(
                f"period={self.period} is longer than {compared}: no outer step would be verified"
            )

    def tolerance(self, cell: Cell, workload: Workload) -> Tolerance:
        return EMULATED

    def reference(self, cell: Cell) -> Cell:
        outer = self.outer_learning_rate, self.outer_momentum
        return replicas_of(cell, self.period, self.period - 1, outer=outer)

    def setup(self, job: Job) -> TrainStep:
        import torch
        from torchft.local_sgd import DiLoCo as TorchftDiLoCo

        model, momentum = job.model(), self.outer_momentum
        inner = job.optimizer(model.parameters())
        outer = torch.optim.SGD(
            model.parameters(),
            lr=self.outer_learning_rate,
            momentum=momentum,
            nesterov=momentum > 0,
        )
        manager = manager_of(job)
        diloco = TorchftDiLoCo(manager, [model], inner, outer, sync_every=self.period)
        diloco.__enter__()  # hooks the inner optimizer until the trial ends
        began = diloco._fragments[0].original_parameters
        files = StateFiles(
            job,
            {"model": model, "inner": inner, "outer": outer, "began": Tensors(began)},
            counters := ((diloco, "_local_step"),),
        )
        registered = job.register(model, inner, outer)
        registered.library = lambda: [("library", f"began.{name}", t) for name, t in began.items()]
        registered.waits = [
            (manager, name, "communication") for name in ("start_quorum", "should_commit")
        ]
        registered.counters = counters
        job.save_by(files.save, files.load)
        return standard_step(job, model, inner)

    def states(self, cell: Cell, layout: Layout, facts: ModelFacts) -> States:
        """Returns states between steps: inner states, the period's starting point (in host memory)
        and outer momentum. The outer step adds outer gradients and a copy of the parameters."""
        inner = model_states(cell, facts)
        momentum = facts.parameter_bytes if self.outer_momentum else 0
        start = facts.parameter_bytes if cell.device == "cpu" else 0
        return dataclasses.replace(
            inner,
            optimizer=inner.optimizer + momentum,
            library=inner.library + start,
            transient=inner.transient + 2 * facts.parameter_bytes,
        )


def manager_of(job: Job) -> Manager:
    """Returns this rank's manager, which requires one replica per device. An uncommitted period is
    an error, as losing a replica changes the training. Servers listen only on the job's interface,
    whereas torchft's would listen on all interfaces."""
    import torchft.manager
    from torchft.coordination import ManagerServer
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo, ProcessGroupNCCL

    address = _address(job.interface)
    store = open_store(address)
    _LISTENING.append(store)
    limit = timedelta(seconds=job.cell.time_limit_seconds)

    def listening_here(**arguments: Any) -> ManagerServer:
        return ManagerServer(**{**arguments, "bind": f"{address}:0"})

    torchft.manager.ManagerServer = listening_here
    group = ProcessGroupNCCL if job.device.type == "cuda" else ProcessGroupGloo
    return Manager(
        pg=group(timeout=limit),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=job.layout.data,
        use_async_quorum=False,
        timeout=limit,
        quorum_timeout=limit,
        connect_timeout=limit,
        rank=0,
        world_size=1,
        store_addr=address,
        store_port=store.port,
        lighthouse_addr=_lighthouse(job, address),
        replica_id=f"replica_{job.rank}",
        hostname=address,
        checkpoint_transport=_no_transport(),
        init_sync=False,
        max_retries=0,
    )


def _lighthouse(job: Job, address: str) -> str:
    import torch.distributed as dist
    from torchft.coordination import LighthouseServer

    where: list[str | None] = [None]
    if job.rank == 0:
        server = LighthouseServer(bind=f"{address}:0", min_replicas=job.layout.data)
        _LISTENING.append(server)
        port = server.address().rpartition(":")[2]
        where = [f"http://{address}:{port}"]
    dist.broadcast_object_list(where)
    return cast("str", where[0])


def _address(interface: str | None) -> str:
    addresses = psutil.net_if_addrs().get(interface or "", [])
    return next((a.address for a in addresses if a.family == socket.AF_INET), LOOPBACK)


def _no_transport() -> object:
    from torchft.checkpointing.transport import CheckpointTransport

    class NoTransport(CheckpointTransport[Any]):  # type: ignore[misc]  # untyped
        def metadata(self) -> str:
            return ""

        def send_checkpoint(self, *_: object, **__: object) -> None:
            raise RuntimeError("a replica asked for a checkpoint, although all started together")

        def recv_checkpoint(self, *_: object, **__: object) -> Any:
            raise RuntimeError("a replica needs a checkpoint, although all started together")

    return NoTransport()
