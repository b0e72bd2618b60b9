"""Two agents with their own file systems, networks and host names.

They connect by address and key, and are sent references and data.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.host.folders import cache_folder
from harness.host.process import machine_id
from harness.launch.launcher import Launcher
from harness.nodes.rendezvous import Rendezvous, new_key
from tests.cluster.conftest import free_ports
from tests.ranks.conftest import cell
from tests.ranks.test_nodes import Cluster, run_on

UNSHARE = ["unshare", "--mount", "--uts", "sh", "-ec"]
CELLS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp2": {},
    "pipeline": {"micro_batches": 2},
    "deepspeed": {"options": {"stage": 3}},
}
ENTER = """
mount -t tmpfs none "$0"
mount --bind "$1" /etc/hosts
hostname "$2"
shift 2
exec "$@"
"""
"""Shell script for the cache folder, a file for /etc/hosts, the host name and the agent's
command."""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Switch:
    """A bridge in this network namespace, and two other namespaces with an interface on it."""

    def __init__(self, number: int) -> None:
        self.bridge, self.subnet = f"pb{number}", f"10.98.{number}"
        self.names = [f"{self.bridge}n{node}" for node in range(2)]
        ip("link", "add", self.bridge, "type", "bridge")
        try:
            ip("addr", "add", f"{self.subnet}.254/24", "dev", self.bridge)
            ip("link", "set", self.bridge, "up")
            for node, name in enumerate(self.names):
                self._add(name, f"{self.subnet}.{node + 1}")
        except subprocess.CalledProcessError:
            self.close()
            raise

    def _add(self, name: str, address: str) -> None:
        ip("netns", "add", name)
        ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("link", "set", name, "master", self.bridge, "up")
        for words in (
            ("link", "set", "lo", "up"),
            ("addr", "add", f"{address}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
        ):
            ip("-n", name, *words)

    def close(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "link", "del", name], capture_output=True)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        subprocess.run(["ip", "link", "del", self.bridge], capture_output=True)


def unavailable() -> str:
    """Returns why the test cannot run here, or an empty string if it can."""
    if os.getuid() != 0:
        return "only root may make mount and network namespaces"
    if subprocess.run([*UNSHARE, "mount -t tmpfs none /mnt"], capture_output=True).returncode:
        return "the system allows no mounts in namespaces"
    try:
        Switch(os.getpid() % 250).close()
    except (OSError, subprocess.CalledProcessError) as error:
        return f"network namespaces cannot be made here: {getattr(error, 'stderr', error)}"
    return ""


@pytest.fixture
def switch() -> Iterator[Switch]:
    if reason := unavailable():
        pytest.skip(reason)
    with contextlib.closing(Switch(os.getpid() % 250)) as made:
        yield made


def kept_files(agent: int) -> dict[str, bytes]:
    """Returns references and data in the cache that an agent sees."""
    cache = Path(f"/proc/{psutil.Process(agent).pid}/root{cache_folder()}")
    files = [file for part in ("references", "data") for file in (cache / part).rglob("*")]
    return {str(file.relative_to(cache)): file.read_bytes() for file in files if file.is_file()}


@pytest.mark.thorough
@pytest.mark.timeout(1800)
def test_nodes_that_share_nothing_train_the_same(
    launcher: Launcher, switch: Switch, tmp_path: Path
) -> None:
    cache, head = cache_folder(), f"{switch.subnet}.254"

    def enter(number: int) -> list[str]:
        hosts = tmp_path / f"hosts{number}"
        entry = f"{switch.subnet}.{number + 1} n{number + 1}"
        hosts.write_text(f"127.0.0.1 localhost\n{entry}\n")
        shell = [*UNSHARE, ENTER, str(cache), str(hosts), f"n{number + 1}"]
        return ["ip", "netns", "exec", switch.names[number], *shell]

    where = Rendezvous(machine_id(), (head,), free_ports(1)[0], new_key())
    cluster = Cluster(where, launcher, enter, interface="")
    try:
        cells = [cell(strategy, nodes=2, **axes) for strategy, axes in CELLS.items()]
        trials = run_on(cluster, tmp_path, *cells).trials
        cached = {number: kept_files(agent.pid) for number, agent in cluster.agents.items()}
    finally:
        cluster.close()
    assert trials["reason"].tolist() == [""] * len(CELLS), trials["log_tail"].tolist()
    assert trials["parity_verdict"].tolist() == ["exact"] * len(CELLS)
    for facts in map(json.loads, trials["node_facts"]):
        assert [node["interface"] for node in facts] == ["eth0", "eth0"]
        assert [node["host"] for node in facts] == ["n1", "n2"]
        assert [node["address"] for node in facts] == [f"{switch.subnet}.{n}" for n in (1, 2)]
    assert cached[0] == cached[1]
    assert {Path(name).name for name in cached[0]} >= {"reference.json", "final.safetensors"}
    assert any(name.startswith("data/") for name in cached[0])
    for name, content in cached[0].items():
        assert (cache / name).read_bytes() == content
