from __future__ import annotations

import importlib
import os
import shutil
import sys
import sysconfig
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from bench.gpu_check.probes.finding import ProbeFinding, begin_in_fork, end_of_fork, only_on_gpus
from harness.host.cuda import cuda_is_initialized, to_preload

PROGRAMS = ("gcc", "g++", "nvcc", "git", "nvidia-smi", "ninja", "mpirun", "py-spy")
VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "PYTORCH_CUDA_ALLOC_CONF",
    "NVIDIA_TF32_OVERRIDE",
    "LD_LIBRARY_PATH",
)


@dataclass(frozen=True)
class HostFacts:
    environment: dict[str, object]
    python: str
    python_header: bool
    """Whether extensions can be compiled."""
    programs: dict[str, str | None]
    variables: dict[str, str | None]
    cores: int
    shared_memory_bytes: int | None
    temporary_bytes_free: int
    cgroup: str
    unused_gpus: str | None
    topology: list[list[str]]
    """Connection from GPU i to GPU j."""
    troubles: list[dict[str, object]]


def host(device: str) -> ProbeFinding:
    """Which versions, memory, cores and GPUs are here?"""
    from bench.checks import troubles
    from harness.host.environment import environment, unused_gpus
    from harness.host.gpu_inventory import gpu_topology
    from harness.strategy.registry import required_packages

    shared = Path("/dev/shm")
    found = [asdict(trouble) for trouble in troubles()]
    facts = HostFacts(
        environment=dict(environment(required_packages())),
        python=sys.version,
        python_header=(Path(sysconfig.get_path("include")) / "Python.h").exists(),
        programs={name: shutil.which(name) for name in PROGRAMS},
        variables={name: os.environ.get(name) for name in VARIABLES},
        cores=len(os.sched_getaffinity(0)),
        shared_memory_bytes=shutil.disk_usage(shared).total if shared.exists() else None,
        temporary_bytes_free=shutil.disk_usage("/tmp").free,
        cgroup=Path("/proc/self/cgroup").read_text(),
        unused_gpus=unused_gpus(),
        topology=gpu_topology(),
        troubles=found,
    )
    what = "; ".join(f"{trouble['subject']}: {trouble['what']}" for trouble in found)
    usable = facts.unused_gpus is None
    return ProbeFinding.of(usable, facts.unused_gpus or what or "nothing would skew results", facts)


@dataclass(frozen=True)
class RankView:
    """NVML's answers to one process on GPU 0."""

    joules: float | None
    sm_mhz: int | None
    process_bytes: int | None
    counts_throttling: bool
    processes: tuple[int, ...] | None


@dataclass(frozen=True)
class NvmlAnswers:
    driver: dict[str, object]
    gpu_kind: str
    child: dict[str, object]
    parent: dict[str, object]


def nvml(device: str) -> ProbeFinding:
    """Does NVML give a forked rank the same answers as its parent?"""
    if device != "cuda":
        return only_on_gpus("NVML reports no CPUs")
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # as the launcher sets it
    import torch

    from harness.host.gpu_inventory import driver
    from harness.parity.reference_runs import gpu_kind

    kind, installed = gpu_kind(), asdict(driver())  # initialises NVML in this process
    assert torch.cuda.device_count()
    child = end_of_fork(begin_in_fork(_view))
    answers = NvmlAnswers(installed, kind, child, _view())
    lost = [name for name, value in answers.parent.items() if value and not child.get(name)]
    reason = f"NVML does not give a forked rank {', '.join(lost)}"
    if not lost:
        reason = "NVML gives both the same answers"
    return ProbeFinding.of(
        not lost and "error" not in child, str(child.get("error") or reason), answers
    )


def _view() -> dict[str, object]:
    import torch

    from harness.measure.resource_use import RankGpus

    device = torch.device("cuda", 0)
    factor = torch.ones(4096, 4096, device=device)
    gpus = RankGpus([device])
    gpus.start()
    for _ in range(20):
        factor = factor @ factor * 0
    torch.cuda.synchronize()
    gpus.stop()
    joules, use = gpus.joules(), gpus.use()
    state = use.states[0] if use and use.states else None
    processes = state.processes if state else None
    return asdict(
        RankView(
            next(iter(joules.values()))[0] if joules else None,
            state.sm_mhz if state else None,
            use.process_bytes if use else None,
            bool(use and use.throttled_seconds is not None),
            None if processes is None else tuple(process.pid for process in processes),
        )
    )


OF_RANKS = ("transformers", "transformers.trainer", "peft", "bitsandbytes")
"""Imports of ranks besides strategies' requirements."""


@dataclass(frozen=True)
class ForkFacts:
    initialised_by: str | None
    """First import after which CUDA was initialised."""
    initialises: dict[str, bool | None]
    """Whether an import alone initialises CUDA; None: it fails."""
    child: dict[str, object]
    child_seconds: float


def fork(device: str) -> ProbeFinding:
    """Can a child that is forked after all imports use the device?

    Ranks cannot be forked once CUDA is initialised, which some libraries do on import.
    """
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
        return ProbeFinding.of(False, f"importing {initialised_by} initialises CUDA", facts)
    return ProbeFinding.of("error" not in child, str(child.get("error") or "a child can"), facts)


def imports_that_initialise(names: Iterable[str]) -> dict[str, bool | None]:
    """Returns whether each import, in a forked child, initialises CUDA; None: it fails."""
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
