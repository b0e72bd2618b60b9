"""Columns of `trials`: identity, settings and outcome."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from harness.record.table import Int32, Int64, Record, since


@dataclass(frozen=True, kw_only=True)
class TrialIdentity(Record):
    schema_version: Int32
    """version of this schema"""
    run_id: str
    """run that the trial belongs to"""
    cell_id: str
    """id of the measurement, identical on every host"""
    cell_name: str
    """readable name of the cell"""
    label: str
    """readable name of the strategy with its options"""
    cell: str
    """JSON: the whole cell"""
    trial: Int32
    """number of the trial within its cell, from 0"""
    attempt: Int32 = 1
    """1; higher if earlier attempts were interrupted"""
    position: Int32
    """position in the run's shuffled order"""


@dataclass(frozen=True, kw_only=True)
class TrialEnd(Record):
    status: str
    """ok, unavailable, refused, skipped, out_of_memory, failed, timeout, interrupted, diverged"""
    reason: str = ""
    """what happened and what to do; empty if ok"""
    expected: bool = False
    """whether the matrix expects this status (a cell known to diverge)"""
    log_tail: str = ""
    """end of the log of the rank that failed first"""
    stacks: str = ""
    """stacks of the ranks after a timeout"""
    started_at: datetime
    """UTC"""
    wall_seconds: float | None = None
    """the whole trial, including start and end of its processes"""
    startup_seconds: float | None = None
    """from the launch to the last rank's first instruction"""
    setup_seconds: float | None = None
    """process group, model, wrapping; slowest rank"""
    first_step_seconds: float | None = None
    """step 0, slowest rank"""
    compile_seconds: float | None = since(10, None)
    """time of torch.compile before the timed steps, slowest rank; part of the first steps; null if
    nothing is compiled"""


@dataclass(frozen=True, kw_only=True)
class TrialWorkload(Record):
    system: str | None = since(2, None)
    """system under test under which the matrix lists the cell"""
    strategy: str
    options: str
    """JSON: options of the strategy"""
    workload: str
    data: str
    data_fingerprint: str | None = None
    """sha256 of the tokens"""
    sequence_length: Int32
    """tokens per sample"""


@dataclass(frozen=True, kw_only=True)
class TrialPlacement(Record):
    devices: Int32
    """number of devices"""
    nodes: Int32 | None = since(4, None)
    """number of nodes with these devices"""
    node_names: tuple[str, ...] = since(4, ())
    """names of the nodes of a multi-node cell, in the order of its ranks"""
    node_facts: str | None = since(4, None)
    """JSON: hardware, address, interface, nominal and measured link, switches, NUMA and GPU
    topology by node"""
    links: str | None = since(5, None)
    """requested emulated link between nodes: none, or rate and one-way delay; null: the nodes' own
    network"""
    link_bits_per_second: float | None = since(5, None)
    """payload rate of one TCP stream between the first two nodes, measured before the link's first
    trial"""
    link_latency_seconds: float | None = since(5, None)
    """half the median round trip of a byte between them, measured at the same time"""
    link_emulation: str | None = since(5, None)
    """method: network namespaces, tbf for the rate, netem or a user-space relay for the delay"""
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
    precision: str
    regime: str
    """strong or weak"""
    global_batch: Int32
    """samples per step"""
    micro_batches: Int32
    recompute: str = since(9, "none")
    """what blocks recompute during backward: none, selective (all but matrix products and
    attention), full"""
    compile: str = since(10, "none")
    """what torch.compile compiles: none, block (each block separately), block_cudagraphs (also
    replayed as CUDA graphs)"""
    optimizer: str
    seed: Int64
    launcher: str
    """elastic (torchrun's agent), spawn, or the command of a library's own launcher"""
    packages: tuple[str, ...] = since(8, ())
    """packages in addition to torch that the strategy needs"""
    wraps_ddp: str | None = since(2, None)
    """library whose DDP-equivalent wrapper this is"""
    threads_per_device: Int32
    """CPU cores and intra-op threads of each device's rank"""
    memory_limit_bytes: Int64 | None = None
    stand_in: str | None = None
    """what ran as a substitute for the real thing"""
    oversubscribed: bool
    """more ranks than cores: its times tell you nothing about real hardware"""
    rank_cores: tuple[str, ...] = since(7, ())
    """CPU cores that each rank was pinned to, such as 0-7,16"""
