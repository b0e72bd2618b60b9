"""The constants of CPU cells that are fitted to measurements, with meanings, units and bounds."""

from __future__ import annotations

from dataclasses import dataclass

from harness.planner.cluster.constants import _constant as constant


@dataclass(frozen=True)
class CpuTime:
    """Of the step time on CPU cores. A rank has one core unless the cell says otherwise."""

    fp32_rate: float = constant(
        80.0,
        5.0,
        400.0,
        30.0,
        "GFLOP/s",
        "of matrix products in fp32 on one core",
        "16 to 64 operations a cycle at 2 to 4 GHz, less what small products lose",
    )
    bf16_gain: float = constant(
        2.0,
        0.02,
        20.0,
        0.25,
        "1",
        "how many times as fast they are in bf16",
        "a fraction where bf16 is emulated, 2 with AVX512's products of pairs, 10 with AMX",
    )
    fp16_rate: float = constant(
        5.5,
        0.5,
        1500.0,
        1.5,
        "GFLOP/s",
        "the same in fp16",
        "most CPUs convert each element; products of 128 to 512 rows, measured on three machines: 4"
        " to 7",
    )
    memory_rate: float = constant(
        30.0,
        2.0,
        200.0,
        12.0,
        "GB/s",
        "at which a core reads and writes in operators that are no matrix products",
        "between one core's share of the memory and its caches",
    )
    working_set: float = constant(
        0.3,
        0.0,
        1.0,
        0.15,
        "1",
        "power of the activations' bytes, over 32e6, by which that rate falls: less of them is"
        " found in caches",
        "misses of caches follow a power of about one half of size (Hartstein and others, 2006)",
    )
    operator: float = constant(
        5e-6,
        1e-6,
        40e-6,
        2e-6,
        "s",
        "to call one operator from Python, and its part of autograd",
        "torch's dispatch takes 1 to 10 microseconds on cores of 2 to 4 GHz",
    )
    update_bytes: float = constant(
        10.0,
        1.0,
        60.0,
        5.0,
        "GB/s",
        "of optimizer state that is updated",
        "an update reads and writes state, parameters and gradients at the memory's rate",
    )
    tensor_update: float = constant(
        40e-6,
        2e-6,
        400e-6,
        25e-6,
        "s",
        "to update and clear one parameter tensor beside its bytes",
        "several operators for each tensor",
    )
    coded: float = constant(
        15e-9,
        0.1e-9,
        100e-9,
        6e-9,
        "s",
        "to update an element of optimizer state that is kept in a code of 8 bits",
        "a search among 256 values takes 8 comparisons; bitsandbytes on a CPU: 13 to 25 each",
    )
    convolution: float = constant(
        0.15e-3,
        0.0,
        2e-3,
        0.08e-3,
        "s",
        "of a convolution beside its arithmetic: oneDNN orders its arguments in blocks",
        "products of 8 to 32 channels: measured 0.05 to 0.3 ms each",
    )
    local_rate: float = constant(
        0.7,
        0.05,
        20.0,
        0.2,
        "GB/s",
        "of a collective's bytes between ranks on one machine: copies, sums and system calls",
        "gloo over loopback, whose work takes the cores that compute",
    )
    shared_rate: float = constant(
        4.0,
        0.3,
        100.0,
        2.0,
        "GB/s",
        "the same where ranks exchange through memory that they share",
        "two copies and a sum at a core's share of the memory's rate",
    )
    message: float = constant(
        1.3e-3,
        0.02e-3,
        10e-3,
        0.2e-3,
        "s",
        "of a collective or transfer beside its bytes: handing over to a thread, and waiting for"
        " the slower rank",
        "tens of microseconds for gloo alone, milliseconds where ranks wait for each other",
    )
    unit: float = constant(
        3.0e-3,
        0.05e-3,
        20e-3,
        1.0e-3,
        "s",
        "the same where a library gathers parameters or scatters gradients, which it also copies to"
        " and from flat buffers, in hooks around a module",
        "a collective's, and tens of operators for each of a module's parameters",
    )
    disk_rate: float = constant(
        1.5,
        0.02,
        20.0,
        0.7,
        "GB/s",
        "of what all ranks together read from a disk and write to it",
        "0.1 for a magnetic disk, several for NVMe and for a cache in memory",
    )
    emulated: float = constant(
        1.3,
        0.7,
        4.0,
        0.3,
        "1",
        "by how many times a collective's own work is longer between emulated nodes",
        "their packets pass a switch and shaping, which take time of the same cores",
    )
    link_hidden: float = constant(
        0.3,
        0.0,
        1.0,
        0.25,
        "1",
        "share of the backward pass that hides the transfer over a link between nodes",
        "nothing to the whole backward pass may hide it (DDP, arXiv 2006.15704)",
    )
    step: float = constant(
        2.0e-3,
        0.0,
        50e-3,
        2.0e-3,
        "s",
        "of a step, whatever its model: batch, loss, loop",
        "milliseconds of Python",
    )


@dataclass(frozen=True)
class CpuMemory:
    """Of the peak of a rank's anonymous resident memory above its imports."""

    overhead: float = constant(
        8.0,
        0.0,
        200.0,
        6.0,
        "MB",
        "that training takes whatever its model: threads, code that is loaded late, batches",
        "megabytes for each thread's heap and stack",
    )
    node_overhead: float = constant(
        4.0,
        0.0,
        50.0,
        2.0,
        "MB",
        "that a rank on an emulated node takes beside it",
        "its agent and its connections; measured on one machine: 3 to 6",
    )
    activations: float = constant(
        1.2,
        0.7,
        2.5,
        0.2,
        "1",
        "resident bytes for each byte of activations: the heap does not give all back",
        "1 is none; glibc keeps freed blocks below its threshold",
    )
    transient: float = constant(
        1.3,
        0.0,
        4.0,
        0.5,
        "1",
        "resident bytes for each byte that is needed for a while",
        "1, and temporaries of the update",
    )
    exchanged: float = constant(
        0.5,
        0.0,
        4.0,
        0.4,
        "1",
        "resident bytes of a collective's buffers for each byte that the ranks reduce or gather",
        "gloo and libraries copy what they send",
    )
