"""Main program of a rank: set up, warm up, measure, verify, answer."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.cell.cell import Cell
from harness.cell.errors import UsageError
from harness.host.amd import runtime_name
from harness.host.cores import core_ranges, threads_of
from harness.host.environment import HIDE_GPUS
from harness.host.packages import show
from harness.host.process import copy_shared_pages, die_with_parent
from harness.host.tcp_store import CLIENT, LOOPBACK, listening_on, open_store
from harness.host.user_code import first_line
from harness.measure.memory_kinds import held_bytes, phase
from harness.measure.peak_memory import MemoryMeter
from harness.parity.comparison import sketches
from harness.seam.job import Job
from harness.seam.registry import make_strategy, require_unchanged
from harness.worker.checkpoint import Saver, resume
from harness.worker.compilation import checked_compile_seconds, prepare_to_compile
from harness.worker.control_process import Control
from harness.worker.loop import Loop, busy_share
from harness.worker.rank_answer import (
    FailureAnswer,
    ProfiledAnswer,
    RankAnswer,
    TrainedAnswer,
    answer_file,
)
from harness.worker.reporting import RENDEZVOUS, Heartbeat, answer_questions
from harness.worker.rewind import Rewinds
from harness.worker.spec import TrialSpec, log_file, pid_file, stacks_file
from harness.workloads import Workload, make_workload

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    import torch
    from torch._C._distributed_c10d import TCPStore

    from harness.cell.training import TrainStep
    from harness.seam.base import Strategy


def nccl_variables(links: str, node_name: str) -> dict[str, str]:
    """Returns NCCL's variables for emulated links; empty without them. They leave only TCP between
    nodes, and any means within a node (NCCL_HOSTID). NCCL_P2P_DISABLE would also disable copies
    within nodes."""
    if not links:
        return {}
    return {
        "NCCL_HOSTID": node_name,
        "NCCL_NET": "Socket",
        "NCCL_IB_DISABLE": "1",
        "NCCL_COLLNET_ENABLE": "0",  # reductions in InfiniBand switches
        "NCCL_MNNVL_ENABLE": "0",  # NVLink between hosts of one rack
    }


# Objects that must live until _exit. A rank that drops its DDP model can hang: the Reducer's
# destructor holds the GIL while it joins gloo's thread, which waits for the GIL.
_NEVER_FREED: list[Any] = []

# Messages of a rank that lost another one, so its failure is a consequence.
_LOST_PEER = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "lost connection",
    "connection refused",
    "store is shut down",
    "horovod has been shut down",
    "this error originated at tensorpipe",
    "did the remote server shutdown or crash",  # torch's store
    # From NCCL and torch. Timed-out collectives are not listed, since all their ranks may be alive.
    "remote process exited or there was a network error",
    "ncclremoteerror",
    "connection closed by remote peer",
    "nccl communicator was aborted",
)
_NO_MEMORY = (
    "can't allocate memory",
    "out of memory",
    "bad_alloc",
    "cannot allocate memory",
    "_status_alloc_failed",  # cuBLAS, cuSOLVER, cuSPARSE, cuDNN 8
    "_allocation_failed",  # cuDNN 9: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED
    "failed to cuda calloc",  # NCCL's buffers
    "failed to cuda malloc",
    "failed to cuda host alloc",
)
PRELOAD = "PARALLELISM_BENCH_PRELOAD"
"""Environment variable with further packages for the fork server."""


def run_rank(spec: TrialSpec) -> None:
    rank = int(os.environ["RANK"])
    control = _prepare_process(spec, rank)
    answer = RankAnswer(rank, os.getpid(), time.time())
    progress = RankProgress(Heartbeat(spec.scratch, rank))
    answer_questions(spec.scratch, rank)  # its thread's stack is not trial memory
    try:
        result = _train(spec, answer, progress, control)
    except BaseException as error:
        if progress.meter:
            progress.meter.lift()
        cause = failure(error)
        if cause.status == "out_of_memory" and progress.meter:
            state = progress.job.train_state if progress.job else None
            holding = held_bytes(progress.meter, state)
            cause = replace(cause, failed_in=phase(error), holding=holding)
        traceback.print_exc()
        _flush()
        replace(answer, failure=cause).write(spec.scratch)
        os._exit(1)
    _flush()
    if isinstance(result, TrainedAnswer):
        replace(answer, trained=result).write(spec.scratch)
    else:
        replace(answer, profiled=result).write(spec.scratch)


@dataclass
class RankProgress:
    heartbeat: Heartbeat
    meter: MemoryMeter | None = None
    job: Job | None = None


def run_spawned(local_rank: int, spec: TrialSpec, port: int) -> None:
    """Runs a rank under torch.multiprocessing.spawn, with torchrun's variables."""
    os.environ |= {
        "RANK": str(local_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(spec.processes),
        "LOCAL_WORLD_SIZE": str(spec.processes),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        **CLIENT,
    }
    run_rank(spec)
    os._exit(0)


def keep_store(spec: TrialSpec, sender: Connection[int | OSError, int]) -> None:
    """Opens the ranks' store, sends its port, and keeps it open until this process is killed."""
    store = _serve_ranks(sender)
    sender.send(store.port)
    while True:
        signal.pause()


def spawn_ranks(spec: TrialSpec, sender: Connection[dict[int, int] | OSError, object]) -> None:
    """Runs ranks by torch.multiprocessing.spawn, and sends the exit code of the failed one."""
    from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

    store = _serve_ranks(sender)
    codes: dict[int, int] = {}
    try:
        spawn(run_spawned, args=(spec, store.port), nprocs=spec.processes)
    except (ProcessExitedException, ProcessRaisedException) as error:
        codes = {error.error_index: getattr(error, "exit_code", 1)}
    sender.send(codes)


def _serve_ranks(sender: Connection[OSError, object]) -> TCPStore:
    """Opens the ranks' store, or sends the OSError. Leaves it to the launcher to end this process;
    drops the warnings of torch's store that nobody in the ranks' network knows host names."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        return open_store(LOOPBACK)
    except OSError as error:
        sender.send(error)
        raise


def failure(error: BaseException) -> FailureAnswer:
    """Returns an error's status and reason, and whether another rank caused it."""
    text = " ".join(str(error).strip().splitlines()).lower()
    memory = (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or any(m in text for m in _NO_MEMORY)
    )
    return FailureAnswer(
        status="out_of_memory" if memory else "failed",
        reason=str(error) if isinstance(error, UsageError) else first_line(error),
        failed_at=time.time(),
        consequence=not memory and any(m in text for m in _LOST_PEER),
    )


def no_memory(text: str) -> str:
    """Returns the first log line about a lack of memory; empty if there is none."""
    return next(
        (line.strip() for line in text.splitlines() if any(m in line.lower() for m in _NO_MEMORY)),
        "",
    )


def _prepare_process(spec: TrialSpec, rank: int) -> Control | None:
    die_with_parent()
    local_rank = int(os.environ["LOCAL_RANK"])
    with contextlib.suppress(PermissionError):  # makes the whole process tree killable
        os.setsid()
    answer_file(spec.scratch, rank).unlink(missing_ok=True)
    pid_file(spec.scratch, rank).write_text(str(os.getpid()))
    log = os.open(log_file(spec.scratch, rank), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    _flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    _NEVER_FREED.append(stacks := open(stacks_file(spec.scratch, rank), "w"))  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    cores = spec.cores[local_rank]
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, cores)
    # Libraries that choose a device themselves would use a visible GPU.
    if spec.cell.device == "cpu":
        os.environ |= HIDE_GPUS
    if spec.interface:
        os.environ |= listening_on(spec.interface)
    os.environ |= nccl_variables(spec.cell.links, spec.node_name)

    import torch

    import harness.worker.preload  # noqa: F401

    control = Control(spec, rank, cores) if spec.samples_per_control else None
    if control and "harness.worker.forkserver" in sys.modules:
        copy_shared_pages()
    torch.set_num_threads(threads_of(spec.cell, cores))
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    return control


def _device(cell: Cell, serves: bool) -> torch.device:
    import torch

    if cell.device == "cuda" and not serves:
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    return torch.device("cpu")


def _require_cuda() -> None:
    culprit = getattr(sys.modules.get("harness.worker.forkserver"), "INITIALIZED_CUDA", None)
    if culprit is not None:
        raise RuntimeError(
            f"importing {culprit} initialised {runtime_name()} in the process that ranks are forked"
            " from, so no rank can use a GPU; import what does so inside the strategy's setup()"
        )


def _flush() -> None:
    with contextlib.suppress(ValueError, OSError):
        sys.stdout.flush()
        sys.stderr.flush()


def _train(
    spec: TrialSpec, answer: RankAnswer, progress: RankProgress, control: Control | None = None
) -> TrainedAnswer | ProfiledAnswer:
    require_unchanged(spec.cell)
    cell, strategy = _rank_cell(spec), make_strategy(spec.cell)
    workload = make_workload(cell.workload)
    layout = strategy.layout(cell.devices)
    device = _prepare_device(cell, strategy, workload, layout.serves(answer.rank))
    progress.heartbeat.beat(RENDEZVOUS)
    progress.meter = meter = MemoryMeter(device, cell.memory_limit_bytes, layout.driven(device))
    begin = time.perf_counter()
    step, job = _set_up(spec, strategy, workload, device, answer.rank, progress)
    setup_seconds, setup_peak = time.perf_counter() - begin, meter.peak().allocated

    progress.heartbeat.beat("step 0")
    # The work after profiled steps takes an unknown time, so silence is no hang.
    heartbeat = None if spec.profile else progress.heartbeat
    rewinds = Rewinds.of(spec, strategy.cycle)
    loop = Loop(spec, job, step, meter, control, heartbeat, rewinds)
    if spec.profile:
        from harness.worker.rank_profile import profile_rank

        return profile_rank(loop, answer, spec.traces)
    saver = _checkpoint(loop, answer)
    gc.collect()
    meter.reset()
    gc.disable()  # a garbage collection in a timed step would be noise
    while not loop.over():
        loop.run_step(loop.next_step)
        if saver:
            saver.after_step()
        if loop.training_step == cell.parity_steps:
            loop.verify()
        if loop.training_step in spec.sketched_after:
            loop.sketch()
    loop.stop_counting()
    loop.note_peak()
    with meter.unlimited():
        found = sketches(job.train_state) if spec.reference and job.train_state else None
    progress.heartbeat.beat("end")
    if control:
        control.close()
    gc.enable()
    return replace(_measurements(loop, setup_seconds, setup_peak), sketches=found)


def _checkpoint(loop: Loop, answer: RankAnswer) -> Saver | None:
    how = loop.spec.checkpoint
    if how is None:
        return None
    if not how.loads:
        return Saver(loop, Path(how.folder), how.step, answer)
    resume(loop, Path(how.folder), how.step)
    return None


def _prepare_device(
    cell: Cell, strategy: Strategy, workload: Workload, serves: bool
) -> torch.device:
    import torch

    import harness.worker.preload

    device = _device(cell, serves)
    if cell.device == "cuda":
        _require_cuda()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(cell.seed)
    show("torchao")  # transformers has already looked for it
    harness.worker.preload.import_packages(
        (*strategy.requires, *strategy.capabilities.preload, *workload.requires)
    )
    prepare_to_compile(cell)
    return device


def _rank_cell(spec: TrialSpec) -> Cell:
    """Returns the cell with another seed if a checkpoint must restore everything."""
    seed = spec.cell.seed + (spec.checkpoint is not None and spec.checkpoint.loads)
    return spec.cell.model_copy(update={"seed": seed})


def _set_up(
    spec: TrialSpec,
    strategy: Strategy,
    workload: Workload,
    device: torch.device,
    rank: int,
    progress: RankProgress,
) -> tuple[TrainStep, Job]:
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    cell, layout = _rank_cell(spec), strategy.layout(spec.cell.devices)
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if strategy.capabilities.process_group:
        # torchrun keeps one store across restarts: without a prefix, a rank might read the address
        # of a rank that has died.
        meet: Any = rendezvous
        store, _, size = next(meet("env://"))
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend, store=PrefixStore(f"restart {restarts}", store), rank=rank, world_size=size
        )
    progress.heartbeat.beat("set-up")
    serves_gpus = layout.serves(rank) and cell.device == "cuda"
    progress.job = job = Job(
        cell,
        workload,
        layout,
        device,
        rank,
        Path(spec.scratch),
        restarts,
        spec.interface,
        spec.node_name,
        local_processes=len(spec.ranks),
        threads=torch.get_num_threads(),
        weights_device=torch.device("cuda", 0) if serves_gpus else device,
        resume_from=Path(how.folder) if (how := spec.checkpoint) and how.loads else None,
    )
    step = strategy.setup(job)
    if job.train_state is None:
        raise RuntimeError(
            f"strategy {cell.strategy!r} did not call job.register(model, optimizer) in setup"
        )
    job.require_model()
    job.train_state.schedules = tuple(job.recipe.schedulers)
    _NEVER_FREED.extend([job, step])
    return step, job


def _measurements(loop: Loop, setup_seconds: float, setup_peak: int | None) -> TrainedAnswer:
    busy = busy_share(loop) if loop.job.layout.pipeline > 1 else None
    assert loop.states is not None
    compile_seconds = checked_compile_seconds(loop.job.cell, loop.compile_seconds)
    return TrainedAnswer(
        setup_seconds=setup_seconds,
        setup_peak_memory_bytes=setup_peak,
        restarts=loop.job.restart_count,
        cores=core_ranges(os.sched_getaffinity(0)),
        steps=tuple(loop.steps),
        time_slices=tuple(loop.slices_began),
        peak_memory_bytes=loop.peak_allocated,
        peak_by_device=loop.peak_by_device,
        reserved_memory_bytes=loop.peak_reserved,
        host_peak_bytes=loop.peak_host,
        memory_method=loop.meter.method,
        gpu_use=loop.gpus.use(),
        deviations=loop.deviations[0] if loop.deviations else None,
        replayed_deviations=tuple(loop.deviations[1:]),
        replays_ahead=tuple(loop.rewinds.replays_ahead) if loop.rewinds else (),
        busy_fraction=busy,
        offload=loop.offload(),
        sent_bytes_per_step=loop.per_step(loop.traffic.sent),
        cpu_time=loop.cpu_time,
        joules_per_step=loop.joules_per_step(),
        sketched=tuple(loop.sketched),
        compile_seconds=compile_seconds,
        loaded=loop.loaded,
        expert_tokens=loop.expert_tokens,
        collectives=loop.collectives,
        states=loop.states,
    )
