"""What Horovod needs around it: which parts it was built with, how its ranks start and find each
other, and how a model is wrapped."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
import os
import shutil
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from harness.host.unbuilt import unbuilt
from harness.parity.verdict import widest
from harness.spec.errors import Refused, Unavailable
from harness.strategy import Cell, Job, Retained, Tolerance, Workload

if TYPE_CHECKING:
    from horovod.runner.common.util.hosts import SlotInfo
    from horovod.runner.http.http_server import RendezvousHTTPServer
    from horovod.torch import DistributedOptimizer
    from torch import nn
    from torch.optim import Optimizer


HALF = Tolerance(1e-4, 0.05, "gradients travel in fp16")
GRADIENTS_FUSED = 4
"""Gradients that are ready in one cycle of 1 ms, about: a backward pass of tens of milliseconds
makes some tens of them, and a cycle takes longer where ranks have to agree."""


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


def compiled() -> dict[str, str]:
    """Its controllers by name: `built`, or what provides them."""
    return {
        f"Horovod's controller {name}": missing(name, "cpu") or "built" for name in ("gloo", "mpi")
    }


def check(cell: Cell, workload: Workload, controller: str, adasum: bool) -> None:
    """Raises Refused for what Horovod cannot do, Unavailable for what it was not built with."""
    if workload.arithmetic == "bf16":
        raise Refused(
            "Horovod has no all-reduce of bf16: keep the weights in fp32 and set the precision to"
            " bf16"
        )
    if adasum:
        if controller != "mpi":
            raise Refused("Horovod has Adasum over MPI only: set controller to mpi")
        if cell.devices & (cell.devices - 1):
            raise Refused(
                f"Adasum combines ranks in pairs: it needs a power of two, not {cell.devices}"
            )
        if cell.precision == "fp16":
            raise Refused(
                "Adasum updates during backward, before the loss scale can be taken off: use bf16"
                " or fp32"
            )
    if controller == "mpi" and cell.launcher == "spawn":
        raise Refused(
            "the ranks of the MPI controller are started by mpirun: leave the launcher out"
        )
    if lacks := missing(controller, cell.device):
        raise Unavailable(lacks)


def tolerance(cell: Cell, fp16: bool, adasum: bool) -> Tolerance:
    """Adasum adds in steps of two ranks, and each of them adds what differs, where the reference
    averages it."""
    reasons = [HALF] if fp16 else []
    if adasum and cell.devices > 1:
        steps = math.log2(cell.devices)
        reason = "Adasum adds what differs between the ranks' updates: another training"
        reasons.append(Tolerance(3e-2 * steps, 1.0 * steps, reason))
    return widest(*reasons)


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
        # Open MPI's own messages and its transport listen on loopback alone.
        "oob_tcp_if_include": "lo",
        "btl_tcp_if_include": "lo",
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


def places(hosts: Sequence[str]) -> list[SlotInfo]:
    """Each rank's place (Horovod's SlotInfo) from the host that each rank runs on, whatever their
    order."""
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


def initialize(job: Job, controller: str, fusion_bytes: int, cycle_time_ms: float) -> None:
    """hvd.init() with what it reads from the environment."""
    import horovod.torch as hvd

    os.environ |= {"HOROVOD_CONTROLLER": controller, "HOROVOD_CPU_OPERATIONS": controller}
    os.environ |= {
        "HOROVOD_FUSION_THRESHOLD": str(fusion_bytes),
        "HOROVOD_CYCLE_TIME": str(cycle_time_ms),
    }
    with rendezvous(job) if controller == "gloo" else contextlib.nullcontext():
        hvd.init()


@contextlib.contextmanager
def rendezvous(job: Job) -> Iterator[None]:
    """Where Gloo's ranks find each other, as horovodrun does it: a rendezvous server in a thread of
    rank 0, for as long as they look.

    The process group tells the ranks each other's hosts, and rank 0's address on the job's
    interface.
    """
    import torch.distributed as dist
    from horovod.runner.gloo_run import create_slot_env_vars
    from horovod.runner.util.network import get_driver_ip

    hosts: list[str] = [""] * job.layout.processes
    dist.all_gather_object(hosts, job.node or socket.gethostname())
    slots = places(hosts)
    place, server = ["", 0], None
    if job.rank == 0:
        address = (
            get_driver_ip([job.interface])
            if job.interface
            else socket.gethostbyname(socket.gethostname())
        )
        server = rendezvous_server(address, slots)
        place = list(server.server_address[:2])
    dist.broadcast_object_list(place, device=job.device)
    os.environ |= create_slot_env_vars(slots[job.rank])
    os.environ |= {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": str(place[0]),
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(place[1]),
    }
    os.environ |= {"HOROVOD_GLOO_IFACE": job.interface} if job.interface else {}
    yield
    dist.barrier()
    if server:
        server.shutdown()
        server.server_close()


def rendezvous_server(address: str, slots: Sequence[SlotInfo]) -> RendezvousHTTPServer:
    """Horovod's rendezvous server for these ranks, served by a thread, on a free port of this
    address alone: horovod.runner's own listens on all interfaces."""
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    server = RendezvousHTTPServer((address, 0), RendezvousHandler, verbose=0)
    server.init(slots)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def wrap(job: Job, model: nn.Module, fp16: bool, adasum: bool) -> Optimizer:
    """The cell's optimizer as Horovod's; every rank starts from rank 0's."""
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
    """Rank 0's parameters, buffers, optimizer state and learning rate to all, after wrapping.

    The state goes as rank 0's state_dict. Not by `broadcast_optimizer_state`: where an optimizer is
    new, it first takes a real step with zero gradients, so that weights are decayed and steps
    counted once too often; under plain SGD, which keeps no state, it leaves out the learning rate.
    Before wrapping it would be in vain: wrapping makes a new optimizer without the old one's state.
    """
    import horovod.torch as hvd

    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer.load_state_dict(hvd.broadcast_object(optimizer.state_dict(), root_rank=0))


@contextlib.contextmanager
def around_update(optimizer: DistributedOptimizer, adasum: bool) -> Iterator[None]:
    """Gradients are averaged before GradScaler looks at them, and once: step() would do it again.

    Adasum has updated during backward.
    """
    if adasum:
        yield
        return
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        yield


def register(
    job: Job, model: nn.Module, optimizer: Optimizer, buffer_bytes: int, over_tcp: bool
) -> None:
    """Shows the harness what torch's profiler cannot see: Horovod's own threads send, and
    `synchronize` waits."""
    import horovod.torch.optimizer as module

    def library() -> Iterator[Retained]:
        size = buffer_bytes if job.cell.devices > 1 else 0
        yield "library", "fusion buffer, as allocated", size
        for start in getattr(optimizer, "_starting_models", {}).values():
            yield "library", "Adasum's starting points", start

    senders = ("allreduce_async_", "grouped_allreduce_async_")
    job.register(
        model,
        optimizer,
        library=library,
        collectives=[(module, name, "all_reduce") for name in senders],
        waits=[(module, "synchronize", "communication")],
        wire="ring",
        over_tcp=over_tcp,
    )
