"""A local run listens on loopback alone, whoever starts its ranks and by whatever they talk."""

from __future__ import annotations

import shutil
from importlib.util import find_spec

import pytest

from harness.launch.launcher import Launcher
from harness.strategies._horovod import built
from harness.strategy.registry import make_strategy, validate
from harness.workloads import make_workload, prepare_data
from tests.listening import watched
from tests.ranks.conftest import cell

needs_horovod = pytest.mark.skipif(not find_spec("horovod"), reason="Horovod is missing")
needs_mpi = pytest.mark.skipif(
    not (built(b"MPIController") and shutil.which("mpirun")), reason="Horovod without MPI"
)
needs_accelerate = pytest.mark.skipif(not find_spec("accelerate"), reason="Accelerate is missing")


@pytest.mark.parametrize(
    ("strategy", "axes"),
    [
        ("ddp", {}),
        ("ddp", {"launcher": "spawn"}),
        pytest.param("horovod", {}, marks=needs_horovod),
        pytest.param(
            "horovod", {"options": {"controller": "mpi", "transport": "tcp"}}, marks=needs_mpi
        ),
        ("parameter_server", {}),
        pytest.param("accelerate", {"options": {"config_file": True}}, marks=needs_accelerate),
    ],
    ids=["elastic", "spawn", "Horovod", "MPI", "RPC", "accelerate launch"],
)
def test_a_local_trial_listens_on_loopback_alone(
    launcher: Launcher, strategy: str, axes: dict[str, object]
) -> None:
    asked = cell(strategy, timed_steps=2, warmup_steps=1, parity_steps=1, **axes)
    workload = make_workload(asked.workload)
    _, layout = validate(asked, workload)
    data = prepare_data(asked.data, workload, asked.sequence_length)
    with watched() as seen:
        outcome = launcher.run(
            asked,
            data,
            layout.processes,
            command=lambda scratch: make_strategy(asked).command(asked, scratch),
        )
    assert (outcome.status, outcome.reason) == ("ok", ""), outcome.log_tail
    assert seen.inside, "ranks that never meet prove nothing"
    assert seen.outside == []
