"""Is a GPU memory budget enforced, and does NVML list this process?"""

from __future__ import annotations

import os
from dataclasses import dataclass

from bench.gpu_check.probes.finding import Attempt, Finding, attempt, only_on_gpus

BUDGET_BYTES = 4 * 2**20


@dataclass(frozen=True)
class MemoryFacts:
    listed: bool
    """Whether NVML lists this process; in some containers its process id differs."""
    context_bytes: int | None
    """CUDA context, by NVML."""
    over_budget: Attempt
    """Allocation that must fail."""
    product_in_budget: Attempt
    """Product whose workspace may not fit."""
    afterwards: Attempt


def probe(device: str) -> Finding:
    if device != "cuda":
        return only_on_gpus("torch limits no memory of the host")
    import torch

    from harness.host.nvml import nvml

    gpu = torch.device("cuda", 0)
    torch.zeros(1, device=gpu)
    properties = torch.cuda.get_device_properties(gpu)
    mine: int | None = None
    with nvml() as library:
        handle = library and library.handle("nvmlDeviceGetHandleByUUID", f"GPU-{properties.uuid}")
        if library and handle:
            processes = library.processes(handle) or ()
            mine = next((p.memory_bytes for p in processes if p.pid == os.getpid()), None)
    torch.cuda.set_per_process_memory_fraction(BUDGET_BYTES / properties.total_memory, gpu)
    over = attempt("64 MiB", lambda: torch.zeros(2**24, device=gpu).device)
    product = attempt(
        "product", lambda: (torch.ones(64, 64, device=gpu) @ torch.ones(64, 64, device=gpu)).sum()
    )
    torch.cuda.set_per_process_memory_fraction(1.0, gpu)
    after = attempt("64 MiB again", lambda: torch.zeros(2**24, device=gpu).device)
    context = None if mine is None else mine - torch.cuda.memory_reserved(gpu)
    facts = MemoryFacts(mine is not None, context, over, product, after)
    holds = over.error.startswith("OutOfMemoryError") and not after.error
    return Finding.of(holds, over.error or "an allocation above the budget succeeded", facts)
