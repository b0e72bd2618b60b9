"""Starts the ranks of a trial, waits for them, turns whatever happens into an Outcome, leaves no process behind."""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import multiprocessing.connection
import os
import pickle
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from harness.cell import Cell
from harness.outcome import Outcome, ending, read_outcome
from harness.trial import TrialSpec, log_file, pid_file
from harness.worker import LAUNCHER, PRELOAD, adopt_orphans, die_with_parent, run_rank, run_spawned
from harness.workloads import DataSource

_AGENT_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def allowed_cores() -> list[int]:
    """The CPU cores this process may use, one hardware thread per core first."""
    allowed = sorted(os.sched_getaffinity(0))
    first: list[int] = []
    rest: list[int] = []
    seen: set[str] = set()
    for core in allowed:
        path = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
        siblings = path.read_text().strip() if path.exists() else str(core)
        (rest if siblings in seen else first).append(core)
        seen.add(siblings)
    return first + rest


def pin(cell: Cell, processes: int) -> tuple[tuple[int, ...], ...]:
    """Cores of each process: its devices' own (a server has one's), round and round where there are more than cores."""
    cores = allowed_cores()
    per_process = cell.threads_per_device * max(1, cell.devices // processes)
    return tuple(tuple(sorted({cores[(p * per_process + i) % len(cores)] for i in range(per_process)})) for p in range(processes))


def oversubscribed(cell: Cell, processes: int = 0) -> bool:
    """Whether its devices, or its processes where servers make them more, have more threads than there are cores."""
    return cell.threads_per_device * max(cell.devices, processes) > len(allowed_cores())


class Launcher:
    """Keeps the fork server warm and runs one trial at a time. `preload`: packages that its ranks will need."""

    def __init__(self, preload: Sequence[str] = ()) -> None:
        for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn"):  # their news are in the trial's record
            logging.getLogger(name).setLevel(logging.CRITICAL)
        adopt_orphans()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["harness.warm"])
        from multiprocessing import forkserver

        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        # The second keeps imports from initialising CUDA in the fork server, whose children could not use it then.
        for_server = {LAUNCHER: str(os.getpid()), PRELOAD: " ".join(preload), "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        before = {name: os.environ.get(name) for name in for_server}
        os.environ.update(for_server)
        self._ignored = {child.pid for child in psutil.Process().children()}
        forkserver.ensure_running()
        self._ignored |= {child.pid for child in psutil.Process().children()}
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        self._fork_server: int = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]

    def run(
        self,
        cell: Cell,
        data: DataSource,
        processes: int,
        *,
        reference: str | None = None,
        reference_output: str | None = None,
        max_restarts: int = 0,
        command: Callable[[Path], list[str] | None] = lambda scratch: None,
        on_progress: Callable[[int, float], None] | None = None,
        explain: bool = False,
        traces: str | None = None,
    ) -> Outcome:
        """Runs a trial to its end, whatever that is. KeyboardInterrupt becomes the status `interrupted`.

        `command`: the strategy's own command line for a folder, see `Strategy.command`.
        """
        scratch = tempfile.mkdtemp(prefix="parallelism-bench-")
        started_at, begin = time.time(), time.perf_counter()
        try:
            with _listen(scratch, on_progress) as progress, _Deadline(scratch, processes, cell.time_limit_seconds, self._kill) as deadline:
                own = command(Path(scratch))
                parent = 0 if own else os.getpid() if cell.launcher == "spawn" else self._fork_server
                spec = TrialSpec(
                    cell=cell,
                    scratch=scratch,
                    data=data,
                    processes=processes,
                    cores=pin(cell, processes),
                    reference=reference,
                    reference_output=reference_output,
                    progress=progress,
                    parent=parent,
                    interface="lo",
                    explain=explain,
                    traces=traces,
                )
                interrupted, exit_codes, ended = False, {}, ""
                try:
                    if own:
                        ended = ending(_run_command(own, spec), by=Path(own[0]).name)
                    else:
                        exit_codes = _spawn(spec) if cell.launcher == "spawn" else _elastic(spec, max_restarts)
                except KeyboardInterrupt:
                    interrupted = True
                finally:
                    self._sweep(scratch, processes)
            outcome = read_outcome(cell, scratch, processes, deadline.passed, interrupted, exit_codes, ended)
            by = Path(own[0]).name if own else cell.launcher
            return Outcome(started_at=started_at, wall_seconds=time.perf_counter() - begin, launcher=by, **outcome)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _sweep(self, scratch: str, processes: int) -> None:
        """Kills what a trial left, and waits until it is gone."""
        psutil.wait_procs(self._kill(scratch, processes), timeout=5)

    def _kill(self, scratch: str, processes: int) -> list[psutil.Process]:
        """Kills sessions of the ranks, and all below us or the fork server: orphans, and ranks that had no time to say who they are."""
        for pid in rank_pids(scratch, processes):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        left = []
        for child in psutil.Process().children(recursive=True):
            if child.pid not in self._ignored:
                with contextlib.suppress(psutil.Error):
                    child.kill()
                    left.append(child)
        return left


def rank_pids(scratch: str, processes: int) -> list[int]:
    """Process ids of the ranks that have started."""
    files = [pid_file(scratch, rank) for rank in range(processes)]
    return [int(text) for f in files if f.exists() and (text := f.read_text())]


def _elastic(spec: TrialSpec, max_restarts: int) -> dict[int, int]:
    """torchrun's own agent, in this process, over the warm fork server; returns the exit codes of ranks that failed."""
    import torch.distributed.elastic.rendezvous.registry as registry
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.rendezvous import RendezvousParameters

    class Agent(LocalElasticAgent):
        """Blocks until a rank ends or answers, where torch's agent looks every tenth of a second."""

        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            context: Any = self._pcontext
            ends = [p.sentinel for p in context._pc.processes]
            answers = [q._reader for rank, q in context._ret_vals.items() if rank not in context._return_values]
            multiprocessing.connection.wait(ends + answers)
            result: RunResult = super()._monitor_workers(worker_group)
            return result

    # One node needs no election: the static rendezvous saves the c10d one's random wait of up to 0.3 s.
    rendezvous = RendezvousParameters("static", f"127.0.0.1:{_free_port()}", Path(spec.scratch).name, 1, 1, rank=0)
    worker_spec = WorkerSpec(
        role="rank",
        local_world_size=spec.processes,
        entrypoint=run_rank,
        args=(spec,),
        rdzv_handler=registry.get_rendezvous_handler(rendezvous),
        max_restarts=max_restarts,
        monitor_interval=0.001,
        local_addr="localhost",
    )
    agent = Agent(
        worker_spec, DefaultLogsSpecs(log_dir=spec.scratch), start_method="forkserver", exit_barrier_timeout=10.0, shutdown_timeout=2
    )
    handlers = {number: signal.getsignal(number) for number in _AGENT_SIGNALS}
    try:
        result = agent.run()
        return {rank: failure.exitcode for rank, failure in result.failures.items()}
    except SignalException as stop:
        raise KeyboardInterrupt from stop
    finally:
        worker_spec.rdzv_handler.shutdown()
        for number, handler in handlers.items():  # the agent leaves its own behind
            signal.signal(number, handler)


def _spawn(spec: TrialSpec) -> dict[int, int]:
    """torch.multiprocessing.spawn, as its documentation shows it, a fresh interpreter per rank; exit code of the first that failed."""
    from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

    try:
        spawn(run_spawned, args=(spec, _free_port()), nprocs=spec.processes)
    except (ProcessExitedException, ProcessRaisedException) as error:
        return {error.error_index: getattr(error, "exit_code", 1)}
    return {}


def _run_command(command: list[str], spec: TrialSpec) -> int:
    """Another launcher starts the ranks; what it says goes to rank 0's log. Returns its exit code."""
    file = Path(spec.scratch) / "spec.pickle"
    file.write_bytes(pickle.dumps(spec))
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "OMP_NUM_THREADS": str(spec.cell.threads_per_device)}
    with open(log_file(spec.scratch, 0), "ab") as log:
        process = subprocess.Popen(
            [*command, "-m", "harness.rank", str(file)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **place},
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        return process.wait()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


@contextlib.contextmanager
def _listen(scratch: str, heard: Callable[[int, float], None] | None) -> Iterator[str | None]:
    """A socket on which rank 0 tells of its steps; the thread that reads it sleeps in between."""
    if heard is None:
        yield None
        return
    address = str(Path(scratch) / "progress")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(address)

        def read() -> None:
            while message := listener.recv(1024):
                if message == b"stop":
                    return
                told = json.loads(message)
                heard(told["step"], told["seconds"])

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        try:
            yield address
        finally:
            listener.connect(address)
            listener.send(b"stop")
            thread.join()


class _Deadline:
    """At the time limit: asks each rank for its stacks, then kills them all."""

    def __init__(self, scratch: str, processes: int, seconds: float, kill: Callable[[str, int], Any]) -> None:
        self.scratch, self.processes, self.kill = scratch, processes, kill
        self.passed = False
        self.timer = threading.Timer(seconds, self._strike)

    def __enter__(self) -> _Deadline:
        self.timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.timer.cancel()
        self.timer.join()

    def _strike(self) -> None:
        self.passed = True
        for pid in rank_pids(self.scratch, self.processes):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGUSR1)
        time.sleep(0.5)
        self.kill(self.scratch, self.processes)
