"""What one rank does: set up, warm up, measure, verify, answer."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import itertools
import json
import os
import signal
import socket
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.measure.bubble import busy_fraction
from harness.measure.clock import timed_step
from harness.measure.memory import MemoryMeter
from harness.measure.shortage import shortage
from harness.measure.states import KINDS, held, state_bytes
from harness.measure.traffic import Traffic, folder_bytes
from harness.parity import Reference, update_deviations
from harness.strategy import Batch, Exposed, Job, TrainStep, make_strategy
from harness.trial import TrialSpec, answer_file, log_file, pid_file, stacks_file, write_json
from harness.workloads import make_workload

# Objects that must outlive every destructor: a rank that lets its DDP model go can hang for ever, because the Reducer's
# destructor holds the GIL and joins gloo's thread, which waits for the GIL. They live until the process leaves by _exit.
_KEPT: list[Any] = []

# What a rank says when another one has gone: the consequence of a failure, not its cause.
_LOST_PEER = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "lost connection",
    "connection refused",
    "store is shut down",
    "horovod has been shut down",
    "this error originated at tensorpipe",
)
_NO_MEMORY = ("can't allocate memory", "out of memory", "bad_alloc", "cannot allocate memory")


LAUNCHER = "PARALLELISM_BENCH_LAUNCHER"
"""Environment variable that tells the fork server the process id it must not outlive."""
PRELOAD = "PARALLELISM_BENCH_PRELOAD"
"""Environment variable with the packages that the fork server is to import beside the usual ones."""


def run_rank(spec: TrialSpec) -> None:
    """Entry point of every rank under the elastic launcher; rank and world size are torchrun's variables."""
    rank = int(os.environ["RANK"])
    _prepare_process(spec, rank)
    answer: dict[str, Any] = {"rank": rank, "pid": os.getpid(), "entered_at": time.time()}
    standing = Standing()
    try:
        answer |= _train(spec, rank, standing)
        answer["status"] = "ok"
    except BaseException as error:
        if standing.meter:
            standing.meter.lift()
        answer |= failure(error)
        if answer["status"] == "out_of_memory" and standing.meter:
            answer |= shortage(error, standing.meter, standing.job.exposed if standing.job else None)
        traceback.print_exc()
        _flush()
        write_json(answer_file(spec.scratch, rank), answer)
        os._exit(1)
    _flush()
    write_json(answer_file(spec.scratch, rank), answer)


@dataclass
class Standing:
    """How far a rank has come: what it can still be asked when it fails."""

    meter: MemoryMeter | None = None
    job: Job | None = None


def run_spawned(local_rank: int, spec: TrialSpec, port: int) -> None:
    """Entry point of every rank under torch.multiprocessing.spawn: sets the variables that torchrun would have set."""
    os.environ |= {
        "RANK": str(local_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(spec.processes),
        "LOCAL_WORLD_SIZE": str(spec.processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    run_rank(spec)
    os._exit(0)


def failure(error: BaseException) -> dict[str, Any]:
    """Status and reason of an exception, and whether it is only the consequence of another rank's failure."""
    said = str(error).strip().splitlines()
    line = said[0] if said else ""
    text = " ".join(said).lower()
    memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or any(m in text for m in _NO_MEMORY)
    return {
        "status": "out_of_memory" if memory else "failed",
        "reason": f"{type(error).__name__}: {line}" if line else type(error).__name__,
        "failed_at": time.time(),
        "consequence": not memory and any(m in text for m in _LOST_PEER),
    }


def no_memory(text: str) -> str:
    """The line of a log that says there was no memory; empty where none does."""
    return next((line.strip() for line in text.splitlines() if any(m in line.lower() for m in _NO_MEMORY)), "")


def die_with_parent() -> None:
    """The kernel kills this process when the one that started it is gone, however it went."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def adopt_orphans() -> None:
    """Descendants whose parent dies become this process's children, where they can be found."""
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


def _prepare_process(spec: TrialSpec, rank: int) -> None:
    die_with_parent()
    if spec.parent and os.getppid() != spec.parent:  # it was gone before the kernel was told
        os._exit(1)
    local_rank = int(os.environ["LOCAL_RANK"])
    with contextlib.suppress(PermissionError):  # a session of its own makes the whole tree killable
        os.setsid()
    answer_file(spec.scratch, rank).unlink(missing_ok=True)
    pid_file(spec.scratch, rank).write_text(str(os.getpid()))
    log = os.open(log_file(spec.scratch, rank), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    _flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    _KEPT.append(stacks := open(stacks_file(spec.scratch, rank), "w"))  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, spec.cores[local_rank])
    if spec.interface:
        os.environ["GLOO_SOCKET_IFNAME"] = spec.interface

    import torch

    import harness.imports  # noqa: F401

    torch.set_num_threads(spec.cell.threads_per_device)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def _flush() -> None:
    with contextlib.suppress(ValueError, OSError):
        sys.stdout.flush()
        sys.stderr.flush()


class Progress:
    """Tells the parent of finished steps, at most twice a second, without ever waiting for it."""

    def __init__(self, address: str | None) -> None:
        self.address = address
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) if address else None
        if self.socket:
            self.socket.setblocking(False)
        self.last = 0.0

    def tell(self, step: int, seconds: float) -> None:
        now = time.monotonic()
        if self.socket is None or now - self.last < 0.5:
            return
        self.last = now
        with contextlib.suppress(OSError):
            self.socket.sendto(json.dumps({"step": step, "seconds": seconds}).encode(), self.address)  # type: ignore[arg-type]


def _train(spec: TrialSpec, rank: int, standing: Standing) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    import harness.imports

    cell = spec.cell
    strategy = make_strategy(cell)
    layout = strategy.layout(cell.devices)
    workload = make_workload(cell.workload)
    serves = rank >= layout.processes - layout.servers  # beside the devices, in host memory
    device = torch.device(cell.device, int(os.environ["LOCAL_RANK"])) if cell.device == "cuda" and not serves else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(cell.seed)
    harness.imports.import_packages((*strategy.requires, *strategy.preload, *workload.requires))
    standing.meter = meter = MemoryMeter(device, cell.memory_limit_bytes)
    begin = time.perf_counter()
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if strategy.process_group:
        # torchrun keeps one store over its restarts: without a prefix a rank may read the address of one that has died.
        meet: Any = rendezvous
        store, _, size = next(meet("env://"))
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=PrefixStore(f"restart {restarts}", store), rank=rank, world_size=size)
    standing.job = job = Job(cell, workload, layout, device, rank, Path(spec.scratch), restarts, spec.interface)
    step = strategy.setup(job)
    if job.exposed is None:
        raise RuntimeError(f"strategy {cell.strategy!r} did not call job.expose(model, optimizer) in setup")
    _KEPT.extend([job, step])
    setup_seconds = time.perf_counter() - begin
    setup_peak = meter.peak().allocated

    loop = Loop(spec, job, step, meter)
    gc.collect()
    meter.reset()
    gc.disable()  # a collection in a timed step is a noise of the harness's making
    for index in range(cell.total_steps):
        loop.one(index)
        if index + 1 == cell.parity_steps:
            loop.verify()
    loop.traffic.stop(loop.counting())
    loop.note_peak()
    gc.enable()
    bubble = _bubble(loop) if layout.pipeline > 1 else None
    return {
        "setup_seconds": setup_seconds,
        "setup_peak_memory_bytes": setup_peak,
        "restarts": restarts,
        "steps": loop.rows,
        "peak_memory_bytes": loop.peak_allocated,
        "reserved_memory_bytes": loop.peak_reserved,
        "memory_method": meter.method,
        "update_deviations": loop.deviations,
        "busy_fraction": bubble,
        "offload": loop.offload(),
        "sent_bytes_per_step": loop.per_step(loop.traffic.sent),
        **loop.dtypes,
        **loop.states,
    }


class Loop:
    """The training loop of one rank: steps, peaks, the look at the parameters after the parity segment."""

    def __init__(self, spec: TrialSpec, job: Job, step: TrainStep, meter: MemoryMeter) -> None:
        self.spec, self.job, self.step, self.meter = spec, job, step, meter
        self.progress = Progress(spec.progress if job.rank == 0 else None)
        self.rows: list[dict[str, Any]] = []
        self.peak_allocated: int | None = None
        self.peak_reserved: int | None = None
        self.deviations: dict[str, float] | None = None
        self.dtypes: dict[str, Any] = {}
        self.states: dict[str, Any] = {}
        self.settling = False
        self.traffic = Traffic(over_tcp=job.device.type == "cpu" and job.exposed is not None and job.exposed.over_tcp)
        self._counted_from: int | None = None
        share = job.layout.share(job.rank)
        size = job.cell.global_batch // job.layout.shares
        self.share = slice(share * size, (share + 1) * size)

    def synchronize(self) -> None:
        if self.job.device.type == "cuda":
            import torch

            torch.cuda.synchronize(self.job.device)

    def fetch(self, index: int) -> Batch:
        import torch

        cell = self.job.cell
        inputs, labels = self.spec.data.batch(cell.seed, index, cell.global_batch, self.share)
        device = self.job.device
        return Batch(index, torch.from_numpy(inputs).to(device), torch.from_numpy(labels).to(device))

    def counting(self) -> int:
        """Steps since the traffic's count began; ends it."""
        steps = 0 if self._counted_from is None else len(self.rows) - self._counted_from
        self._counted_from = None
        return steps

    def per_step(self, total: int | None) -> float | None:
        return total / self.traffic.steps if total is not None and self.traffic.steps else None

    def offload(self) -> dict[str, float | None] | None:
        """What travelled to and from the disk per step, and what lies there; None where the strategy keeps nothing there."""
        exposed = self.job.exposed
        if exposed is None or exposed.offload_folder is None:
            return None
        return {
            "read": self.per_step(self.traffic.disk_read),
            "written": self.per_step(self.traffic.disk_written),
            "kept": folder_bytes(exposed.offload_folder),
        }

    def one(self, index: int) -> None:
        if self._counted_from is None and index >= self.job.cell.warmup_steps and not self.settling:
            self._counted_from = len(self.rows)
            self.traffic.start()
        loss, took = timed_step(lambda: self.fetch(index), self.step, self.synchronize)
        warm = index < self.job.cell.warmup_steps
        phase = "warmup" if warm else "settling" if self.settling else "timed"
        self.settling = False
        value = None if loss is None else float(loss.detach())
        self.rows.append({"step": index, "phase": phase, **asdict(took), "loss": value})
        self.progress.tell(index, took.step_seconds)

    def note_peak(self) -> None:
        peak = self.meter.peak()
        self.meter.method = peak.method
        self.peak_allocated = _larger(self.peak_allocated, peak.allocated)
        self.peak_reserved = _larger(self.peak_reserved, peak.reserved)

    def verify(self) -> None:
        """Compares or saves the parameters; what that costs in memory is not counted, nor is the step that follows it."""
        self.traffic.stop(self.counting())
        self.note_peak()
        exposed, workload = self.job.exposed, self.job.workload
        assert exposed is not None
        self.dtypes = dtypes_of(exposed)
        kept = state_bytes(itertools.chain(held(exposed), workload.held(exposed.model)), self.job.device.type)
        self.states = {"state_bytes": {kind: kept[kind] for kind in (*KINDS, "host")}, "library_buffers": kept["library_buffers"]}
        with self.meter.unlimited():
            if self.spec.reference_output:
                initial = workload.build(self.job.cell.seed, self.job.device)
                Reference(self.spec.reference_output).save(workload, exposed.model, initial, [row["loss"] for row in self.rows])
            if self.spec.reference:
                self.deviations = update_deviations(exposed, workload, Reference(self.spec.reference))
        self.meter.reset()
        self.settling = True


def _larger(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else max(a, b)


def dtypes_of(exposed: Exposed) -> dict[str, Any]:
    """The distinct dtypes of parameters, gradients and optimizer state, and the number of elements this rank holds."""
    import torch
    from torch.distributed.tensor import DTensor

    def names(tensors: Any) -> list[str]:
        return sorted({str(t.dtype).removeprefix("torch.") for t in tensors if isinstance(t, torch.Tensor)})

    parameters = list(exposed.model.parameters())
    state = [v for o in exposed.optimizers for s in o.state.values() if isinstance(s, dict) for k, v in s.items() if k != "step"]
    gradients = [p.grad for p in parameters if p.grad is not None]
    return {
        "parameter_dtypes": names(parameters),
        # Gradients are gone after zero_grad; they have their parameter's dtype (autograd accumulates into that).
        "gradient_dtypes": names(gradients) or names(p for p in parameters if p.requires_grad),
        "optimizer_state_dtypes": names(state),
        "held_parameters": sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in parameters),
    }


def _bubble(loop: Loop) -> float | None:
    """This rank's busy share, in a pass of its own after everything that is timed."""
    exposed = loop.job.exposed
    assert exposed is not None
    if not exposed.compute:
        return None
    index = loop.job.cell.total_steps
    return busy_fraction(lambda: (loop.step(loop.fetch(index)), None)[1], exposed.compute, loop.synchronize)
