"""Stores of torch.distributed that listen on one address: torch's own listen on all interfaces, and
whoever reaches such a port may read and change what ranks tell each other.

`python -m harness.launch.bound_store PROGRAM ARGUMENTS...` runs a launcher that is a Python program
and calls torchrun, such as `accelerate launch`, with its store bound in this way.
"""

from __future__ import annotations

import runpy
import socket
import sys
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

RENDEZVOUS_SECONDS = 60
"""How long the nodes of a trial wait for each other."""


def open_store(address: str, port: int = 0, timeout: timedelta | None = None) -> TCPStore:
    """A store that listens on `address` alone, on a free port where `port` is 0; its attribute
    `port` is the number. Raises OSError where the port is in use."""
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
    """Makes the static rendezvous of torchrun in this process open its store by `open_store`."""
    from torch.distributed import TCPStore
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
