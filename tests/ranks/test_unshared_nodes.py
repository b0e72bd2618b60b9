"""Two agents that share no cache with the coordinator or each other: they meet by address and key,
and are sent references and data."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import psutil
import pytest

from harness.host.folders import cache_folder
from harness.launch.launcher import Launcher
from harness.nodes.rendezvous import Rendezvous, machine_id, new_key
from tests.cluster.conftest import free_ports
from tests.ranks.conftest import cell
from tests.ranks.test_nodes import Cluster, run_on

UNSHARE = ["unshare", "--mount", "sh", "-c"]

pytestmark = [
    pytest.mark.skipif(os.getuid() != 0, reason="mounts a cache of its own, which only root may"),
    pytest.mark.skipif(
        subprocess.run([*UNSHARE, "mount -t tmpfs none /mnt"], capture_output=True).returncode != 0,
        reason="the system lets nobody mount in a namespace",
    ),
]


def test_nodes_that_share_nothing_train_the_same(launcher: Launcher, tmp_path: Path) -> None:
    cache = cache_folder()
    prefix = [*UNSHARE, 'mount -t tmpfs none "$0" && exec "$@"', str(cache)]
    where = Rendezvous(machine_id(), ("127.0.0.1",), free_ports(1)[0], new_key())
    cluster = Cluster(where, launcher, prefix)
    try:
        cells = [cell("ddp", nodes=2), cell("fsdp2", nodes=2)]
        trials = run_on(cluster, tmp_path, *cells).trials
        kept = {
            number: {
                str(file.relative_to(seen)): file.read_bytes()
                for seen in [Path(f"/proc/{psutil.Process(agent.pid).pid}/root{cache}")]
                for folder in ("references", "data")
                for file in (seen / folder).rglob("*")
                if file.is_file()
            }
            for number, agent in cluster.agents.items()
        }
    finally:
        cluster.close()
    assert trials["reason"].tolist() == ["", ""], trials["log_tail"].tolist()
    assert trials["parity_verdict"].tolist() == ["exact", "exact"]
    assert kept[0] == kept[1]
    assert {Path(name).name for name in kept[0]} >= {"reference.json", "final.safetensors"}
    assert any(name.startswith("data/") for name in kept[0])
    for name, content in kept[0].items():
        assert (cache / name).read_bytes() == content
