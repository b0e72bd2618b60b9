"""torchft for ranks that are replicas of their own: rendezvous and quorum."""

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
"""Servers that must live as long as this rank."""


def manager_of(job: Job) -> Manager:
    """Returns this rank's manager, which requires one replica per device of the cell.

    Losing a replica changes the training, so an uncommitted period is an error.
    `use_async_quorum=False`: DiLoCo's constructor raises ValueError for a manager that agrees in
    the background.

    Everything listens only on the address of the job's interface. torchft's manager would listen on
    all interfaces, whatever its host. So would its checkpoint HTTP server, which is left out,
    because no replica joins later.
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
    """Returns the address of the server by which replicas find each other; rank 0 starts it."""
    where: list[str | None] = [None]
    if job.rank == 0:
        server = LighthouseServer(bind=f"{address}:0", min_replicas=job.layout.data)
        _LISTENING.append(server)
        port = server.address().rpartition(":")[2]
        where = [f"http://{address}:{port}"]
    dist.broadcast_object_list(where)
    return cast("str", where[0])


def _address(interface: str | None) -> str:
    """Returns an interface's IPv4 address; loopback by default."""
    known = psutil.net_if_addrs().get(interface or "", [])
    return next((a.address for a in known if a.family == socket.AF_INET), LOOPBACK)


class _NobodyComesLater(CheckpointTransport[Any]):  # type: ignore[misc]  # untyped
    """Refuses every checkpoint transfer."""

    def metadata(self) -> str:
        return ""

    def send_checkpoint(self, *_: object, **__: object) -> None:
        raise RuntimeError("a replica asked for a checkpoint, though all began together")

    def recv_checkpoint(self, *_: object, **__: object) -> Any:
        raise RuntimeError("a replica lacks a checkpoint, though all began together")
