"""torchft for ranks that are replicas of their own: where they meet, and who counts them."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any, cast

import psutil
import torch.distributed as dist
import torchft.manager
from torchft.checkpointing.transport import CheckpointTransport
from torchft.coordination import LighthouseServer, ManagerServer
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo, ProcessGroupNCCL

from harness.host.store import LOOPBACK, open_store
from harness.strategy import Job

_LISTENING: list[object] = []
"""What listens as long as this rank lives."""


def manager_of(job: Job) -> Manager:
    """The manager of this rank, with as many replicas as the cell has devices: a training that
    loses one is another training, so that a period that is not committed is an error.

    The replicas agree on who takes part while they wait, not beside a forward
    (`use_async_quorum=False`): torchft's DiLoCo steps alone for a period and agrees only at its
    end, and its constructor raises ValueError for a manager that would agree in the background.

    Everything listens on the address of the job's interface alone. torchft's manager would listen
    on all interfaces, whatever host it is given; its HTTP server of checkpoints, which would do the
    same, is left out, as nobody comes later.
    """
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
        checkpoint_transport=_NobodyComesLater(),
        init_sync=False,
        max_retries=0,
    )


def _lighthouse(job: Job, address: str) -> str:
    """Address of the server by which replicas find each other; rank 0 starts it."""
    where: list[str | None] = [None]
    if job.rank == 0:
        server = LighthouseServer(bind=f"{address}:0", min_replicas=job.layout.data)
        _LISTENING.append(server)
        port = server.address().rpartition(":")[2]
        where = [f"http://{address}:{port}"]
    dist.broadcast_object_list(where)
    return cast("str", where[0])


def _address(interface: str | None) -> str:
    """IPv4 address of an interface, by default of the one that only this machine reaches."""
    known = psutil.net_if_addrs().get(interface or "", [])
    return next((a.address for a in known if a.family == socket.AF_INET), LOOPBACK)


class _NobodyComesLater(CheckpointTransport[Any]):  # type: ignore[misc]  # untyped
    """Hands no checkpoint to anybody."""

    def metadata(self) -> str:
        return ""

    def send_checkpoint(self, *_: object, **__: object) -> None:
        raise RuntimeError("a replica asked for a checkpoint, though all began together")

    def recv_checkpoint(self, *_: object, **__: object) -> Any:
        raise RuntimeError("a replica lacks a checkpoint, though all began together")
