"""What keeps NCCL on an emulated link: InfiniBand, shared memory and NVLink all lead around it, and
no network namespace holds them."""

from __future__ import annotations


def nccl_variables(links: str, node_name: str) -> dict[str, str]:
    """Environment of a rank, to be set before NCCL is loaded; empty where the cell has no emulated
    links.

    Between nodes NCCL then has nothing but TCP. Within a node it keeps peer-to-peer copies and
    shared memory, as on a real one: NCCL uses those only between ranks of one host, which it knows
    by NCCL_HOSTID, and so do its NVLink multicasts. (NCCL_P2P_DISABLE and NCCL_SHM_DISABLE would
    take them from ranks of one node too.)
    """
    if not links:
        return {}
    return {
        "NCCL_HOSTID": node_name,
        "NCCL_NET": "Socket",
        "NCCL_IB_DISABLE": "1",
        "NCCL_COLLNET_ENABLE": "0",  # sums in InfiniBand's switches
        "NCCL_MNNVL_ENABLE": "0",  # NVLink between hosts, which GPUs of one rack may have
    }
