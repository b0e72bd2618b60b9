"""A store of torch.distributed that listens on one address: torch's own listen on all interfaces,
and whoever reaches such a port may read and change what ranks tell each other."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

LOOPBACK = "127.0.0.1"
RENDEZVOUS_SECONDS = 60
"""How long the nodes of a trial wait for each other."""
CLIENT = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
"""Environment variable by which every rank is a client of a store that is there, instead of rank 0
opening one."""


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
