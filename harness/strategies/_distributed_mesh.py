"""Base of strategies on a replicas x shards x tensor mesh."""

from __future__ import annotations

from pydantic import Field

from harness.strategies._distributed_config import Sizes, check_mesh
from harness.strategies._distributed_formulas import mesh_states
from harness.strategy import (
    Capabilities,
    Cell,
    CostModel,
    Layout,
    ModelFacts,
    Refused,
    States,
    Strategy,
)
from harness.workloads import Workload, make_workload


class MeshStrategy(Strategy):
    """A strategy that splits a model by its transformers plans, and by FSDP2 on the remaining
    ranks."""

    capabilities = Capabilities(precisions=("fp32", "bf16"))

    tensor: int = Field(default=1, ge=1)
    """Ranks that split weights by the model's own plan (`tp_plan="auto"`)."""
    replicas: int = Field(default=1, ge=1)
    """Replicas that each shard the model independently (HSDP)."""

    def sizes(self, devices: int) -> Sizes:
        """Returns the mesh of this many devices; raises Refused if they do not divide."""
        if devices % (self.tensor * self.replicas):
            by = f"tensor {self.tensor} x replicas {self.replicas}"
            raise Refused(f"{devices} devices do not divide by {by}")
        shards = devices // (self.tensor * self.replicas)
        return Sizes(self.replicas, shards, self.tensor)

    def layout(self, devices: int) -> Layout:
        sizes = self.sizes(devices)
        return Layout(data=sizes.replicas * sizes.shards, tensor=sizes.tensor)

    def check(self, cell: Cell, workload: Workload) -> None:
        check_mesh(cell, workload, self.sizes(cell.devices))

    @property
    def costs(self) -> MeshStrategyCosts:
        return MeshStrategyCosts(self)


class MeshStrategyCosts(CostModel[MeshStrategy]):
    @property
    def shards_parameters(self) -> bool:
        return True

    def states(self, cell: Cell, layout: Layout, facts: ModelFacts) -> States | None:
        sizes = self.strategy.sizes(cell.devices)
        return mesh_states(cell, make_workload(cell.workload), sizes, facts)
