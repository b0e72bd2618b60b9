"""`python -m harness.launch.bound_store PROGRAM ARGUMENTS...`: runs a Python launcher that calls
torchrun, such as `accelerate launch`, with a store that listens on its address only."""

from __future__ import annotations

import runpy
import sys
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from harness.host.store import open_store


def _bind_torchrun() -> None:
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
