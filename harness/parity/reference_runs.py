from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from harness.cell.cell import Cell
from harness.cell.errors import UsageError
from harness.cell.training import CAPPED_ABOVE, EXACT
from harness.host.environment import version_of
from harness.host.folders import cache_folder
from harness.host.gpu_inventory import visible_gpus
from harness.host.nvml import nvml
from harness.parity.reference import VERSION, Noise, Reference
from harness.seam.base import Emulation
from harness.seam.checkpoints import MOMENTS_UP_TO
from harness.seam.optimizers import TOLERANCES
from harness.seam.registry import NO_EXCHANGE, batches_normalised, make_strategy
from harness.workloads import DataSource, Workload, make_workload, prepare_data
from harness.workloads.counts import model_facts

MICRO_BATCH_TOKENS = 2048
"""Maximum number of tokens in a micro-batch of a GPU reference run."""
LIMIT = "PARALLELISM_BENCH_REFERENCES_GIB"
"""Environment variable with the number of GiB that reference runs may use."""
DEFAULT_LIMIT_GIB = 60.0
IN_USE_SECONDS = 3600.0
"""Seconds without use before eviction, because another run may need the reference."""
NOISE_TOKENS = 8192
"""Maximum batch size, in tokens, of reference runs that are repeated to measure noise."""


def reference_cell(cell: Cell) -> Cell:
    """Returns the reference: the training in one process.

    On a GPU it uses micro-batches, so that the batch of eight devices fits one. BatchNorm sees the
    samples that it sees in the cell, in micro-batches too if each rank normalises its own. So does
    the balancing loss, which is not linear in the tokens and which libraries compute for each
    rank's micro-batch.
    """
    strategy, workload = make_strategy(cell), make_workload(cell.workload)
    reference = strategy.reference(cell)
    least = reference.micro_batches
    if cell.balance_weight:
        parts = strategy.layout(cell.devices).data * cell.micro_batches
        return reference.model_copy(update={"micro_batches": parts})
    if workload.batch_norm:
        parts = batches_normalised(strategy, cell, strategy.layout(cell.devices))
        return reference.model_copy(update={"micro_batches": parts})
    if cell.device != "cuda":
        return reference
    parts = next(
        n
        for n in range(1, cell.global_batch + 1)
        if cell.global_batch % n == 0 == n % least
        and (_tokens(cell, n) <= MICRO_BATCH_TOKENS or n == cell.global_batch)
    )
    return reference.model_copy(update={"micro_batches": parts})


def is_noisy(reference: Cell) -> bool:
    """Returns whether a second run measures the reference's noise.

    In fp32 on a CPU, EXACT holds without it, unless BatchNorm spans all ranks and amplifies
    rounding.
    """
    if _tokens(reference, 1) > NOISE_TOKENS:
        return False
    workload = make_workload(reference.workload)
    rounds_alike = reference.device == "cpu" and wholly_in_fp32(reference, workload)
    emulates = isinstance(make_strategy(reference), Emulation)
    if workload.batch_norm and not emulates and reference.micro_batches == 1:
        return True
    # Samples in another order would go to other emulated ranks.
    return not rounds_alike and (_splits_further(reference) or not emulates)


def wholly_in_fp32(cell: Cell, workload: Workload) -> bool:
    """Returns whether neither arithmetic nor weights nor optimizer states round to fewer bits."""
    declared = workload.tolerance(cell) or EXACT
    rounds = cell.optimizer in TOLERANCES or declared.update > CAPPED_ABOVE
    return cell.precision == "fp32" and not rounds


def rounded_differently(reference: Cell, data: DataSource) -> tuple[Cell, DataSource]:
    """Returns the reference and its data, rounded differently: with twice as many micro-batches or,
    if the batch cannot be split so, with the samples in reverse order."""
    if _splits_further(reference):
        return reference.model_copy(update={"micro_batches": 2 * reference.micro_batches}), data
    cores = {"threads_per_device": 1} if reference.device == "cpu" else {}
    return reference.model_copy(update=cores), replace(data, last_first=True)


def _splits_further(reference: Cell) -> bool:
    differs = make_workload(reference.workload).batch_norm or reference.balance_weight > 0
    return reference.global_batch % (2 * reference.micro_batches) == 0 and not differs


def without_exchange(cell: Cell) -> tuple[Cell, int]:
    """Returns the cell as trained by ranks that exchange nothing, and their number.

    Ranks that split the model become replicas.
    """
    layout = make_strategy(cell).layout(cell.devices)
    ranks = layout.data if layout.data > 1 else cell.devices
    if cell.global_batch % ranks:
        ranks = 1
    reference = cell.reference(NO_EXCHANGE)
    return reference.model_copy(update={"devices": ranks}), ranks


def _tokens(cell: Cell, parts: int) -> int:
    return cell.global_batch // parts * cell.sequence_length


def reference_key(cell: Cell) -> str:
    """Returns the folder's name, made from training, data, kind of GPU and versions."""
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
    if workload.partly_frozen:  # distinguishes older files, which also hold untrained tensors
        parts.append("trained tensors only")
    digest = hashlib.blake2s(repr(tuple(parts)).encode(), digest_size=8).hexdigest()
    return f"{cell.workload.replace('/', '_').replace(':', '_')[-40:]}-{digest}"


def gpu_kind() -> str:
    """Returns the kind of this host's GPUs; empty without one. CUDA's random numbers depend on the
    number of multiprocessors."""
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
    """Returns the noise of a cell's reference, or of one GPU's part of a large batch. None if
    unknown."""
    if noise := reference.noise:
        return noise
    if cell.device != "cuda":
        return None
    part = cell.model_copy(update={"global_batch": max(1, cell.global_batch // cell.devices)})
    smaller = reference_of(part)
    return smaller.noise if smaller.exists else None


def _home() -> Path:
    return cache_folder() / "references"


def mark_used(reference: Reference) -> None:
    file = Path(reference.folder) / "reference.json"
    if file.exists():
        os.utime(file)


def kept_bytes(cell: Cell) -> int:
    """Returns the disk bytes of a cell's reference."""
    facts = model_facts(make_workload(cell.workload))
    with_moments = facts.trained_bytes <= MOMENTS_UP_TO
    tensors = 1 + (cell.moments if with_moments else 0)
    # AdamW's reference also keeps the end of a replay ahead (harness/worker/rewind.py).
    ends = 2 if with_moments and cell.optimizer.startswith("adamw") else 1
    return _copies(reference_cell(cell)) * ends * tensors * facts.trained_bytes


def _copies(reference: Cell) -> int:
    strategy = make_strategy(reference)
    return strategy.emulated_ranks if isinstance(strategy, Emulation) else 1


def limit_bytes() -> int:
    """Reads the limit; raises UsageError if it is not a number."""
    text = os.environ.get(LIMIT, "")
    try:
        gibibytes = float(text) if text else DEFAULT_LIMIT_GIB
    except ValueError:
        raise UsageError(
            f"{LIMIT}={text!r} is not a number of GiB; write it like {LIMIT}=40"
        ) from None
    return int(gibibytes * 2**30)


def make_room(cells: Iterable[Cell]) -> None:
    """Evicts the least recently used references beyond the limit, except the references of these
    cells. Raises UsageError if the disk lacks room for missing references."""
    needed = {reference_key(cell): cell for cell in cells}
    missing = sum(kept_bytes(cell) for cell in needed.values() if not reference_of(cell).exists)
    home = _home()
    if home.exists() and not home.is_dir():
        return  # the reference run reports the error, and its cells stay unverified
    home.mkdir(parents=True, exist_ok=True)
    by_use = sorted(_use(folder) for folder in home.iterdir() if folder.is_dir())
    beyond = sum(size for _, size, _ in by_use) + missing - limit_bytes()
    for last_used, size, folder in by_use:
        if beyond <= 0:
            break
        if folder.name in needed or time.time() - last_used < IN_USE_SECONDS:
            continue
        shutil.rmtree(folder, ignore_errors=True)
        beyond -= size
    free = shutil.disk_usage(home).free
    if free < missing:
        raise UsageError(
            f"reference runs need {missing / 2**30:.1f} GiB in {home}, but only"
            f" {free / 2**30:.1f} GiB are free: free some space, or set PARALLELISM_BENCH_CACHE to"
            " a folder on another disk"
        )


def _use(folder: Path) -> tuple[float, int, Path]:
    """Returns when a folder was last used, in seconds since the epoch, and its bytes. Another run
    may be writing or evicting it."""
    sizes = []
    last_used = time.time()  # never evict a folder that is being evicted
    with contextlib.suppress(FileNotFoundError):
        last_used = folder.stat().st_mtime
        for file in folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                sizes.append(file.stat().st_size)
        last_used = (folder / "reference.json").stat().st_mtime
    return last_used, sum(sizes), folder
