"""A real SLURM with virtual nodes on this machine's loopback; needs no systemd, munge or root."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.cluster.jobs import JobState, states
from harness.record.plan import kept_plan
from harness.record.store import Results, Store
from harness.run.runner import Runner
from tests.conftest import runs
from tests.waiting import PROMPT, until

NEEDED = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")
ROOT = Path(__file__).parents[2]
MARKER = "BENCH_CLUSTER_MARKER"

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=0,batch_sched_delay=0
ReturnToService=2
KillWait=10
SlurmdTimeout=10
MailProg=/bin/true
JobAcctGatherType=jobacct_gather/none
{lines}
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    lacking = [
        name
        for name in NEEDED
        if shutil.which(name) is None and not Path(f"/usr/sbin/{name}").exists()
    ]
    if lacking:
        why = (
            f"SLURM is missing ({', '.join(lacking)}): install Debian's package slurm-wlm, or"
            " run make test-cluster as root"
        )
        for item in items:
            if "tests/cluster/" in str(item.path) and "slurm" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.skip(reason=why))


class Slurm:
    """The controller and node daemons, and the operations that tests need."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.count = folder, count
        self.names = [f"n{i + 1}" for i in range(count)]
        self.marker = f"{os.getpid()}-{folder.name}"
        host = socket.gethostname().split(".")[0]
        ports = free_ports(count + 1)
        cpus = len(os.sched_getaffinity(0))
        lines = [
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus}"
            " RealMemory=1000"
            for name, port in zip(self.names, ports[1:], strict=True)
        ]
        user = psutil.Process().username()
        text = CONFIGURATION.format(
            host=host, ports=ports, user=user, folder=folder, lines="\n".join(lines)
        )
        (folder / "slurm.conf").write_text(text)
        self.environment = {
            **os.environ,
            "SLURM_CONF": str(folder / "slurm.conf"),
            MARKER: self.marker,
        }
        self.environment["PATH"] += ":/usr/sbin"

    def daemon(self, *words: str) -> None:
        subprocess.run(
            words,
            env=self.environment,
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )

    def start(self) -> None:
        self.daemon("slurmctld", "-c")
        for name in self.names:
            self.daemon("slurmd", "-N", name)
        self.wait_idle()

    def wait_idle(self) -> None:
        until(
            lambda: self.idle() == self.count,
            lambda: f"{self.idle()} nodes idle of {self.count}\n{self.logs()}",
        )

    def idle(self) -> int:
        done = self.call("sinfo", "-h", "-N", "-o", "%t", check=False)
        return done.stdout.split().count("idle")

    def logs(self) -> str:
        return "\n".join(file.read_text()[-1500:] for file in self.folder.glob("*.log"))

    def call(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words, env=self.environment, check=check, capture_output=True, text=True
        )

    def pid(self, daemon: str) -> int:
        return int((self.folder / f"{daemon}.pid").read_text())

    def stop(self) -> None:
        self.call("scancel", "-u", psutil.Process().username(), check=False)
        for daemon in ["slurmctld", *(f"slurmd.{name}" for name in self.names)]:
            with contextlib.suppress(OSError, ValueError, psutil.Error):
                end(self.pid(daemon))
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()

    def processes(self) -> list[psutil.Process]:
        """Returns the processes of jobs, without the daemons.

        The marker in their environment finds them even if they were reparented.
        """
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                daemon = process.name() in ("slurmctld", "slurmd", "slurmstepd")
                if (
                    not daemon
                    and process.environ().get(MARKER) == self.marker
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    found.append(process)
        return found

    def of_kind(self, *words: str) -> list[psutil.Process]:
        """Returns processes of jobs whose command line has all these words."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                line = " ".join(process.cmdline())
                if all(word in line for word in words):
                    found.append(process)
        return found

    def kill_node(self, name: str) -> None:
        """Simulates a power failure: kills a node's daemon, job steps and all their processes."""
        daemon = psutil.Process(self.pid(f"slurmd.{name}"))
        doomed = [daemon]
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if (
                    process.environ().get(MARKER) == self.marker
                    and process.environ().get("SLURMD_NODENAME") == name
                ):
                    doomed.append(process)
                    doomed += [
                        parent for parent in process.parents() if parent.name() == "slurmstepd"
                    ]
        for process in doomed:
            with contextlib.suppress(psutil.Error):
                process.kill()
        until(lambda: not any(map(runs, doomed)))

    def states(self, job: str) -> list[JobState]:
        os.environ["SLURM_CONF"] = self.environment["SLURM_CONF"]
        try:
            return states(job)
        finally:
            del os.environ["SLURM_CONF"]

    def wait_job(self, job: str) -> list[JobState]:
        """Waits until a job and its processes have ended; returns its states."""
        over = (
            "COMPLETED",
            "FAILED",
            "CANCELLED",
            "TIMEOUT",
            "NODE_FAIL",
            "OUT_OF_MEMORY",
            "BOOT_FAIL",
            "DEADLINE",
        )
        until(
            lambda: bool(found := self.states(job)) and all(one.state in over for one in found),
            lambda: self.story(job),
        )
        until(lambda: not self.processes(), lambda: f"left: {self.processes()}", within=PROMPT)
        return self.states(job)

    def story(self, job: str) -> str:
        logs = "\n".join(file.read_text()[-3000:] for file in self.folder.rglob("slurm-*.log"))
        return f"{self.states(job)}\n{logs}\n{self.logs()}"


class Bench:
    """The suite's command line on this SLURM."""

    def __init__(self, slurm: Slurm, folder: Path) -> None:
        self.slurm, self.folder, self.results = slurm, folder, folder / "results"
        self.site = {"exclusive": False, "interface": "lo", "python": sys.executable, "requeues": 8}
        self.environment = {
            **slurm.environment,
            "PARALLELISM_BENCH_CACHE": os.environ["PARALLELISM_BENCH_CACHE"],
        }

    def matrix(self, text: str) -> str:
        file = self.folder / "matrix.yaml"
        file.write_text(text)
        return str(file)

    def call(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "bench", *words, "--results", str(self.results)]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True)
        assert not check or done.returncode == 0, done.stderr
        return done

    def submit(self, *words: str) -> dict[str, Any]:
        """Submits a job; returns the command's JSON, which names its job and run."""
        site = self.folder / "site.yaml"
        site.write_text(json.dumps(self.site))
        told: dict[str, Any] = json.loads(
            self.call("submit", str(site), "--json", "--no-report", *words).stdout
        )
        return told

    def recorded(self, run_id: str) -> int:
        folder = self.results / "trials" / run_id
        return len(list(folder.glob("*.parquet")))

    def load(self, run_id: str) -> Results:
        return Store(self.results).load([run_id])

    def open_trials(self, run_id: str) -> int:
        """Returns the number of trials without a final record; 1 if the run has not begun."""
        store = Store(self.results)
        return (
            len(Runner(store, kept_plan(store, run_id)).open_trials())
            if run_id in store.run_ids()
            else 1
        )

    def log(self, run_id: str) -> str:
        return "\n".join(
            file.read_text() for file in (self.results / "slurm" / run_id).glob("slurm-*.log")
        )


def end(pid: int, how: signal.Signals = signal.SIGTERM) -> None:
    """Signals a daemon to end and waits until it is gone."""
    process = psutil.Process(pid)
    process.send_signal(how)
    until(lambda: not runs(process))


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


def running(folder: Path, count: int) -> Iterator[Slurm]:
    slurm = Slurm(folder, count)
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.stop()


@pytest.fixture(scope="module")
def slurm(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Slurm]:
    """A SLURM with the module's number of nodes, NODES."""
    yield from running(tmp_path_factory.mktemp("slurm"), request.module.NODES)


@pytest.fixture
def bench(slurm: Slurm, tmp_path: Path) -> Bench:
    return Bench(slurm, tmp_path)
