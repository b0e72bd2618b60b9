"""Columns of `trials`: which trial it is, what it ran and how it ended."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from harness.record.table import Int32, Int64, Record, since


@dataclass(frozen=True, kw_only=True)
class TrialIdentity(Record):
    """Which trial of which cell and run."""

    schema_version: Int32
    """version of this schema"""
    run_id: str
    """run that the trial belongs to"""
    cell_id: str
    """same measurement, same id, on every host"""
    cell_name: str
    """the cell in words"""
    label: str
    """the strategy with its options in words"""
    cell: str
    """JSON: the whole cell"""
    trial: Int32
    """number of the trial of its cell, from 0"""
    attempt: Int32 = 1
    """1, more where an interrupted attempt came before"""
    position: Int32
    """place in the run's shuffled order"""


@dataclass(frozen=True, kw_only=True)
class TrialEnd(Record):
    """How the trial ended, and how long its parts took."""

    status: str
    """ok, unavailable, refused, skipped, out_of_memory, failed, timeout, interrupted, diverged"""
    reason: str = ""
    """what happened and what to do; empty when ok"""
    expected: bool = False
    """the matrix expects this status (a cell that is known to diverge)"""
    log_tail: str = ""
    """end of the log of the rank that had the first cause"""
    stacks: str = ""
    """stacks of the ranks, after a timeout"""
    started_at: datetime
    """UTC"""
    wall_seconds: float | None = None
    """the whole trial, start and end of its processes included"""
    startup_seconds: float | None = None
    """from the launch to the last rank's first instruction"""
    setup_seconds: float | None = None
    """process group, model, wrapping; slowest rank"""
    first_step_seconds: float | None = None
    """step 0, slowest rank"""
    compile_seconds: float | None = since(10, None)
    """that torch.compile took before the timed steps, slowest rank; part of the first steps; null
    where nothing is compiled"""


@dataclass(frozen=True, kw_only=True)
class TrialWorkload(Record):
    """What is trained, and by which strategy."""

    system: str | None = since(2, None)
    """system under test that the matrix files the cell under"""
    strategy: str
    options: str
    """JSON"""
    workload: str
    data: str
    data_fingerprint: str | None = None
    """sha256 of the tokens"""
    sequence_length: Int32
    """tokens per sample"""


@dataclass(frozen=True, kw_only=True)
class TrialPlacement(Record):
    """The devices and nodes that it ran on, and the links between them."""

    devices: Int32
    """number of devices"""
    nodes: Int32 | None = since(4, None)
    """number of nodes that the devices are on"""
    node_names: tuple[str, ...] = since(4, ())
    """of a cell on several nodes, in the order of its ranks"""
    node_facts: str | None = since(4, None)
    """JSON: hardware, address, interface, nominal and measured link, switches, NUMA and GPU
    topology of each of these"""
    links: str | None = since(5, None)
    """emulated link between nodes that was asked for: none, or rate and one-way delay; null: their
    own network"""
    link_bits_per_second: float | None = since(5, None)
    """payload of one TCP stream between the first two nodes, measured before the link's first trial
    """
    link_latency_seconds: float | None = since(5, None)
    """half the median round trip of a byte between them, measured then too"""
    link_emulation: str | None = since(5, None)
    """how: network namespaces, tbf for the rate, netem or a user-space relay for the delay"""
    device: str
    """cpu or cuda"""
    processes: Int32 | None = None
    """number of ranks"""
    data_parallel: Int32 | None = None
    pipeline_parallel: Int32 | None = None
    tensor_parallel: Int32 | None = None
    sequence_parallel: Int32 | None = since(10, None)
    """number of ranks that share each sample's tokens"""


@dataclass(frozen=True, kw_only=True)
class TrialSetting(Record):
    """How it was trained and launched."""

    precision: str
    regime: str
    """strong or weak"""
    global_batch: Int32
    """samples per step"""
    micro_batches: Int32
    recompute: str = since(9, "none")
    """what blocks compute again during backward: none, selective (all but matrix products and
    attention), full"""
    compile: str = since(10, "none")
    """what torch.compile compiles: none, block (each block by itself), block_cudagraphs (its
    kernels are replayed as CUDA graphs, too)"""
    optimizer: str
    seed: Int64
    launcher: str
    """elastic (torchrun's agent), spawn, or the command of a library's own launcher"""
    packages: tuple[str, ...] = since(8, ())
    """packages beyond torch that its strategy needs"""
    wraps_ddp: str | None = since(2, None)
    """library whose wrapper around DDP's mathematics this is"""
    threads_per_device: Int32
    """CPU cores and intra-op threads of each device's rank"""
    memory_limit_bytes: Int64 | None = None
    stand_in: str | None = None
    """what ran instead of the real thing"""
    oversubscribed: bool
    """more ranks than cores: its times say nothing of real hardware"""
    rank_cores: tuple[str, ...] = since(7, ())
    """CPU cores that each rank was pinned to, as 0-7,16"""
