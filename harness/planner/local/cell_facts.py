"""What a prediction of one cell on CPU cores rests on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CellFacts:
    """A cell as its strategy and workload describe it, without anything measured.

    Bytes and counts are those of one rank, the fullest where ranks differ, unless said otherwise.
    """

    workload: str
    setting: str
    """What is trained, on how many ranks and over which link, in words: cells of one setting may be
    compared."""
    links: str
    """Emulated link between the nodes; empty: there is none."""
    label: str
    """The strategy with its options."""
    engine: str
    """The strategy whose library does the work beside the model's own."""
    precision: str
    """Of the arithmetic: fp32, bf16 or fp16."""
    exact: bool
    """Whether the strategy declares the same training as one process's, to rounding."""
    stand_in: bool
    """Whether something else than the real thing runs on CPU cores, which nobody should be advised
    to use."""
    data: int
    """Ranks that train the same part of the model on other samples or tokens."""
    pipeline: int
    tensor: int
    cores: int
    """CPU cores for all ranks together."""
    micro_batches: int
    flops: float
    """Floating-point operations of a step, all ranks together, those of recomputation included."""
    operators: int
    """Of the unsplit model in forward and backward of a micro-batch."""
    moved_bytes: float
    """Read and written by those that are no matrix products, in a micro-batch of the unsplit
    model."""
    tensors: int
    """Parameters of the unsplit model that are trained, counted as tensors; 1 where one operator
    updates them all (fused AdamW)."""
    state_bytes: float
    """Kept between steps, without what a library keeps for itself."""
    library_bytes: float
    """Of a library's own copies and buffers."""
    transient_bytes: float
    """Needed in a step beside these for a while: gradients, gathered parameters."""
    trained_bytes: float
    """Of the parameters that one rank's part of the model trains, before they are sharded."""
    optimizer_bytes: float
    """Of the optimizer's state, which each update reads and writes."""
    activation_bytes: float
    """Kept for backward by a micro-batch of the unsplit model."""
    sent_bytes: float
    """In a step, for the collectives that the strategy calls."""
    messages: float
    """Collectives or transfers of a step."""
    sharded: bool = False
    """Whether they gather parameters and scatter gradients."""
    in_memory: bool = False
    """Whether memory that the ranks share carries them, instead of TCP."""
    flat: bool = False
    """Whether its library copies all parameters or gradients to and from flat buffers."""
    served: bool = False
    """Whether a process that trains nothing itself keeps the model, and is the fullest."""
    disk_bytes: float = 0.0
    """To and from a disk in a step, all ranks together."""
    threads: int = 1
    """Devices that one process drives, each from a thread: they take turns in Python."""
    optimizer_flops: float = 0.0
    """Of matrix products in a rank's update, in bf16."""
    coded_elements: float = 0.0
    """Of optimizer state that a rank's update reads from codes of 8 bits and writes to them."""
    convolutions: int = 0
    """Among the operators; each one backward counts twice."""
    link_bytes_per_second: float = float("inf")
    """Between the nodes, each direction; infinite where all ranks are on one node."""
    link_seconds: float = 0.0
    """One-way delay between the nodes."""

    @property
    def ranks(self) -> int:
        """Devices that compute."""
        return self.data * self.pipeline * self.tensor

    @property
    def variant(self) -> tuple[str, str, bool]:
        """What cells have in common whose library does the same work beside the model's."""
        return self.label, self.precision, self.ranks > 1

    @property
    def family(self) -> tuple[str, str, bool]:
        """The same for all strategies and options of a library."""
        return self.engine, self.precision, self.ranks > 1


@dataclass(frozen=True)
class Measured:
    """A cell that ran, and what was measured."""

    facts: CellFacts
    seconds: float
    """Of a step: batch over the run's estimate of the throughput."""
    peak_bytes: float | None
    """Memory of the fullest rank above its imports."""
    seconds_low: float | None = None
    """This and the next bound the 95 % interval; None with one launch."""
    seconds_high: float | None = None
