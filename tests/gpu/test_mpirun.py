"""In an allocation of several nodes, mpirun keeps a trial on its own node."""

import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from harness.strategies._horovod import mpirun

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
    command = [*mpirun(3, tmp_path, over_tcp=False), "-c", write, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    hosts = {file.name: file.read_text() for file in tmp_path.glob("host*")}
    assert hosts == {f"host{rank}": socket.gethostname() for rank in range(3)}
