"""A local run listens on loopback only, with every launcher and backend.

Horovod's ranks under mpirun are tested in test_horovod.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from harness.host.process import OPEN_NETWORK, why_not_alone
from harness.record.store import Store
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
        trial = run_cells(cell(strategy, **axes)).trials.iloc[0]
    assert (trial["status"], trial["parity_verdict"]) == ("ok", "exact"), trial["log_tail"]
    assert seen.inside, "without listening ranks this proves nothing"
    assert seen.outside == []


@pytest.mark.skipif(bool(why_not_alone()), reason=why_not_alone())
@pytest.mark.parametrize("launcher", ["elastic", "spawn"])
def test_the_reason_says_that_no_port_is_free(launcher: str, tmp_path: Path) -> None:
    (tmp_path / "m.yaml").write_text(
        "defaults: {workload: llama-nano, sequence_length: 32, batch: 8, devices: 2}\n"
        f"cells: [{{strategy: ddp, launcher: {launcher}}}]\n"
    )
    command = [sys.executable, "-m", "bench", "run", "--matrix", "m.yaml", "--no-report"]
    subprocess.run(
        [sys.executable, "-m", "tests.faults.no_ports", *command, "--trials", "1"],
        cwd=tmp_path,
        env={**os.environ, OPEN_NETWORK: "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        check=False,
    )
    trial = Store(tmp_path / "results").load(steps=False).trials.iloc[0]
    assert trial["status"] == "failed"
    assert "in use" in trial["reason"]
