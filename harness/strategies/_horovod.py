"""What Horovod needs around it: which parts it was built with, and how its ranks start and find
each other."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import shutil
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from harness.host.unbuilt import unbuilt
from harness.strategy.job import Job


@functools.cache
def built(part: bytes) -> bool:
    """Whether Horovod's extension holds a class of this name: its own `mpi_built` loads torch,
    which takes seconds."""
    spec = importlib.util.find_spec("horovod")
    folders = spec.submodule_search_locations or [] if spec else []
    return any(
        part in file.read_bytes()
        for folder in folders
        for file in Path(folder).glob("torch/mpi_lib_v2*.so")
    )


def missing(controller: str, device: str) -> str:
    """What this Horovod lacks for a controller and type of device, with the command that provides
    it; empty: nothing.

    Built for the CPU alone, Horovod has no way for a CUDA tensor: its background thread throws
    "Horovod has not been compiled with CUDA" (horovod/common/ops/cuda_util.cc) and shuts down.
    """
    if device == "cuda" and not built(b"NCCLAllreduce"):
        if failure := unbuilt("horovod"):
            return f"Horovod was built for the CPU alone: {failure.reason}"
        return (
            "Horovod was built for the CPU alone: PARALLELISM_BENCH_CUDA=packages make setup builds"
            " it with NCCL, where torch has CUDA"
        )
    if controller == "mpi" and not (built(b"MPIController") and shutil.which("mpirun")):
        return (
            "Horovod was built without MPI, or mpirun is missing: apt-get install openmpi-bin"
            " libopenmpi-dev, then make setup"
        )
    if controller == "gloo" and not built(b"GlooController"):
        return "Horovod was built without Gloo: HOROVOD_WITH_GLOO=1 make setup"
    return ""


def mpirun(processes: int, scratch: Path, over_tcp: bool) -> list[str]:
    """Open MPI: more ranks than cores allowed, cores left to the harness, ssh not required, its
    files in the trial's folder.

    A rank's two threads share its cores: the one that waits for MPI has to yield to the one that
    computes. All ranks stay on this node: of an allocation of several, which Open MPI would read
    from SLURM's variables, the others run nothing of this trial.
    """
    settings = {
        "orte_tmpdir_base": str(scratch),
        "hwloc_base_binding_policy": "none",
        "mpi_yield_when_idle": "1",
    }
    settings["btl_vader_backing_directory"] = str(
        scratch
    )  # in /dev/shm the files of killed ranks would stay
    settings |= {
        "ras": "^slurm",
        "plm": "^slurm" if shutil.which("ssh") or shutil.which("rsh") else "^slurm,rsh",
    }
    settings |= {"btl": "tcp,self"} if over_tcp else {}
    given = [word for name, value in settings.items() for word in ("--mca", name, value)]
    return [
        "mpirun",
        "--allow-run-as-root",
        "--oversubscribe",
        "--host",
        f"localhost:{processes}",
        *given,
        "-np",
        str(processes),
        sys.executable,
    ]


def places(hosts: Sequence[str]) -> list[Any]:
    """Each rank's place (Horovod's SlotInfo) from the host that each rank runs on, whatever their
    order."""
    from horovod.runner.common.util.hosts import SlotInfo

    found = []
    for rank, host in enumerate(hosts):
        local = hosts[:rank].count(host)
        cross = [name for name in dict.fromkeys(hosts) if hosts.count(name) > local]
        found.append(
            SlotInfo(
                host, rank, local, cross.index(host), len(hosts), hosts.count(host), len(cross)
            )
        )
    return found


def initialize(job: Job, controller: str, fusion_bytes: int, cycle_time_ms: float) -> None:
    """hvd.init() with what it reads from the environment."""
    import horovod.torch as hvd

    os.environ |= {"HOROVOD_CONTROLLER": controller, "HOROVOD_CPU_OPERATIONS": controller}
    os.environ |= {
        "HOROVOD_FUSION_THRESHOLD": str(fusion_bytes),
        "HOROVOD_CYCLE_TIME": str(cycle_time_ms),
    }
    with meeting(job) if controller == "gloo" else contextlib.nullcontext():
        hvd.init()


@contextlib.contextmanager
def meeting(job: Job) -> Iterator[None]:
    """Where Gloo's ranks find each other, as horovodrun does it: a rendezvous server in a thread of
    rank 0, for as long as they look.

    The process group tells the ranks each other's hosts, and rank 0's address on the job's
    interface.
    """
    import torch.distributed as dist
    from horovod.runner.gloo_run import create_slot_env_vars
    from horovod.runner.http.http_server import RendezvousServer
    from horovod.runner.util.network import get_driver_ip

    hosts: list[Any] = [None] * job.layout.processes
    dist.all_gather_object(hosts, job.node or socket.gethostname())
    slots = places(hosts)
    server, place = RendezvousServer(), ["", 0]
    if job.rank == 0:
        address = (
            get_driver_ip([job.interface])
            if job.interface
            else socket.gethostbyname(socket.gethostname())
        )
        place = [address, server.start()]
        server.init(slots)
    dist.broadcast_object_list(place, device=job.device)
    os.environ |= create_slot_env_vars(slots[job.rank])
    os.environ |= {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": str(place[0]),
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(place[1]),
    }
    os.environ |= {"HOROVOD_GLOO_IFACE": job.interface} if job.interface else {}
    yield
    dist.barrier()
    if job.rank == 0:
        server.stop()


def shown() -> dict[str, Any]:
    """What TrainState has to know of functions that torch's profiler cannot see: Horovod's own
    threads send, and synchronize waits.
    """
    import horovod.torch.optimizer as module

    sends = [
        (module, name, "all_reduce") for name in ("allreduce_async_", "grouped_allreduce_async_")
    ]
    return {"collectives": sends, "waits": [(module, "synchronize", "communication")]}
