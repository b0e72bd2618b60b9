"""Step time and memory of CPU cells: arithmetic on their facts and on fitted constants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.planner.cluster.layouts import Floats
from harness.planner.local.cell_facts import CellFacts
from harness.planner.local.cpu_constants import CpuMemory, CpuTime

GIGA, MEGA = 1e9, 1e6
WORKING_SET = 32e6
"""Bytes of activations at which `memory_rate` is said."""
PRECISIONS = ("fp32", "bf16", "fp16")


class Columns:
    """The facts of many cells as arrays (shape [cells]).

    Where more ranks compute than there are cores, each rank's work takes as many times as long
    (`crowd`).
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
        # A pipeline of p stages and m micro-batches waits (p - 1) / m of its work (GPipe, arXiv
        # 1811.06965, section 2.2).
        self.filling = 1 + (stages - 1) / micro
        self.flops = crowd * column("flops") / ranks
        self.moved = crowd * micro * column("moved_bytes") / split
        # Threads of one process take turns in Python.
        self.operators = crowd * micro * column("operators") * column("threads") / stages
        self.optimizer_flops = crowd * column("optimizer_flops")
        self.coded = crowd * column("coded_elements")
        self.convolutions = crowd * micro * column("convolutions")
        self.updated = crowd * column("optimizer_bytes")
        self.tensors = crowd * column("tensors") / stages
        # Two rounds of a collective over two ranks, as many more for each doubling (trees and
        # recursive halving; Thakur and others, IJHPCA 2005).
        group = np.maximum(2.0, np.maximum(column("data"), tensor))
        rounds = column("messages") * np.ceil(np.log2(group))
        # What hooks around modules do for a gather is done once, in however many rounds.
        self.units = crowd * column("sharded") * column("messages")
        self.sent, self.messages = crowd * column("sent_bytes"), crowd * rounds - self.units
        self.in_memory = column("in_memory") > 0
        self.served, self.disk = column("served") > 0, column("disk_bytes")
        self.wire = column("sent_bytes") / column("link_bytes_per_second")
        self.linked = np.array([bool(cell.links) for cell in cells])
        self.delays = rounds * 2 * column("link_seconds")
        self.trained, self.states = column("trained_bytes"), column("state_bytes")
        self.library, self.transient = column("library_bytes"), column("transient_bytes")
        # As many micro-batches are in flight as there are stages (PipeDream-2BW, arXiv 2006.09503).
        self.kept = np.minimum(stages, micro) * column("activation_bytes") / split
        # Gloo works on a buffer of its own, as large as what a call reduces or gathers; what
        # a library copies to flat buffers stays in the heap of the process.
        calls = np.where(column("flat") > 0, 1.0, np.maximum(1.0, column("messages") / micro))
        self.exchanged = np.where(ranks == 1, 0.0, self.trained / calls)


@dataclass(frozen=True)
class CpuStep:
    """Seconds of a step (shape [cells]); the parts add up to the whole."""

    compute: Floats
    """The model's own arithmetic, which is the same whatever strategy trains it; a pipeline's
    filling included."""
    calls: Floats
    """Calling operators."""
    update: Floats
    exchange: Floats
    """Collectives between ranks on one machine, and what goes to a disk and back."""
    link: Floats
    """Exposed transfers over a link between nodes."""

    @property
    def total(self) -> Floats:
        return self.compute + self.calls + self.update + self.exchange + self.link


def step_seconds(columns: Columns, c: CpuTime, effects: Floats) -> CpuStep:
    """The step time of each cell.

    `effects` (shape [cells]): logarithm of by how much all but the model's own arithmetic and the
    link takes longer than the formulas say, for the sake of the strategy's library. Units: bytes,
    operations and seconds; the rates of the constants are in 1e9 of them a second.
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
    local = np.where(columns.in_memory, c.shared_rate, c.local_rate)
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


def peak_bytes(columns: Columns, c: CpuMemory, effects: Floats) -> Floats:
    """Bytes that the fullest rank has resident at its peak.

    A library's buffers count as far as gradients fill them: pages that nothing has written are not
    resident. `effects` (shape [cells]): logarithm of by how much the strategy's library needs more.
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
