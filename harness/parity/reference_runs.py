"""Reference runs: which cell one is, where it is kept, what it needs of memory and disk, and what
is cleared for it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from harness.host.cache import cache_folder
from harness.host.environment import version_of
from harness.host.gpu import visible_gpus
from harness.host.nvml import nvml
from harness.parity.reference import VERSION, Noise, Reference
from harness.spec.cell import Cell
from harness.spec.errors import UsageError
from harness.workloads import DataSource, make_workload, prepare_data
from harness.workloads.counts import model_facts
from harness.workloads.registry import split_name

MICRO_BATCH_TOKENS = 2048
"""Most tokens that a reference run on a GPU computes at a time: a model of 1.1 B parameters then
keeps 7 GiB of activations."""
LIMIT = "PARALLELISM_BENCH_REFERENCES_GIB"
"""Environment variable: GiB of the cache that reference runs may fill."""
DEFAULT_LIMIT_GIB = 20.0
IN_USE_SECONDS = 3600.0
"""A reference that was used so recently is not cleared: another run on the same cache may be
comparing with it."""
NOISE_TOKENS = 8192
"""Most tokens of a batch whose reference is run a second time for its noise: rounding does not
depend on how many there are."""
CONTEXT_BYTES = 2**30
"""What CUDA's context and the kernels of its libraries take of a GPU, about: 0.5 to 0.8 GiB on
data-centre GPUs."""


def reference_cell(cell: Cell) -> Cell:
    """What trains the same as `cell`: fp32, one process, a whole batch at a time.

    On a GPU gradients are accumulated over micro-batches, so that the batch of eight devices fits
    one. Not where there is BatchNorm: over parts of the batch it would be another training.
    """
    reference = cell.reference()
    if cell.device != "cuda" or make_workload(cell.workload).batch_norm:
        return reference
    parts = next(
        n
        for n in _divisors(cell.global_batch)
        if _tokens(cell, n) <= MICRO_BATCH_TOKENS or n == cell.global_batch
    )
    return reference.model_copy(update={"micro_batches": parts})


def split_differently(reference: Cell) -> Cell | None:
    """The same training with the batch in twice as many parts, which shows how far rounding alone
    leads.

    None where the batch cannot be split so, where that is another training, and where it is large:
    the batch of eight GPUs takes one of them eight times as long, and its noise is that of one
    GPU's batch.
    """
    if reference.device != "cuda" or _tokens(reference, 1) > NOISE_TOKENS:
        return None
    return _halved(reference)


def rounded_differently(reference: Cell, data: DataSource) -> tuple[Cell, DataSource]:
    """The same training, and its data, but for rounding: with the batch in twice as many parts,
    or, where it cannot be split so, with its last sample first and on one core, where convolutions
    add in another order."""
    if halved := _halved(reference):
        return halved, data
    cores = {"threads_per_device": 1} if reference.device == "cpu" else {}
    return reference.model_copy(update=cores), replace(data, last_first=True)


def _halved(reference: Cell) -> Cell | None:
    """The same training with the batch in twice as many parts; None where it cannot be split so,
    or where that is another training (BatchNorm)."""
    parts = 2 * reference.micro_batches
    if reference.global_batch % parts or make_workload(reference.workload).batch_norm:
        return None
    return reference.model_copy(update={"micro_batches": parts})


def _divisors(number: int) -> Iterable[int]:
    return (n for n in range(1, number + 1) if number % n == 0)


def _tokens(cell: Cell, parts: int) -> int:
    return cell.global_batch // parts * cell.sequence_length


def reference_key(cell: Cell) -> str:
    """Name of the reference run's folder: what it trains, on which data and kind of GPU, with which
    versions."""
    workload = make_workload(cell.workload)
    data = prepare_data(cell.data, workload, cell.sequence_length)
    versions = [version_of(package) for package in ("torch", "transformers", *workload.requires)]
    parts: list[object] = [
        VERSION,
        reference_cell(cell).id,
        data.fingerprint,
        workload.version,
        *versions,
    ]
    if cell.device == "cuda":
        parts.append(gpu_kind())
    if workload.partly_frozen:  # files that also held what is not trained were named without this
        parts.append("trained tensors only")
    digest = hashlib.blake2s(repr(tuple(parts)).encode(), digest_size=8).hexdigest()
    return f"{cell.workload.replace('/', '_').replace(':', '_')[-40:]}-{digest}"


def gpu_kind() -> str:
    """The kind of this host's GPUs, as far as it decides which random numbers they make; empty
    without one.

    CUDA's generator deals its numbers out to as many threads as the GPU's multiprocessors hold, so
    one seed gives other weights on another kind. NVML gives the number of cores; a MIG slice has
    its profile in its name.
    """
    devices = visible_gpus()
    if not devices:
        return ""
    device, cores = devices[0], None
    with nvml() as library:
        if library is not None and not device.mig and library.offers("nvmlDeviceGetNumGpuCores"):
            handle = library.handle("nvmlDeviceGetHandleByUUID", device.uuid)
            cores = library.number("nvmlDeviceGetNumGpuCores", handle) if handle else None
    return f"{device.name}, {'number of cores unknown' if cores is None else f'{cores} cores'}"


def reference_of(cell: Cell) -> Reference:
    return Reference(str(_home() / reference_key(cell)))


def noise_for(cell: Cell, reference: Reference) -> Noise | None:
    """Returns the noise of a cell's reference; for a batch that is too large to be run twice, the
    noise of one GPU's part of it. None on a CPU, and if neither was measured."""
    if cell.device != "cuda":
        return None
    if noise := reference.noise:
        return noise
    part = cell.model_copy(update={"global_batch": max(1, cell.global_batch // cell.devices)})
    smaller = reference_of(part)
    return smaller.noise if smaller.exists else None


def _home() -> Path:
    return cache_folder() / "references"


def mark_used(reference: Reference) -> None:
    """Notes that a reference was used now."""
    file = Path(reference.folder) / "reference.json"
    if file.exists():
        os.utime(file)


def kept_bytes(cell: Cell) -> int:
    """What a cell's reference fills of the disk: its trained tensors."""
    return model_facts(make_workload(cell.workload), cell.sequence_length).trained_bytes


def memory_bytes(reference: Cell) -> int:
    """What a reference run needs of its GPU at most.

    Parameters, gradients and optimizer state (16 bytes a trained parameter for AdamW), and beside
    them the larger of what one micro-batch's forward and backward keep and what torch's optimizer
    computes for all parameters at a time (4 bytes). A variant is taken to keep the activations of
    the model that it is one of.
    """
    from harness.workloads.activations import activation_bytes

    workload, base = (
        make_workload(reference.workload),
        make_workload(split_name(reference.workload)[0]),
    )
    facts = model_facts(workload, reference.sequence_length)
    moments = reference.moments
    states = facts.parameter_bytes + (1 + moments) * facts.trained_bytes + facts.buffer_bytes
    samples = reference.global_batch // reference.micro_batches
    activations = samples * activation_bytes(base, 1, reference.sequence_length)
    return CONTEXT_BYTES + states + max(activations, facts.trained_bytes)


def limit_bytes() -> int:
    """Bytes that kept references may fill; raises UsageError for a limit that is no number."""
    text = os.environ.get(LIMIT, "")
    try:
        gibibytes = float(text) if text else DEFAULT_LIMIT_GIB
    except ValueError:
        raise UsageError(
            f"{LIMIT}={text!r} is not a number of GiB; write it like {LIMIT}=40"
        ) from None
    return int(gibibytes * 2**30)


def make_room(cells: Iterable[Cell]) -> None:
    """Clears what is kept beyond the limit, least recently used first, never what these cells are
    compared with.

    Raises UsageError where the disk then has too little room for the references that are missing.
    """
    needed = {reference_key(cell): cell for cell in cells}
    missing = sum(kept_bytes(cell) for cell in needed.values() if not reference_of(cell).exists)
    home = _home()
    if home.exists() and not home.is_dir():
        return  # a reference run that cannot be written says so, and its cells stay unverified
    home.mkdir(parents=True, exist_ok=True)
    kept = [_kept(folder) for folder in home.iterdir() if folder.is_dir()]
    beyond = sum(reference.bytes for reference in kept) + missing - limit_bytes()
    for reference in sorted(kept, key=lambda reference: reference.last_used):
        if beyond <= 0:
            break
        in_use = time.time() - reference.last_used < IN_USE_SECONDS
        if reference.folder.name in needed or in_use:
            continue
        shutil.rmtree(reference.folder, ignore_errors=True)
        beyond -= reference.bytes
    free = shutil.disk_usage(home).free
    if free < missing:
        raise UsageError(
            f"reference runs need {missing / 2**30:.1f} GiB in {home}, where {free / 2**30:.1f} GiB"
            " are free: free some, or let PARALLELISM_BENCH_CACHE name a folder on another disk"
        )


@dataclass(frozen=True)
class _Kept:
    folder: Path
    bytes: int
    last_used: float  # seconds since the epoch


def _kept(folder: Path) -> _Kept:
    """What a folder holds now: another run may be writing into it, or clearing it."""
    sizes = []
    last_used = time.time()  # a folder that is just being cleared is nobody's to clear again
    with contextlib.suppress(FileNotFoundError):
        last_used = folder.stat().st_mtime
        for file in folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                sizes.append(file.stat().st_size)
        last_used = (folder / "reference.json").stat().st_mtime
    return _Kept(folder, sum(sizes), last_used)
