from __future__ import annotations

import contextlib
import multiprocessing
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, MutableSequence, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness.cell.cell import Cell
from harness.host.folders import scratch_folder
from harness.host.process import (
    caller_not_imported,
    die_with_parent,
    starting_without_stops,
    take_stops,
)
from harness.launch.launcher import Launcher, LauncherProtocol, LaunchOptions
from harness.launch.outcome import Outcome
from harness.workloads import DataSource


@dataclass(frozen=True)
class Launch:
    """Arguments of Launcher.run."""

    cell: Cell
    data: DataSource
    processes: int
    more: LaunchOptions = field(default_factory=LaunchOptions)

    def run(
        self, launcher: LauncherProtocol, on_progress: Callable[[int, float], None] | None
    ) -> Outcome:
        return launcher.run(
            self.cell, self.data, self.processes, on_progress=on_progress, **self.more
        )


class InterleavedLauncher:
    """Interleaves trials, each in a process with a warm launcher, under equal conditions."""

    def __init__(self, packages: Sequence[str], count: int) -> None:
        self.packages = list(packages)
        self._processes = [_LauncherProcess(self.packages) for _ in range(count)]
        for process in self._processes:
            process.ready()

    @property
    def pids(self) -> list[int]:
        """Process ids that other launchers of this process must not end."""
        return [process.ready() for process in self._processes]

    def together(
        self,
        launches: Sequence[Launch],
        on_progress: Callable[[int, float], None] | None = None,
    ) -> list[Outcome]:
        """Runs all trials interleaved; a first turn includes start, setup and warm-up. During a
        turn, the ranks of the other trials are stopped. Only its own turns count in a trial's
        times. KeyboardInterrupt makes all trials `interrupted`, since only the whole set is
        comparable."""
        with scratch_folder() as folder:
            return self._together(folder, launches, on_progress)

    def _together(
        self,
        folder: Path,
        launches: Sequence[Launch],
        on_progress: Callable[[int, float], None] | None,
    ) -> list[Outcome]:
        slots: list[_Slot] = []
        try:
            for number, launch in enumerate(launches):
                process = self._processes[number] = self._processes[number].alive()
                slots.append(_Slot(process, launch, folder / str(number), on_progress))
            while any(not slot.over for slot in slots):
                for slot in slots:
                    if not slot.over:
                        slot.take_turn()
            return [slot.outcome() for slot in slots]
        except BaseException as error:  # or ranks would wait for a turn forever
            for slot in slots:
                slot.interrupt()
            outcomes = [slot.outcome() for slot in slots]
            if not isinstance(error, KeyboardInterrupt):
                raise
            return [
                replace(outcome, status="interrupted", reason="stopped by the user")
                for outcome in outcomes
            ]
        finally:
            for slot in slots:
                slot.close()

    def close(self) -> None:
        for process in self._processes:
            process.close()


class _LauncherProcess:
    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = packages
        context = multiprocessing.get_context("spawn")
        self.waited: MutableSequence[float] = context.Array("d", 2, lock=False)
        """Seconds waited for turns, and the start of the current wait (0 if it does not wait)."""
        self.pool = ProcessPoolExecutor(1, context, _begin, (packages, self.waited))
        with caller_not_imported(), starting_without_stops():
            self._pid = self.pool.submit(_warm)

    def ready(self) -> int:
        return self._pid.result()

    def alive(self) -> _LauncherProcess:
        try:
            self.pool.submit(os.getpid).result()
        except BrokenProcessPool:
            self.close()
            return _LauncherProcess(self.packages)
        return self

    def start(self, launch: Launch, address: Path) -> Future[Outcome]:
        more: LaunchOptions = {**launch.more, "turns": str(address)}
        try:
            return self.pool.submit(_launch, launch.cell, launch.data, launch.processes, more)
        except BrokenProcessPool as error:
            lost: Future[Outcome] = Future()
            lost.set_exception(error)
            return lost

    def close(self) -> None:
        self.pool.shutdown()


class _Slot:
    def __init__(
        self,
        process: _LauncherProcess,
        launch: Launch,
        address: Path,
        on_progress: Callable[[int, float], None] | None,
    ) -> None:
        self.process, self.launch, self.address = process, launch, address
        self.on_progress = on_progress
        self.future: Future[Outcome] | None = None
        self.stopped: dict[socket.socket, int] = {}
        self.selector = selectors.DefaultSelector()
        self.ended, self._end = socket.socketpair()
        self.selector.register(self.ended, selectors.EVENT_READ)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(str(address))
        self.listener.listen()
        self.selector.register(self.listener, selectors.EVENT_READ)
        process.waited[:] = [0.0, 0.0]

    @property
    def over(self) -> bool:
        return self.future is not None and self.future.done()

    def take_turn(self) -> None:
        """Lets the ranks run until all wait or the trial ends, then stops them."""
        if self.future is None:
            self.future = self.process.start(self.launch, self.address)
            self.future.add_done_callback(self._wake)
        else:
            total, since = self.process.waited
            self.process.waited[:] = [total + time.monotonic() - since, 0.0]
        going, self.stopped = self.stopped, {}
        for line, pid in going.items():
            _signal(pid, signal.SIGCONT)
            with contextlib.suppress(OSError):
                line.send(b"go")
        while not self.over and len(self.stopped) < self.launch.processes:
            for key, _ in self.selector.select():
                assert isinstance(key.fileobj, socket.socket)
                self._receive(key.fileobj)
        for pid in self.stopped.values():
            _signal(pid, signal.SIGSTOP)
        self.process.waited[1] = time.monotonic()

    def _wake(self, _: Future[Outcome]) -> None:
        with contextlib.suppress(OSError):  # closed: the waiting thread has already seen the end
            self._end.send(b".")

    def _receive(self, line: socket.socket) -> None:
        if line is self.listener:
            self.selector.register(line.accept()[0], selectors.EVENT_READ)
        elif line is not self.ended:
            try:
                message = line.recv(256).split()
            except OSError:
                message = []
            if not message:  # the rank is gone
                self.stopped.pop(line, None)
                self.selector.unregister(line)
                line.close()
                return
            self.stopped[line] = int(message[0])
            if self.on_progress:
                self.on_progress(int(message[1]), float(message[2]))

    def interrupt(self) -> None:
        if self.future and not self.future.cancel() and not self.over:
            _signal(self.process.ready(), signal.SIGINT)

    def outcome(self) -> Outcome:
        if self.future is None or self.future.cancelled():
            return Outcome("interrupted", "", time.time(), 0.0)
        try:
            outcome = self.future.result()
        except BrokenProcessPool:
            reason = "the process that launched its ranks was killed from outside the suite"
            return Outcome("failed", reason, time.time(), 0.0)
        return replace(outcome, wall_seconds=outcome.wall_seconds - self.process.waited[0])

    def close(self) -> None:
        for key in list(self.selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self.selector.close()
        self.listener.close()
        self._end.close()


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


class _ProcessState:
    """State that a `_LauncherProcess` keeps between trials."""

    launcher: Launcher
    waited: MutableSequence[float]


def _begin(packages: Sequence[str], waited: MutableSequence[float]) -> None:
    die_with_parent()
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    take_stops()
    _ProcessState.launcher, _ProcessState.waited = Launcher(packages), waited


def _warm() -> int:
    """Waits for the fork server's imports, which would slow training ranks."""
    first = multiprocessing.get_context("forkserver").Process()
    first.start()
    first.join()
    return os.getpid()


def _waited() -> float:
    total, since = _ProcessState.waited
    return float(total + (time.monotonic() - since if since else 0.0))


def _launch(cell: Cell, data: DataSource, processes: int, more: LaunchOptions) -> Outcome:
    return _ProcessState.launcher.run(cell, data, processes, waited=_waited, **more)
