"""A torch.distributed store that listens on a single address.

torch's own stores listen on all interfaces, where anyone who reaches the port may read and change
the ranks' data.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

LOOPBACK = "127.0.0.1"
RENDEZVOUS_SECONDS = 60
"""Timeout for the rendezvous of a trial's nodes."""
CLIENT = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
"""Environment that makes every rank a client of an existing store, so that rank 0 opens none."""


def open_store(address: str, port: int = 0, timeout: timedelta | None = None) -> TCPStore:
    """Opens a store that listens only on `address`; raises OSError if the port is in use.

    If `port` is 0, uses a free port; the store's attribute `port` has the number.
    """
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
