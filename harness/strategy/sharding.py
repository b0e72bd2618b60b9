"""Device meshes of sharding strategies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.spec.cell import Cell
from harness.spec.errors import Refused
from harness.strategy.job import Job

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def check_hybrid(cell: Cell) -> None:
    """Raises Refused if there are too few devices to both shard and replicate."""
    if cell.devices < 4 or cell.devices % 2:
        raise Refused(
            "hybrid sharding makes 2 replicas of at least 2 shards each: it needs 4, 6, 8 ..."
            f" devices, not {cell.devices}"
        )


def shard_mesh(job: Job, hybrid: bool) -> DeviceMesh:
    """Returns a mesh (shards) or, for hybrid sharding, (2 replicas, shards)."""
    from torch.distributed.device_mesh import init_device_mesh

    devices, kind = job.cell.devices, job.device.type
    if hybrid:
        return init_device_mesh(kind, (2, devices // 2), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh(kind, (devices,), mesh_dim_names=("shard",))
