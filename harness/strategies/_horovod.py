from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harness.cell.training import Retained
from harness.host.packages import unbuilt
from harness.seam import Export, Job
from harness.seam.checkpoints import StateFiles

if TYPE_CHECKING:
    from horovod.runner.common.util.hosts import SlotInfo
    from horovod.runner.http.http_server import RendezvousHTTPServer
    from horovod.torch import DistributedOptimizer
    from torch import nn
    from torch.optim import Optimizer


@functools.cache
def built(part: bytes) -> bool:
    """Returns whether Horovod's extension has this C++ class; `mpi_built` would load torch."""
    spec = importlib.util.find_spec("horovod")
    folders = spec.submodule_search_locations or [] if spec else []
    return any(
        part in file.read_bytes()
        for folder in folders
        for file in Path(folder).glob("torch/mpi_lib_v2*.so")
    )


def compiled() -> dict[str, str]:
    """Returns `built`, or how to install it, for each controller."""
    return {
        f"Horovod's controller {name}": missing(name, "cpu") or "built" for name in ("gloo", "mpi")
    }


def missing(controller: str, device: str) -> str:
    """Returns what Horovod lacks for a controller and device type, and how to install it.

    A CPU-only build shuts down on CUDA tensors (horovod/common/ops/cuda_util.cc).
    """
    if device == "cuda" and not built(b"NCCLAllreduce"):
        if failure := unbuilt("horovod"):
            return f"Horovod was built for the CPU only: {failure.reason}"
        return (
            "Horovod was built for the CPU alone: PARALLELISM_BENCH_CUDA=packages make setup builds"
            " it with NCCL, if torch has CUDA"
        )
    if controller == "mpi" and not (built(b"MPIController") and shutil.which("mpirun")):
        return (
            "Horovod was built without MPI, or mpirun is missing: apt-get install openmpi-bin"
            " libopenmpi-dev, then make setup"
        )
    if controller == "gloo" and not built(b"GlooController"):
        return "Horovod was built without Gloo: HOROVOD_WITH_GLOO=1 make setup"
    return ""


@functools.cache
def _open_mpi_version() -> int:
    """Returns Open MPI's major version; 4 if unknown."""
    done = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False)
    version = re.search(r"\(Open MPI\) (\d+)", done.stdout)
    return int(version[1]) if version else 4


def documented(processes: int, tuned: bool, over_tcp: bool = False) -> list[str]:
    """Returns mpirun's arguments as in Horovod's documentation ("Run Horovod with Open MPI").

    `tuned`: make the thread that waits for MPI yield its core to the rank's other thread.
    """
    settings = {"pml": "ob1", "btl": "tcp,self" if over_tcp else "^openib"}
    settings |= {"mpi_yield_when_idle": "1"} if tuned else {}
    ranks = ["-np", str(processes), "--host", f"localhost:{processes}"]
    placed = ["--bind-to", "none", "--map-by", "slot"]
    return [*ranks, *placed, *_given(settings)]


def _given(settings: Mapping[str, str]) -> list[str]:
    return [word for name, value in settings.items() for word in ("--mca", name, value)]


def mpirun(arguments: Sequence[str], scratch: Path) -> list[str]:
    """Returns Open MPI's command line for these arguments, without ssh and outside SLURM, whose
    whole allocation Open MPI would use."""
    # Keep Open MPI's messages and transport on loopback.
    settings = {"btl_tcp_if_include": "lo"}
    # Killed ranks would leave their files in /dev/shm.
    if _open_mpi_version() < 5:
        settings |= {"orte_tmpdir_base": str(scratch), "btl_vader_backing_directory": str(scratch)}
        settings["oob_tcp_if_include"] = "lo"
    else:  # its daemon does not accept loopback next to another interface
        settings |= {"prte_tmpdir_base": str(scratch), "btl_sm_backing_directory": str(scratch)}
    settings |= {
        "ras": "^slurm",
        "plm": "^slurm" if shutil.which("ssh") or shutil.which("rsh") else "^slurm,rsh",
    }
    return ["mpirun", "--allow-run-as-root", *arguments, *_given(settings), sys.executable]


def export(
    to: str, controller: str, arguments: list[str], variables: dict[str, str]
) -> Export | None:
    """`arguments`: mpirun's; see `documented`."""
    tuned = "mpi_yield_when_idle" in arguments
    if to == "horovodrun" and "tcp,self" not in arguments:
        # It gives mpirun the documented arguments itself.
        extra = ["--mpi-args=--mca mpi_yield_when_idle 1"] if tuned else []
        arguments = [f"--{controller}", "-np", arguments[1], "-H", arguments[3], *extra]
    elif to == "mpirun" and controller == "mpi":
        # As for horovodrun, containers may run as root.
        variables |= {f"OMPI_ALLOW_RUN_AS_ROOT{end}": "1" for end in ("", "_CONFIRM")}
    else:
        return None
    launcher = "OMPI_COMM_WORLD" if controller == "mpi" else "HOROVOD"
    values = {"local_rank": f'os.environ["{launcher}_LOCAL_RANK"]', "no_group": True}
    return Export("horovod.py.j2", values, variables=variables, arguments=tuple(arguments))


def places(hosts: Sequence[str]) -> list[SlotInfo]:
    """Returns each rank's SlotInfo, for hosts in any order."""
    from horovod.runner.common.util.hosts import SlotInfo

    slots = []
    for rank, host in enumerate(hosts):
        local = hosts[:rank].count(host)
        cross = [name for name in dict.fromkeys(hosts) if hosts.count(name) > local]
        slots.append(
            SlotInfo(
                host, rank, local, cross.index(host), len(hosts), hosts.count(host), len(cross)
            )
        )
    return slots


def variables(controller: str, fusion_bytes: int, cycle_time_ms: float) -> dict[str, str]:
    return {
        "HOROVOD_CONTROLLER": controller,
        "HOROVOD_CPU_OPERATIONS": controller,
        "HOROVOD_FUSION_THRESHOLD": str(fusion_bytes),
        "HOROVOD_CYCLE_TIME": str(cycle_time_ms),
    }


def initialize(job: Job, controller: str, fusion_bytes: int, cycle_time_ms: float) -> None:
    import horovod.torch as hvd

    os.environ |= variables(controller, fusion_bytes, cycle_time_ms)
    with rendezvous(job) if controller == "gloo" else contextlib.nullcontext():
        hvd.init()


@contextlib.contextmanager
def rendezvous(job: Job) -> Iterator[None]:
    """Runs the rendezvous of Gloo's ranks, with a server thread in rank 0."""
    import torch.distributed as dist
    from horovod.runner.gloo_run import create_slot_env_vars
    from horovod.runner.util.network import get_driver_ip

    hosts: list[str] = [""] * job.layout.processes
    dist.all_gather_object(hosts, job.node or socket.gethostname())
    slots = places(hosts)
    endpoint, server = ["", 0], None
    if job.rank == 0:
        address = (
            get_driver_ip([job.interface])
            if job.interface
            else socket.gethostbyname(socket.gethostname())
        )
        server = rendezvous_server(address, slots)
        endpoint = list(server.server_address[:2])
    dist.broadcast_object_list(endpoint, device=job.device)
    os.environ |= create_slot_env_vars(slots[job.rank])
    os.environ |= {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": str(endpoint[0]),
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(endpoint[1]),
    }
    os.environ |= {"HOROVOD_GLOO_IFACE": job.interface} if job.interface else {}
    yield
    dist.barrier()
    if server:
        server.shutdown()
        server.server_close()


def rendezvous_server(address: str, slots: Sequence[SlotInfo]) -> RendezvousHTTPServer:
    """Starts the server in a thread, on this address only."""
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    server = RendezvousHTTPServer((address, 0), RendezvousHandler, verbose=0)
    server.init(slots)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def wrap(job: Job, model: nn.Module, fp16: bool, adasum: bool) -> Optimizer:
    import horovod.torch as hvd

    optimizer: Optimizer = hvd.DistributedOptimizer(
        job.optimizer(model.parameters()),
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if fp16 else hvd.Compression.none,
        backward_passes_per_step=job.cell.micro_batches,
        op=hvd.Adasum if adasum else hvd.Average,
    )
    broadcast(model, optimizer)
    return optimizer


def broadcast(model: nn.Module, optimizer: Optimizer) -> None:
    """Broadcasts rank 0's parameters, buffers, optimizer state and learning rate. Horovod's
    `broadcast_optimizer_state` would take a step, which decays weights, and misses plain SGD's
    learning rate. Call after wrapping, which discards the state."""
    import horovod.torch as hvd

    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer.load_state_dict(hvd.broadcast_object(optimizer.state_dict(), root_rank=0))


@dataclass(frozen=True)
class RootFile:
    """Rank 0's file, broadcast after loading, as in Horovod's examples."""

    job: Job
    model: nn.Module
    optimizer: Optimizer

    def save(self, folder: Path, step: int) -> None:
        self._files.save(folder, step)

    def load(self, folder: Path) -> int:
        import horovod.torch as hvd

        step = self._files.load(folder) if self.job.rank == 0 else 0
        broadcast(self.model, self.optimizer)
        loaded: int = hvd.broadcast_object(step, root_rank=0)
        return loaded

    @property
    def _files(self) -> StateFiles:
        return StateFiles(self.job, {"model": self.model, "optimizer": self.optimizer})


@contextlib.contextmanager
def around_update(optimizer: DistributedOptimizer, adasum: bool) -> Iterator[None]:
    """Averages gradients before GradScaler inspects them, and only once: step() would do it again.
    Adasum has already updated during backward."""
    if adasum:
        yield
        return
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        yield


def register(
    job: Job, model: nn.Module, optimizer: Optimizer, buffer_bytes: int, over_tcp: bool
) -> None:
    """Registers what torch's profiler cannot see: sends by Horovod's threads, and waits for
    them."""
    import horovod.torch.optimizer as module

    def library() -> Iterator[Retained]:
        size = buffer_bytes if job.cell.devices > 1 else 0
        yield "library", "fusion buffer, as allocated", size
        for start in getattr(optimizer, "_starting_models", {}).values():
            yield "library", "Adasum's starting points", start

    senders = ("allreduce_async_", "grouped_allreduce_async_")
    registered = job.register(model, optimizer)
    registered.library = library
    registered.collectives = [(module, name, "all_reduce") for name in senders]
    registered.waits = [(module, "synchronize", "communication")]
    registered.wire = "ring"
    registered.over_tcp = over_tcp
    file = RootFile(job, model, optimizer)
    job.save_by(file.save, file.load)
