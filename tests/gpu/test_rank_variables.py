"""Environment variables of ranks: NCCL's interface and networks, visible GPUs, mpirun's nodes."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from harness.cell.cell import Cell
from harness.measure.hardware_benchmark import _rank
from harness.strategies._horovod import documented, mpirun
from harness.worker.spec import TrialSpec
from harness.worker.worker import _prepare_process


def variables_after(prepare: Callable[[], object], folder: Path) -> dict[str, str]:
    """Returns the variables for NCCL and CUDA in a child process after `prepare`."""
    child = os.fork()
    if child == 0:
        try:
            for name in [name for name in os.environ if name.startswith("NCCL_")]:
                del os.environ[name]
            prepare()
            found = {n: value for n, value in os.environ.items() if n.startswith(("NCCL_", "CUDA"))}
            (folder / "variables.json").write_text(json.dumps(found))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    variables: dict[str, str] = json.loads((folder / "variables.json").read_text())
    return variables


@pytest.mark.parametrize(("links", "kept"), [("10gbit", True), ("", False)])
def test_ranks_over_an_emulated_link_get_tcp_alone(
    links: str, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Emulated links join network namespaces, which InfiniBand, shared memory and NVLink bypass."""
    axes: dict[str, Any] = {"workload": "llama-micro", "devices": 2, "nodes": 2, "links": links}
    where = {"node": 1, "node_name": "node1", "interface": "link0", "scratch": str(tmp_path)}
    spec = TrialSpec(
        Cell(strategy="ddp", **axes),
        None,  # type: ignore[arg-type]
        2,
        cores=((0,),),
        **where,  # type: ignore[arg-type]
    )
    monkeypatch.setenv("LOCAL_RANK", "0")
    given = variables_after(lambda: _prepare_process(spec, 1), tmp_path)
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

    assert variables_after(measure, tmp_path)["NCCL_SOCKET_IFNAME"] == "=lo"


@pytest.mark.parametrize(("device", "visible"), [("cpu", ""), ("cuda", "0,1")])
def test_ranks_of_cpu_cells_see_no_gpu(
    device: str, visible: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU host, a library that chooses its device would take a GPU for a CPU cell."""
    cell = Cell(strategy="single", workload="llama-nano", device=device)
    spec = TrialSpec(cell, None, 1, scratch=str(tmp_path), cores=((0,),))  # type: ignore[arg-type]
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "0,1"}.items():
        monkeypatch.setenv(name, value)
    found = variables_after(lambda: _prepare_process(spec, 0), tmp_path)
    assert found["CUDA_VISIBLE_DEVICES"] == visible


TWO_NODES = {
    "SLURM_JOB_ID": "77",
    "SLURM_JOBID": "77",
    "SLURM_NODELIST": "nowhere[1-2]",
    "SLURM_JOB_NODELIST": "nowhere[1-2]",
    "SLURM_NNODES": "2",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_TASKS_PER_NODE": "1(x2)",
    "SLURM_JOB_CPUS_PER_NODE": "1(x2)",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
}
"""Environment of a batch step on the first of two nodes, which do not exist."""


@pytest.mark.skipif(not shutil.which("mpirun"), reason="Open MPI is not installed")
def test_mpirun_stays_on_its_node_in_an_allocation_of_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Open MPI reads SLURM's variables by default, and starts ranks on all nodes."""
    for name, value in TWO_NODES.items():
        monkeypatch.setenv(name, value)
    write = "import os, pathlib, socket, sys; rank = os.environ['OMPI_COMM_WORLD_RANK']"
    write += "; pathlib.Path(sys.argv[1], 'host' + rank).write_text(socket.gethostname())"
    command = [*mpirun(documented(3, tuned=False), tmp_path), "-c", write, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    hosts = {file.name: file.read_text() for file in tmp_path.glob("host*")}
    assert hosts == {f"host{rank}": socket.gethostname() for rank in range(3)}
