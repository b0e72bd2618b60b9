"""Which versions, memory, cores and GPUs are here?"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.gpu_check.probes.finding import Finding

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
    """Recorded environment: versions, processor, memory, GPUs."""
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
    """Why this torch cannot use the GPUs."""
    topology: list[list[str]]
    """Connection from GPU i to GPU j."""
    troubles: list[dict[str, object]]


def probe(device: str) -> Finding:
    from bench.checks import troubles
    from harness.host.environment import environment, unused_gpus
    from harness.host.gpu_facts import gpu_topology
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
    return Finding.of(usable, facts.unused_gpus or what or "nothing would skew results", facts)
