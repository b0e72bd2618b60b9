"""A torch.distributed store that listens on a single address; torch's listens on all.

`python -m harness.host.tcp_store PROGRAM ARGUMENTS...` runs a Python launcher that calls torchrun,
such as `accelerate launch`, with this store.
"""

from __future__ import annotations

import runpy
import socket
import sys
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore


LOOPBACK = "127.0.0.1"
RENDEZVOUS_SECONDS = 60
CLIENT = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
"""Environment that makes every rank a client, so that rank 0 opens no store."""


def listening_on(interface: str) -> dict[str, str]:
    """Returns variables that make gloo, NCCL and TensorPipe listen on no other interface."""
    return {
        "GLOO_SOCKET_IFNAME": interface,
        # Without `=`, NCCL takes all interfaces that begin with the name: eth1 and eth10.
        "NCCL_SOCKET_IFNAME": f"={interface}",
        "TP_SOCKET_IFNAME": interface,
    }


def open_store(address: str, port: int = 0, timeout: timedelta | None = None) -> TCPStore:
    """Opens a store on `address` only, at a free port for 0 (its attribute `port`). Raises OSError
    if the port is in use."""
    from torch._C._distributed_c10d import TCPStore

    with socket.create_server((address, port)) as listener:
        port = listener.getsockname()[1]
        return TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timeout or timedelta(seconds=RENDEZVOUS_SECONDS),
            master_listen_fd=listener.detach(),
        )


def _bind_torchrun() -> None:
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed.elastic.rendezvous import static_tcp_rendezvous

    def store(
        address: str,
        port: int,
        world_size: int,
        is_master: bool,
        timeout: timedelta,
        multi_tenant: bool = False,
    ) -> TCPStore:
        if is_master:
            return open_store(address, port, timeout)
        return TCPStore(address, port, world_size, False, timeout, multi_tenant=multi_tenant)

    vars(static_tcp_rendezvous)["TCPStore"] = store


if __name__ == "__main__":
    del sys.argv[0]
    _bind_torchrun()
    runpy.run_path(sys.argv[0], run_name="__main__")
