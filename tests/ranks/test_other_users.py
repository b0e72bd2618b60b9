"""Another user of the host reaches no port of a run."""

from __future__ import annotations

import os
import subprocess
import threading
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from harness.host.process import why_not_alone
from harness.launch.launcher import Launcher
from tests.listening import listeners, owned_by
from tests.ranks.conftest import RunCells, cell

NOBODY = 65534
pytestmark = [
    pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user"),
    pytest.mark.skipif(bool(why_not_alone()), reason=why_not_alone()),
]
TRY = """
import socket, sys
reached = []
for port in map(int, sys.stdin.read().split()):
    for address in ("127.0.0.1", "::1"):
        try:
            socket.create_connection((address, port), timeout=5).close()
            reached.append(port)
        except OSError:
            pass
print(*reached)
"""


def reached_by_nobody(ports: set[int]) -> list[str]:
    """Returns the ports of this host's loopback to which user `nobody` can connect."""
    done = subprocess.run(
        ["/usr/bin/env", "python3", "-c", TRY],
        input=" ".join(map(str, ports)),
        capture_output=True,
        text=True,
        check=True,
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        cwd="/",
    )
    return done.stdout.split()


def ports(process: int) -> set[int]:
    """Returns all ports of a process's network on which somebody listens."""
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process}/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                found.add(int(fields[1].rpartition(":")[2], 16))
    return found


KINDS = {
    "store and gloo": ("ddp", {}, ""),
    "spawn's store": ("ddp", {"launcher": "spawn"}, ""),
    "RPC": ("parameter_server", {}, ""),
    "Horovod's server": ("horovod", {}, "horovod"),
    "torchft": ("diloco", {}, "torchft"),
    "accelerate launch": ("accelerate", {"options": {"config_file": True}}, "accelerate"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_another_user_reaches_no_port(kind: str, run_cells: RunCells, launcher: Launcher) -> None:
    """The ranks' ports exist only in their own network, and this host's has none of the run's."""
    strategy, axes, package = KINDS[kind]
    if package and not find_spec(package):
        pytest.skip(f"{package} is missing")
    inside: set[int] = set()
    outside: set[str] = set()
    over = threading.Event()
    host = os.readlink("/proc/self/ns/net")

    def look() -> None:
        while not over.wait(0.02):
            below = psutil.Process().children(recursive=True)
            outside.update(owned_by([psutil.Process(), *below]) & listeners().keys() - before)
            for process in below:
                try:
                    if os.readlink(f"/proc/{process.pid}/ns/net") != host:
                        inside.update(ports(process.pid))
                except OSError:
                    continue

    before = set(listeners())
    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    try:
        trial = run_cells(cell(strategy, **axes)).trials.iloc[0]
    finally:
        over.set()
        looking.join()
    assert trial["status"] == "ok", trial["log_tail"]
    assert inside, "without listening ranks this proves nothing"
    assert outside == set()
    assert reached_by_nobody(inside - ports(os.getpid())) == []
