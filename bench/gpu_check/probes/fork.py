"""Can a child that is forked after all imports use the device?

A process that has initialised CUDA cannot fork ranks; some libraries initialise it on import.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from bench.gpu_check.probes.finding import Finding, begin_in_fork, end_of_fork
from harness.host.cuda import cuda_is_initialized, to_preload

OF_RANKS = ("transformers", "transformers.trainer", "peft", "bitsandbytes")
"""Imports of ranks, in addition to what strategies require."""


@dataclass(frozen=True)
class ForkFacts:
    initialised_by: str | None
    """First import after which CUDA was initialised."""
    initialises: dict[str, bool | None]
    """Whether an import alone initialises CUDA; None: it fails."""
    child: dict[str, object]
    child_seconds: float


def probe(device: str) -> Finding:
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # as the launcher sets it
    import harness.worker.preload
    import harness.worker.worker
    from harness.strategy.registry import strategies

    classes = strategies().values()
    needed = dict.fromkeys(
        name for cls in classes for name in (*cls.requires, *cls.capabilities.preload)
    )
    initialised_by = "the suite" if cuda_is_initialized() else None
    alone = imports_that_initialise(sorted({*needed, *OF_RANKS}))
    for name in to_preload(list(needed), device == "cuda"):
        harness.worker.preload.import_packages([name])
        if initialised_by is None and cuda_is_initialized():
            initialised_by = name
    began = time.perf_counter()
    child = end_of_fork(begin_in_fork(lambda: _use(device)))
    facts = ForkFacts(initialised_by, alone, child, round(time.perf_counter() - began, 2))
    if initialised_by:
        return Finding.of(False, f"importing {initialised_by} initialises CUDA", facts)
    return Finding.of("error" not in child, str(child.get("error") or "a child can"), facts)


def imports_that_initialise(names: Iterable[str]) -> dict[str, bool | None]:
    """Returns whether each import initialises CUDA in any library; None: it fails. Uses a forked
    child per package, all at once."""
    children = {name: begin_in_fork(partial(_import, name)) for name in names}
    answers = {name: end_of_fork(child) for name, child in children.items()}
    return {
        name: None if "error" in answer else bool(answer["initialised"])
        for name, answer in answers.items()
    }


def _import(name: str) -> dict[str, object]:
    importlib.import_module(name)
    return {"initialised": cuda_is_initialized()}


def _use(device: str) -> dict[str, object]:
    import torch

    factor = torch.ones(1024, 1024, device=device)
    answer: dict[str, object] = {"sum": float((factor @ factor).sum())}
    if device == "cuda":
        answer["pinned"] = torch.ones(2**20).pin_memory().is_pinned()
    return answer
