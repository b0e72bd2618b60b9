"""A rank started by an external launcher: `mpirun ... python -m harness.worker.mpi SPEC`."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from harness.host.tcp_store import CLIENT, LOOPBACK, open_store
from harness.worker.rank_answer import answer_file
from harness.worker.spec import TrialSpec
from harness.worker.worker import run_rank

_MPI = {
    "RANK": "RANK",
    "WORLD_SIZE": "SIZE",
    "LOCAL_RANK": "LOCAL_RANK",
    "LOCAL_WORLD_SIZE": "LOCAL_SIZE",
}
_OPEN_STORES: list[object] = []


def main(spec_file: str) -> None:
    spec = TrialSpec.from_json(Path(spec_file).read_text())
    for name, of_mpi in _MPI.items():
        if name not in os.environ:
            os.environ[name] = os.environ[f"OMPI_COMM_WORLD_{of_mpi}"]
    if CLIENT.keys() - os.environ.keys():  # no store is open
        if os.environ["RANK"] == "0":
            _OPEN_STORES.append(open_store(LOOPBACK, int(os.environ["MASTER_PORT"])))
        os.environ |= CLIENT
    run_rank(spec)
    # mpirun kills all ranks when one exits without MPI_Finalize, so each waits for all answers.
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and not all(
        answer_file(spec.scratch, rank).exists() for rank in range(spec.processes)
    ):
        time.sleep(0.01)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
