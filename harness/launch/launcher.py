"""Starts a trial's ranks, always returns an Outcome, and leaves no process behind."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import multiprocessing
import multiprocessing.connection
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, TypeVar

import psutil

from harness.cell.cell import Cell
from harness.host.cores import oom_kills, pin, threads_of
from harness.host.folders import keep_multiprocessing_files, remove_abandoned, scratch_folder
from harness.host.process import (
    ALONE,
    LAUNCHER,
    adopt_orphans,
    caller_not_imported,
    die_with_parent,
    starting_without_stops,
)
from harness.host.tcp_store import LOOPBACK, RENDEZVOUS_SECONDS
from harness.launch.outcome import Outcome, RankOutputs, classify_end, ending
from harness.launch.watch import Watch, ended_by, listen, pids_by_rank
from harness.worker.control_process import run_control
from harness.worker.spec import Checkpointing, TrialSpec, log_file
from harness.worker.worker import PRELOAD, keep_store, run_rank, spawn_ranks
from harness.workloads import DataSource, make_workload

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
    from typing_extensions import Unpack

Sent = TypeVar("Sent")
Command = Callable[[Path], "list[str] | None"]


class TrialOptions(TypedDict, total=False):
    reference: str | None
    reference_output: str | None
    max_restarts: int
    profile: bool
    traces: str | None
    turns: str | None
    samples_per_control: int
    timed_seconds: float
    timed_steps: int
    rewind_seed: int | None
    checkpoint: Checkpointing | None
    sketched_after: tuple[int, ...]


class LaunchOptions(TrialOptions, total=False):
    command: Command


class LauncherProtocol(Protocol):
    def run(
        self,
        cell: Cell,
        data: DataSource,
        processes: int,
        *,
        command: Command = ...,
        on_progress: Callable[[int, float], None] | None = None,
        **more: Unpack[TrialOptions],
    ) -> Outcome: ...

    def ignore_pid(self, pid: int) -> None: ...


class Launcher:
    """Keeps the fork server warm and runs one trial at a time. `preload`: packages for its ranks.
    `alone`: whether ranks reach only each other, in a loopback that no other user of the host can
    reach, if the system permits that."""

    def __init__(self, preload: Sequence[str] = (), alone: bool = True) -> None:
        # Their warnings are already in the trial record.
        for name in (
            "torch.distributed.elastic",
            "torch.multiprocessing.spawn",
        ):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        # It warns at a stop, at a level that torch sets itself.
        logging.getLogger("torch.distributed.elastic.agent.server.api").disabled = True
        adopt_orphans()
        remove_abandoned()
        keep_multiprocessing_files()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["harness.worker.forkserver"])
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self._preload, self._alone = " ".join(preload), alone
        self._ignored: set[int] = set()
        self.fork_server = 0
        """Process id of the fork server, parent of the elastic launcher's ranks."""
        self._start_fork_server()

    def _start_fork_server(self) -> None:
        # PYTORCH_NVML_BASED_CUDA_CHECK keeps imports from initialising CUDA in the fork server,
        # which would make it unusable in forked ranks.
        for_server = {
            LAUNCHER: str(os.getpid()),
            PRELOAD: self._preload,
            ALONE: "1" if self._alone else "",
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        }
        before = {name: os.environ.get(name) for name in for_server}
        os.environ.update(for_server)
        self._ignored |= {child.pid for child in psutil.Process().children()}
        try:
            with starting_without_stops():
                forkserver.ensure_running()
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
        self._ignored |= {child.pid for child in psutil.Process().children()}
        self.fork_server = _pid_of_fork_server()

    def _restart_fork_server(self) -> None:
        """Replaces a fork server that was killed, or restarted by Python without our variables."""
        with contextlib.suppress(psutil.Error):
            former = psutil.Process(_pid_of_fork_server())
            if former.ppid() == os.getpid():
                former.kill()
                # A process becomes a zombie when its first thread ends, but waitpid, which Python
                # uses, sees its end only after the last.
                os.waitid(os.P_PID, former.pid, os.WEXITED | os.WNOWAIT)
        self._start_fork_server()

    def _fork_server_runs(self) -> bool:
        with contextlib.suppress(psutil.Error):
            return psutil.Process(self.fork_server).status() != psutil.STATUS_ZOMBIE
        return False

    def run(
        self,
        cell: Cell,
        data: DataSource,
        processes: int,
        *,
        command: Command = lambda scratch: None,
        on_progress: Callable[[int, float], None] | None = None,
        waited: Callable[[], float] = float,
        **more: Unpack[TrialOptions],
    ) -> Outcome:
        """Runs a trial; returns its outcome, `interrupted` after KeyboardInterrupt.

        `command`: see `Strategy.own_launcher`. `waited`: returns seconds outside the time limit.
        """
        make_workload(cell.workload).fetch()
        started_at, begin = time.time(), time.perf_counter()
        spec = TrialSpec(cell, data, processes, interface="lo", **more)
        left, by = self.run_ranks(spec, command=command, on_progress=on_progress, waited=waited)
        return dataclasses.replace(
            classify_end(cell, processes, left),
            started_at=started_at,
            wall_seconds=time.perf_counter() - begin,
            launcher=by,
        )

    def run_ranks(
        self,
        spec: TrialSpec,
        *,
        command: Command = lambda scratch: None,
        on_progress: Callable[[int, float], None] | None = None,
        store: Store | None = None,
        stop: threading.Event | None = None,
        waited: Callable[[], float] = float,
    ) -> tuple[RankOutputs, str]:
        """Runs this node's ranks; returns their outputs and the launcher's name.

        `store`: node 0's rendezvous store; created next to the ranks for a single node. `stop`:
        ends the ranks.
        """
        try:
            if not self._fork_server_runs():
                self._restart_fork_server()
            try:
                return self._run_ranks(spec, command, on_progress, store, stop, waited)
            # The fork server was just killed. If its socket has closed, the connection is refused.
            except (EOFError, ConnectionError):
                self._restart_fork_server()
                return self._run_ranks(spec, command, on_progress, store, stop, waited)
        except _NOT_STARTED as error:
            lines = str(error).strip().splitlines()
            reason = f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}"
            return RankOutputs(not_started=reason), str(spec.cell.launcher)

    def _run_ranks(
        self,
        spec: TrialSpec,
        command: Command,
        on_progress: Callable[[int, float], None] | None,
        store: Store | None,
        stop: threading.Event | None,
        waited: Callable[[], float],
    ) -> tuple[RankOutputs, str]:
        cell, killed_before = spec.cell, oom_kills()
        left, by = RankOutputs(), str(cell.launcher)
        with scratch_folder() as folder:
            scratch = str(folder)
            kill = functools.partial(self._kill, scratch, spec.ranks)
            limit = cell.time_limit_seconds
            with (
                listen(scratch, on_progress) as progress,
                Watch(
                    scratch, spec.ranks, limit, kill, waited, cell.nodes > 1, cell.device == "cuda"
                ) as watch,
                ended_by(stop, kill),
                caller_not_imported(),
            ):
                arguments = command(folder)
                spec = dataclasses.replace(
                    spec,
                    scratch=scratch,
                    cores=pin(cell, spec.processes, len(spec.ranks)),
                    progress=progress,
                )
                controls: list[BaseProcess] = []
                try:
                    controls += _start_controls(spec)
                    if arguments:
                        by = Path(arguments[0]).name
                        left.ended = ending(_run_command(arguments, spec), by=by)
                    else:
                        left.exit_codes = (
                            next_to_ranks(spawn_ranks, spec) or {}
                            if cell.launcher == "spawn"
                            else run_elastic(spec, store)
                        )
                except KeyboardInterrupt:
                    left.interrupted = True
                except _NOT_STARTED:
                    if not (watch.passed or watch.hang):  # else killed while they were restarted
                        raise
                finally:
                    watch.end()  # ranks that have ended would count as hanging
                    psutil.wait_procs(kill(), timeout=5)
                    for control in controls:
                        control.join(5)
            left.timed_out, left.hang = watch.passed, watch.hang
            left.read(scratch, spec.ranks)
            left.oom_kills = (oom_kills() or 0) - (killed_before or 0)
            return left, by

    def ignore_pid(self, pid: int) -> None:
        """Leaves this child process, which belongs to no trial, alive."""
        self._ignored.add(pid)

    def _kill(self, scratch: str, ranks: range) -> list[psutil.Process]:
        """Kills the ranks' sessions and all descendants, even those orphaned or never
        registered."""
        for pid in pids_by_rank(scratch, ranks).values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        ignored = self._ignored | {_pid_of_fork_server()}  # Python itself waits for its end
        below = [child for child in psutil.Process().children() if child.pid not in ignored]
        left = []
        for parent in [*(child.pid for child in below), self.fork_server]:
            with contextlib.suppress(psutil.Error):
                left += psutil.Process(parent).children(recursive=True)
        for child in [*below, *left]:
            with contextlib.suppress(psutil.Error):
                child.kill()
        return below + left


def _pid_of_fork_server() -> int:
    pid: int = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    return pid


def _start_controls(spec: TrialSpec) -> list[BaseProcess]:
    """Starts the ranks' control processes in the fork server, whatever starts the ranks."""
    ranks = spec.ranks if spec.samples_per_control else ()
    context = multiprocessing.get_context("forkserver")
    controls = [context.Process(target=run_control, args=(spec, rank)) for rank in ranks]
    for control in controls:
        control.start()
    return [*controls]


def next_to_ranks(
    function: Callable[[TrialSpec, Connection[Sent | OSError, Sent]], None], spec: TrialSpec
) -> Sent | None:
    """Starts a process in the ranks' network, and returns what it sends first; None if it is killed
    before. Raises OSError if no port is free."""
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    with receiver:
        with sender:
            context.Process(target=function, args=(spec, sender)).start()
        with contextlib.suppress(EOFError):
            sent: Sent = receiver.recv()
            if isinstance(sent, OSError):
                raise sent
            return sent
    return None


def _run_command(command: list[str], spec: TrialSpec) -> int:
    file = Path(spec.scratch) / "spec.json"
    file.write_text(spec.to_json())
    with socket.create_server((LOOPBACK, 0)) as free:
        port = free.getsockname()[1]
    variables = {
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(threads_of(spec.cell, spec.cores[0])),
    }
    # Where the system permits no namespace, torchrun's store must still listen on loopback only.
    program = shutil.which(command[0])
    is_python = program and re.match(rb"#!.*python", Path(program).read_bytes())
    bound = [sys.executable, "-m", "harness.host.tcp_store"] if is_python else []
    alone = [sys.executable, "-m", "harness.host.process", *bound]
    with open(log_file(spec.scratch, 0), "ab") as log:
        process = subprocess.Popen(
            [*alone, *command, "-m", "harness.worker.mpi", str(file)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **variables},
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        return process.wait()


_NOT_STARTED = (OSError, RuntimeError, EOFError)  # torch raises RuntimeError
_AGENT_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_SHUTDOWN_SECONDS = 2


@functools.cache
def _agent_class() -> type[LocalElasticAgent]:
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    class Agent(LocalElasticAgent):
        """Blocks until a rank ends or answers; torch's agent polls every 0.1 s."""

        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            context: Any = self._pcontext
            ends = [p.sentinel for p in context._pc.processes]
            answers = [
                q._reader
                for rank, q in context._ret_vals.items()
                if rank not in context._return_values
            ]
            multiprocessing.connection.wait(ends + answers)
            result: RunResult = super()._monitor_workers(worker_group)
            return result

        def _exit_barrier(self) -> None:
            """Skips torch's barrier, as the caller waits for all nodes."""

        def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 0) -> None:
            """Stops the ranks within seconds; before torch 2.12, agents take no time limit."""
            if self._pcontext:
                self._pcontext.close(death_sig, _SHUTDOWN_SECONDS)
            super()._shutdown(death_sig)

    return Agent


def _rendezvous(spec: TrialSpec, store: Store | None) -> StaticTCPRendezvous:
    """Returns torch's static rendezvous over an open store, which cannot lose its port. c10d's
    would wait up to 0.3 s for an election."""
    from torch._C._distributed_c10d import HashStore
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

    address, port = spec.rendezvous[0], getattr(store, "port", spec.rendezvous[1])
    if store is None and spec.node == 0:
        # This process cannot reach the ranks' network, and has nothing to tell them there.
        store, port = HashStore(), next_to_ranks(keep_store, spec)
        if port is None:
            raise EOFError("the process with the store was killed")
    rendezvous = StaticTCPRendezvous(
        address, port, spec.node, spec.cell.nodes, spec.token, RENDEZVOUS_SECONDS
    )
    rendezvous._store = store
    return rendezvous


def run_elastic(spec: TrialSpec, store: Store | None = None) -> dict[int, int]:
    """Runs one node's ranks; returns exit codes by failed rank, in the order they were noticed.
    `store`: the rendezvous store of node 0."""
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException

    rendezvous = _rendezvous(spec, store)
    worker_spec = WorkerSpec(
        role="rank",
        local_world_size=len(spec.ranks),
        entrypoint=run_rank,
        args=(spec,),
        rdzv_handler=rendezvous,
        max_restarts=spec.max_restarts,
        monitor_interval=0.001,
        local_addr="localhost",
    )
    logs = DefaultLogsSpecs(log_dir=spec.scratch)
    agent = _agent_class()(worker_spec, logs, start_method="forkserver")
    handlers = {number: signal.getsignal(number) for number in _AGENT_SIGNALS}
    try:
        result = agent.run()
        codes = {rank: failure.exitcode for rank, failure in result.failures.items()}
        # The agent names one rank, which may have failed because of another, and ends the others by
        # SIGTERM.
        context: Any = agent._pcontext
        for rank, process in zip(spec.ranks, context._pc.processes if codes else (), strict=False):
            if process.exitcode not in (None, -signal.SIGTERM):
                codes.setdefault(rank, process.exitcode)
        return codes
    except SignalException as stop:
        raise KeyboardInterrupt from stop
    finally:
        rendezvous.shutdown()
        for number, handler in handlers.items():  # the agent leaves its own behind
            signal.signal(number, handler)
