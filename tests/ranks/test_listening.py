"""A local run listens on loopback only, with every launcher and backend.

Horovod's ranks under mpirun are tested in test_horovod.py.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.listening import watched
from tests.ranks.conftest import RunCells, cell

needs_horovod = pytest.mark.skipif(not find_spec("horovod"), reason="Horovod is missing")
needs_accelerate = pytest.mark.skipif(not find_spec("accelerate"), reason="Accelerate is missing")


@pytest.mark.parametrize(
    ("strategy", "axes"),
    [
        ("ddp", {}),
        ("ddp", {"launcher": "spawn"}),
        pytest.param("horovod", {}, marks=needs_horovod),
        ("parameter_server", {}),
        pytest.param("accelerate", {"options": {"config_file": True}}, marks=needs_accelerate),
    ],
    ids=["elastic", "spawn", "Horovod", "RPC", "accelerate launch"],
)
def test_a_local_trial_listens_on_loopback_alone(
    run_cells: RunCells, strategy: str, axes: dict[str, object]
) -> None:
    """Only this test trains matrix full's cells of the two launchers that start new
    interpreters."""
    with watched() as seen:
        trial = run_cells(cell(strategy, time_limit_seconds=120, **axes)).trials.iloc[0]
    assert (trial["status"], trial["parity_verdict"]) == ("ok", "exact"), trial["log_tail"]
    assert seen.inside, "without listening ranks this proves nothing"
    assert seen.outside == []
