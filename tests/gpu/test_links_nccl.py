"""NCCL cannot bypass emulated links, and listens on one interface."""

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from harness.cell.cell import Cell
from harness.measure.hardware_benchmark import _rank
from harness.worker.spec import TrialSpec
from harness.worker.worker import _prepare_process


@pytest.mark.parametrize(("links", "kept"), [("10gbit", True), ("", False)])
def test_ranks_over_an_emulated_link_get_tcp_alone(
    links: str, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Emulated links join network namespaces, which InfiniBand, shared memory and NVLink bypass."""
    axes: dict[str, Any] = {
        "strategy": "ddp",
        "workload": "llama-micro",
        "devices": 2,
        "nodes": 2,
        "links": links,
    }
    spec = TrialSpec(
        Cell(**axes),
        None,  # type: ignore[arg-type]
        2,
        node=1,
        node_name="node1",
        interface="link0",
        scratch=str(tmp_path),
        cores=((0,),),
    )
    monkeypatch.setenv("LOCAL_RANK", "0")
    given = _variables_after(lambda: _prepare_process(spec, 1), tmp_path)
    assert given["NCCL_SOCKET_IFNAME"] == "=link0", "NCCL would also take link01"
    assert (given.get("NCCL_NET"), given.get("NCCL_IB_DISABLE")) == (
        ("Socket", "1") if kept else (None, None)
    )
    assert given.get("NCCL_HOSTID") == ("node1" if kept else None), (
        "ranks on one machine count as two hosts"
    )
    assert given.get("NCCL_MNNVL_ENABLE") == ("0" if kept else None)
    assert "NCCL_P2P_DISABLE" not in given, "within a node NCCL communicates as on a real one"


def test_a_measurement_between_gpus_listens_on_loopback_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the variable, NCCL listens on the host's first other interface."""
    monkeypatch.delattr(dist, "init_process_group")

    def measure() -> None:
        with contextlib.suppress(AttributeError, AssertionError, RuntimeError):  # needs a GPU
            _rank(0, "nccl", str(tmp_path))

    assert _variables_after(measure, tmp_path) == {"NCCL_SOCKET_IFNAME": "=lo"}


def _variables_after(prepare: Callable[[], object], folder: Path) -> dict[str, str]:
    """Returns NCCL's variables in a child process after `prepare`."""
    child = os.fork()
    if child == 0:
        try:
            for name in [name for name in os.environ if name.startswith("NCCL_")]:
                del os.environ[name]
            prepare()
            found = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
            (folder / "variables.json").write_text(json.dumps(found))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    variables: dict[str, str] = json.loads((folder / "variables.json").read_text())
    return variables
