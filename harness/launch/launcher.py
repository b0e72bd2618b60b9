"""Starts the ranks of a trial, waits for them, turns whatever happens into an Outcome, leaves no
process behind."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import multiprocessing
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
from typing import TYPE_CHECKING, Protocol

import psutil

from harness.host.cores import pin, threads_of
from harness.host.process import LAUNCHER, adopt_orphans, die_with_parent
from harness.launch.elastic import run_elastic
from harness.launch.options import Command, TrialOptions
from harness.launch.outcome import Outcome, RankOutputs, ending, judge
from harness.spec.cell import Cell
from harness.worker.spec import TrialSpec, log_file, pid_file
from harness.worker.worker import PRELOAD, run_spawned
from harness.workloads import DataSource

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from typing_extensions import Unpack


class LauncherProtocol(Protocol):
    """What a runner needs of a launcher."""

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
    """Keeps the fork server warm and runs one trial at a time.

    `preload`: packages that its ranks will need.
    """

    def __init__(self, preload: Sequence[str] = ()) -> None:
        for name in (
            "torch.distributed.elastic",
            "torch.multiprocessing.spawn",
        ):  # their news are in the trial's record
            logging.getLogger(name).setLevel(logging.CRITICAL)
        adopt_orphans()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["harness.worker.forkserver"])
        from multiprocessing import forkserver

        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        # The second keeps imports from initialising CUDA in the fork server, whose children could
        # not use it then.
        for_server = {
            LAUNCHER: str(os.getpid()),
            PRELOAD: " ".join(preload),
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        }
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
        self.fork_server: int = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
        """Its process id; the ranks that the elastic launcher starts are its children."""

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
        """Runs a trial to its end, whatever that is. KeyboardInterrupt becomes the status
        `interrupted`.

        `command`: the strategy's own command line for a folder, see `Strategy.command`. `waited`:
        seconds so far that the time limit does not count. `more`: further fields of TrialSpec.
        """
        started_at, begin = time.time(), time.perf_counter()
        spec = TrialSpec(cell, data, processes, interface="lo", **more)
        left, by = self.run_ranks(spec, command=command, on_progress=on_progress, waited=waited)
        return Outcome(
            started_at=started_at,
            wall_seconds=time.perf_counter() - begin,
            launcher=by,
            **vars(judge(cell, processes, left)),
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
        """Runs this node's ranks of a trial; returns what they left, and who started them.

        `store`: where node 0's nodes meet, made here where there is one node. `stop`: ends the
        ranks once it is set.
        """
        cell = spec.cell
        scratch = tempfile.mkdtemp(prefix="parallelism-bench-")
        left, by = RankOutputs(), str(cell.launcher)
        try:
            kill = functools.partial(self._kill, scratch, spec.ranks)
            with (
                _listen(scratch, on_progress) as progress,
                Deadline(scratch, spec.ranks, cell.time_limit_seconds, kill, waited) as deadline,
                _stopped(stop, kill),
            ):
                own = command(Path(scratch))
                spec = dataclasses.replace(
                    spec,
                    scratch=scratch,
                    cores=pin(cell, spec.processes, len(spec.ranks)),
                    progress=progress,
                    parent=(
                        0 if own else os.getpid() if cell.launcher == "spawn" else self.fork_server
                    ),
                )
                try:
                    if own:
                        by = Path(own[0]).name
                        left.ended = ending(_run_command(own, spec), by=by)
                    else:
                        left.exit_codes = (
                            _spawn(spec) if cell.launcher == "spawn" else run_elastic(spec, store)
                        )
                except KeyboardInterrupt:
                    left.interrupted = True
                finally:
                    psutil.wait_procs(kill(), timeout=5)
            left.timed_out = deadline.passed
            left.read(scratch, spec.ranks)
            return left, by
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def ignore_pid(self, pid: int) -> None:
        """A child of this process that is none of a trial's."""
        self._ignored.add(pid)

    def _kill(self, scratch: str, ranks: range) -> list[psutil.Process]:
        """Kills sessions of the ranks, and all below us or the fork server: orphans, and ranks that
        had no time to say who they are."""
        for pid in rank_pids(scratch, ranks):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        below = [child for child in psutil.Process().children() if child.pid not in self._ignored]
        left = []
        for parent in [*below, psutil.Process(self.fork_server)]:
            with contextlib.suppress(psutil.Error):
                left += parent.children(recursive=True)
        for child in [*below, *left]:
            with contextlib.suppress(psutil.Error):
                child.kill()
        return below + left


def rank_pids(scratch: str, ranks: range) -> list[int]:
    """Process ids of those of these ranks that have started."""
    files = [pid_file(scratch, rank) for rank in ranks]
    return [int(text) for f in files if f.exists() and (text := f.read_text())]


def _spawn(spec: TrialSpec) -> dict[int, int]:
    """torch.multiprocessing.spawn, as its documentation shows it, a fresh interpreter per rank;
    exit code of the first that failed."""
    from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

    try:
        spawn(run_spawned, args=(spec, _free_port()), nprocs=spec.processes)
    except (ProcessExitedException, ProcessRaisedException) as error:
        return {error.error_index: getattr(error, "exit_code", 1)}
    return {}


def _run_command(command: list[str], spec: TrialSpec) -> int:
    """Another launcher starts the ranks; what it says goes to rank 0's log.

    Returns its exit code.
    """
    file = Path(spec.scratch) / "spec.pickle"
    file.write_bytes(pickle.dumps(spec))
    place = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "OMP_NUM_THREADS": str(threads_of(spec.cell, spec.cores[0])),
    }
    with open(log_file(spec.scratch, 0), "ab") as log:
        process = subprocess.Popen(
            [*command, "-m", "harness.worker.mpi", str(file)],
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
def _listen(scratch: str, on_progress: Callable[[int, float], None] | None) -> Iterator[str | None]:
    """A socket on which rank 0 tells of its steps; the thread that reads it sleeps in between."""
    if on_progress is None:
        yield None
        return
    address = str(Path(scratch) / "progress")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(address)

        def read() -> None:
            while message := listener.recv(1024):
                if message == b"stop":
                    return
                progress = json.loads(message)
                on_progress(progress["step"], progress["seconds"])

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        try:
            yield address
        finally:
            listener.connect(address)
            listener.send(b"stop")
            thread.join()


@contextlib.contextmanager
def _stopped(stop: threading.Event | None, kill: Callable[[], object]) -> Iterator[None]:
    """Ends the ranks when `stop` is set; again until all is over, because more of them may be about
    to start."""
    if stop is None:
        yield
        return
    over = threading.Event()

    def wait() -> None:
        stop.wait()
        while not over.is_set():
            kill()
            over.wait(0.1)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        stop.set()
        thread.join()


class Deadline:
    """At the time limit: asks each rank for its stacks, then kills them all.

    `waited`: seconds so far that do not count.
    """

    def __init__(
        self,
        scratch: str,
        ranks: range,
        seconds: float,
        kill: Callable[[], object],
        waited: Callable[[], float],
    ) -> None:
        self.scratch, self.ranks, self.seconds, self.kill, self.waited = (
            scratch,
            ranks,
            seconds,
            kill,
            waited,
        )
        self.passed = False
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._wait, daemon=True)

    def __enter__(self) -> Deadline:
        self.began = time.monotonic()
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join()

    def _wait(self) -> None:
        while (left := self.seconds + self.waited() - (time.monotonic() - self.began)) > 0:
            if self.over.wait(left):
                return
        self._strike()

    def _strike(self) -> None:
        self.passed = True
        for pid in rank_pids(self.scratch, self.ranks):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGUSR1)
        time.sleep(0.5)
        self.kill()
