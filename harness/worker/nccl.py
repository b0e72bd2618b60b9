"""Settings that keep NCCL on an emulated link.

InfiniBand, shared memory and NVLink bypass it, and no network namespace contains them.
"""

from __future__ import annotations


def nccl_variables(links: str, node_name: str) -> dict[str, str]:
    """Returns a rank's environment, to be set before NCCL is loaded; empty without emulated links.

    Between nodes only TCP is left. Within a node peer-to-peer copies, shared memory and NVLink
    multicasts stay on: NCCL uses them only within a host, which it identifies by NCCL_HOSTID.
    (NCCL_P2P_DISABLE and NCCL_SHM_DISABLE would also disable them within a node.)
    """
    if not links:
        return {}
    return {
        "NCCL_HOSTID": node_name,
        "NCCL_NET": "Socket",
        "NCCL_IB_DISABLE": "1",
        "NCCL_COLLNET_ENABLE": "0",  # reductions in InfiniBand switches
        "NCCL_MNNVL_ENABLE": "0",  # NVLink between hosts of one rack
    }
