from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.planner.fitting import Floats, Prior, constant

GIGA, MEGA = 1e9, 1e6
WORKING_SET = 32e6
"""Activation bytes at which `memory_rate` applies."""
PRECISIONS = ("fp32", "bf16", "fp16")


@dataclass(frozen=True)
class CellFacts:
    """Facts known before measuring a cell, of the fullest rank unless noted."""

    workload: str
    setting: str
    """Text of the setting; only cells of one setting are comparable."""
    links: str
    label: str
    engine: str
    """Strategy whose library does the work outside the model."""
    precision: str
    exact: bool
    """Whether it matches training in one process, up to rounding."""
    stand_in: bool
    """Whether a stand-in replaces the real arithmetic; never recommended."""
    data: int
    """Ranks that train the same part of the model."""
    pipeline: int
    tensor: int
    cores: int
    micro_batches: int
    flops: float
    """Operations over all ranks, including recomputation."""
    operators: int
    """Operators per micro-batch of the unsplit model."""
    moved_bytes: float
    """Bytes per micro-batch that the unsplit model moves outside matrix products."""
    tensors: int
    """Trained tensors of the unsplit model; 1 with fused AdamW."""
    state_bytes: float
    """States kept between steps, without the library's."""
    library_bytes: float
    transient_bytes: float
    """Gradients and gathered parameters."""
    trained_bytes: float
    """Trained parameters of one rank's part, before sharding."""
    optimizer_bytes: float
    """Optimizer state read and written by each update."""
    activation_bytes: float
    """Activations per micro-batch of the unsplit model."""
    sent_bytes: float
    messages: float
    sharded: bool = False
    uses_shared_memory: bool = False
    flat: bool = False
    """Whether the library copies to and from flat buffers."""
    served: bool = False
    """Whether a process that does not train holds the model."""
    disk_bytes: float = 0.0
    """Bytes read and written over all ranks."""
    threads: int = 1
    """Devices driven by threads of one process."""
    optimizer_flops: float = 0.0
    """Operations of a rank's update in bf16 matrix products."""
    coded_elements: float = 0.0
    """Optimizer elements that a rank's update converts to and from 8 bits."""
    convolutions: int = 0
    """Convolutions among the operators; a backward counts twice."""
    link_bytes_per_second: float = float("inf")
    """Rate between nodes, per direction; infinite on one node."""
    link_seconds: float = 0.0
    """One-way delay between nodes."""

    @property
    def ranks(self) -> int:
        return self.data * self.pipeline * self.tensor

    @property
    def variant(self) -> tuple[str, str, bool]:
        """Key of cells whose library does the same work."""
        return self.label, self.precision, self.ranks > 1

    @property
    def family(self) -> tuple[str, str, bool]:
        """Key of a library's strategies and options."""
        return self.engine, self.precision, self.ranks > 1


@dataclass(frozen=True)
class Observation:
    facts: CellFacts
    seconds: float
    """Step time, from the run's estimated throughput."""
    peak_bytes: float | None
    """Memory of the fullest rank above its imports."""
    seconds_low: float | None = None
    """Lower bound of the 95 % interval, after several trials."""
    seconds_high: float | None = None


@dataclass(frozen=True)
class CpuTimeConstants:
    """Step-time constants for ranks of one core."""

    fp32_rate: float = constant(
        Prior(80.0, spread=30.0, low=5.0, high=400.0, unit="GFLOP/s"),
        "rate of fp32 matrix products on one core",
        "16 to 64 operations a cycle at 2 to 4 GHz, less what small products lose",
    )
    bf16_gain: float = constant(
        Prior(2.0, spread=0.25, low=0.02, high=20.0, unit="1"),
        "factor by which matrix products are faster in bf16",
        "a fraction if bf16 is emulated, 2 with AVX512's products of pairs, 10 with AMX",
    )
    fp16_rate: float = constant(
        Prior(5.5, spread=1.5, low=0.5, high=1500.0, unit="GFLOP/s"),
        "rate of fp16 matrix products on one core",
        "most CPUs convert each element; products of 128 to 512 rows, measured on three machines: 4"
        " to 7",
    )
    memory_rate: float = constant(
        Prior(30.0, spread=12.0, low=2.0, high=200.0, unit="GB/s"),
        "rate at which a core reads and writes in operators other than matrix products",
        "between one core's share of the memory and its caches",
    )
    working_set: float = constant(
        Prior(0.3, spread=0.15, low=0.0, high=1.0, unit="1"),
        "exponent by which memory_rate falls with the activations' bytes over 32e6, because caches"
        " hold less of them",
        "cache misses follow a power law of size with an exponent of about one half (Hartstein"
        " and others, 2006)",
    )
    operator: float = constant(
        Prior(5e-6, spread=2e-6, low=1e-6, high=40e-6, unit="s"),
        "time to call one operator from Python, with its part of autograd",
        "torch's dispatch takes 1 to 10 microseconds on cores of 2 to 4 GHz",
    )
    update_bytes: float = constant(
        Prior(10.0, spread=5.0, low=1.0, high=60.0, unit="GB/s"),
        "rate of updating optimizer state",
        "an update reads and writes state, parameters and gradients at the memory's rate",
    )
    tensor_update: float = constant(
        Prior(40e-6, spread=25e-6, low=2e-6, high=400e-6, unit="s"),
        "time to update and clear one parameter tensor, besides its bytes",
        "several operators for each tensor",
    )
    coded: float = constant(
        Prior(15e-9, spread=6e-9, low=0.1e-9, high=100e-9, unit="s"),
        "time to update an element of 8-bit optimizer state",
        "a search among 256 values takes 8 comparisons; bitsandbytes on a CPU: 13 to 25 each",
    )
    convolution: float = constant(
        Prior(0.15e-3, spread=0.08e-3, low=0.0, high=2e-3, unit="s"),
        "time of a convolution besides its arithmetic: oneDNN reorders its arguments in blocks",
        "products of 8 to 32 channels: measured 0.05 to 0.3 ms each",
    )
    local_rate: float = constant(
        Prior(0.7, spread=0.2, low=0.05, high=20.0, unit="GB/s"),
        "rate of a collective's bytes between ranks on one machine: copies, sums and system calls",
        "gloo over loopback, whose work takes the cores that compute",
    )
    shared_rate: float = constant(
        Prior(4.0, spread=2.0, low=0.3, high=100.0, unit="GB/s"),
        "rate of a collective's bytes between ranks that share memory",
        "two copies and a sum at a core's share of the memory's rate",
    )
    message: float = constant(
        Prior(1.3e-3, spread=0.2e-3, low=0.02e-3, high=10e-3, unit="s"),
        "time of a collective or transfer besides its bytes: handing over to a thread and waiting"
        " for the slower rank",
        "tens of microseconds for gloo alone, milliseconds if ranks wait for each other",
    )
    unit: float = constant(
        Prior(3.0e-3, spread=1.0e-3, low=0.05e-3, high=20e-3, unit="s"),
        "time of a gather or scatter in a library's hooks around a module, with copies to and from"
        " flat buffers",
        "a collective's time, and tens of operators for each of a module's parameters",
    )
    disk_rate: float = constant(
        Prior(1.5, spread=0.7, low=0.02, high=20.0, unit="GB/s"),
        "rate at which all ranks together read from and write to a disk",
        "0.1 for a magnetic disk, several for NVMe and for a cache in memory",
    )
    emulated: float = constant(
        Prior(1.3, spread=0.3, low=0.7, high=4.0, unit="1"),
        "factor by which a collective's work takes longer between emulated nodes",
        "their packets pass a switch and shaping, which run on the same cores",
    )
    link_hidden: float = constant(
        Prior(0.3, spread=0.25, low=0.0, high=1.0, unit="1"),
        "share of the backward pass that can hide the transfer over a link between nodes",
        "anything from none to all of the backward pass may hide it (DDP, arXiv 2006.15704)",
    )
    step: float = constant(
        Prior(2.0e-3, spread=2.0e-3, low=0.0, high=50e-3, unit="s"),
        "fixed time of a step: batch, loss, loop",
        "milliseconds of Python",
    )


@dataclass(frozen=True)
class CpuMemoryConstants:
    """Constants of a rank's peak anonymous resident memory above its imports."""

    overhead: float = constant(
        Prior(8.0, spread=6.0, low=0.0, high=200.0, unit="MB"),
        "memory that any training takes: threads, code that is loaded late, batches",
        "megabytes for each thread's heap and stack",
    )
    node_overhead: float = constant(
        Prior(4.0, spread=2.0, low=0.0, high=50.0, unit="MB"),
        "additional memory of a rank on an emulated node",
        "its agent and its connections; measured on one machine: 3 to 6",
    )
    activations: float = constant(
        Prior(1.2, spread=0.2, low=0.7, high=2.5, unit="1"),
        "resident bytes per byte of activations, because the heap keeps some",
        "1 is none; glibc keeps freed blocks below its threshold",
    )
    transient: float = constant(
        Prior(1.3, spread=0.5, low=0.0, high=4.0, unit="1"),
        "resident bytes per byte needed temporarily",
        "1, and temporaries of the update",
    )
    exchanged: float = constant(
        Prior(0.5, spread=0.4, low=0.0, high=4.0, unit="1"),
        "resident bytes of a collective's buffers per byte that the ranks reduce or gather",
        "gloo and libraries copy what they send",
    )


class CellColumns:
    """Facts of many cells as arrays (shape [cells]).

    `crowd`: how much longer work takes because ranks outnumber cores.
    """

    def __init__(self, cells: Sequence[CellFacts]) -> None:
        def column(name: str) -> Floats:
            return np.array([getattr(cell, name) for cell in cells], float)

        self.precision = np.array([PRECISIONS.index(cell.precision) for cell in cells], np.int64)
        ranks = column("ranks")
        crowd = np.maximum(1.0, ranks / column("cores"))
        stages = np.array([cell.pipeline for cell in cells], float)
        tensor = np.array([cell.tensor for cell in cells], float)
        split, micro = stages * tensor, column("micro_batches")
        # A pipeline of p stages and m micro-batches idles for (p - 1) / m of its work (GPipe, arXiv
        # 1811.06965, section 2.2).
        self.filling = 1 + (stages - 1) / micro
        self.flops = crowd * column("flops") / ranks
        self.moved = crowd * micro * column("moved_bytes") / split
        # Threads of one process share the interpreter lock.
        self.operators = crowd * micro * column("operators") * column("threads") / stages
        self.optimizer_flops = crowd * column("optimizer_flops")
        self.coded = crowd * column("coded_elements")
        self.convolutions = crowd * micro * column("convolutions")
        self.updated = crowd * column("optimizer_bytes")
        self.tensors = crowd * column("tensors") / stages
        # Each doubling of the ranks adds a round to a collective (trees and recursive halving;
        # Thakur and others, IJHPCA 2005).
        group = np.maximum(2.0, np.maximum(column("data"), tensor))
        rounds = column("messages") * np.ceil(np.log2(group))
        # Module hooks work once per gather, whatever the number of rounds.
        self.units = crowd * column("sharded") * column("messages")
        self.sent, self.messages = crowd * column("sent_bytes"), crowd * rounds - self.units
        self.uses_shared_memory = column("uses_shared_memory") > 0
        self.served, self.disk = column("served") > 0, column("disk_bytes")
        self.wire = column("sent_bytes") / column("link_bytes_per_second")
        self.linked = np.array([bool(cell.links) for cell in cells])
        self.delays = rounds * 2 * column("link_seconds")
        self.trained, self.states = column("trained_bytes"), column("state_bytes")
        self.library, self.transient = column("library_bytes"), column("transient_bytes")
        # One micro-batch per stage is in flight (PipeDream-2BW, arXiv 2006.09503).
        self.kept = np.minimum(stages, micro) * column("activation_bytes") / split
        # Gloo's buffer is as large as what a call reduces or gathers. A library's flat buffers stay
        # on the heap.
        calls = np.where(column("flat") > 0, 1.0, np.maximum(1.0, column("messages") / micro))
        self.exchanged = np.where(ranks == 1, 0.0, self.trained / calls)


@dataclass(frozen=True)
class CpuStep:
    """Seconds of a step (shape [cells]); the parts add up to `total`."""

    compute: Floats
    """The model's arithmetic, including a pipeline's filling."""
    calls: Floats
    update: Floats
    exchange: Floats
    """Collectives on one machine, and disk transfers."""
    link: Floats
    """Exposed transfers between nodes."""

    @property
    def total(self) -> Floats:
        return self.compute + self.calls + self.update + self.exchange + self.link


def step_seconds(columns: CellColumns, c: CpuTimeConstants, effects: Floats) -> CpuStep:
    """Returns each cell's step time in seconds.

    `effects` (shape [cells]): log slowdowns by a library, except of the model's arithmetic and the
    link. Rates are in 1e9 per second.
    """
    rate = np.array([c.fp32_rate, c.bf16_gain * c.fp32_rate, c.fp16_rate])[columns.precision]
    missed = (columns.kept / WORKING_SET) ** c.working_set
    arithmetic = (
        columns.flops / (rate * GIGA)
        + columns.moved * missed / (c.memory_rate * GIGA)
        + columns.convolutions * c.convolution
    )
    compute = columns.filling * arithmetic
    more = np.exp(effects)
    calls = more * (columns.filling * columns.operators * c.operator + c.step)
    special = columns.optimizer_flops / (c.bf16_gain * c.fp32_rate * GIGA)
    special = special + columns.coded * c.coded
    updated = columns.updated / (c.update_bytes * GIGA) + columns.tensors * c.tensor_update
    update = more * (updated + special)
    local = np.where(columns.uses_shared_memory, c.shared_rate, c.local_rate)
    exchange = more * (
        columns.sent / (local * GIGA)
        + columns.messages * c.message
        + columns.units * c.unit
        + columns.disk / (c.disk_rate * GIGA)
    )
    exchange = exchange * np.where(columns.linked, c.emulated, 1.0)
    hidden = c.link_hidden * 2 / 3 * arithmetic
    link = np.maximum(0.0, columns.wire - hidden) + columns.delays
    return CpuStep(compute, calls, update, exchange, link)


def peak_bytes(columns: CellColumns, c: CpuMemoryConstants, effects: Floats) -> Floats:
    """Returns the fullest rank's peak resident bytes.

    A library's buffers count only as far as gradients fill them. `effects` (shape [cells]): log
    factors by library.
    """
    buffers = np.minimum(columns.library, 2 * columns.trained)
    needed = (
        columns.states
        + buffers
        + c.transient * columns.transient
        + np.where(columns.served, 0.0, c.activations * columns.kept)
        + c.exchanged * columns.exchanged
        + (c.overhead + np.where(columns.linked, c.node_overhead, 0.0)) * MEGA
    )
    result: Floats = needed * np.exp(effects)
    return result
