"""What is asked: a model, its sequences and batch, and the cluster to train it on."""

from __future__ import annotations

from dataclasses import dataclass

from harness.planner.cluster.hardware import Cluster
from harness.planner.cluster.model_shape import ModelShape
from harness.spec.errors import UsageError

MOST = {"sequence_length": 10**9, "global_batch": 10**9, "devices": 2**20}
"""The largest questions, far beyond what anybody has trained with: larger numbers are mistakes, and
the arithmetic in 64 bits would not hold them."""


@dataclass(frozen=True)
class Question:
    """A training whose layouts are compared."""

    shape: ModelShape
    cluster: Cluster
    sequence_length: int
    """Tokens of one sequence."""
    global_batch: int
    """Sequences of one step."""
    devices: int

    def __post_init__(self) -> None:
        for name, most in MOST.items():
            value, words = getattr(self, name), name.replace("_", " ")
            if value < 1:
                raise UsageError(f"{words} is {value}; give at least 1")
            if value > most:
                raise UsageError(f"{words} is {value}; give at most {most}")
        per_node = self.cluster.per_node
        if self.devices > per_node and self.devices % per_node:
            lower = self.devices // per_node * per_node
            raise UsageError(
                f"{self.devices} devices do not fill nodes of {per_node}; the nearest numbers that"
                f" do are {lower} and {lower + per_node}"
            )

        if self.nodes > 1 and len(self.cluster.reduce.nodes) == 1:
            raise UsageError(
                f"{self.devices} devices are {self.nodes} nodes of {per_node}, and link"
                f" {self.cluster.links!r} says nothing of the links between nodes; add their rate,"
                " such as nvlink,400gbit"
            )

    @property
    def nodes(self) -> int:
        return -(-self.devices // self.cluster.per_node)

    @property
    def tokens(self) -> int:
        """Of one step."""
        return self.global_batch * self.sequence_length
