"""Training with blocks compiled by torch.compile is exact; compiling precedes the timed steps."""

from __future__ import annotations

import pytest

from harness.host.environment import missing_compiler
from tests.ranks.conftest import RunCells, cell

with_compiler = pytest.mark.skipif(bool(missing_compiler()), reason=missing_compiler())


@with_compiler
def test_compiled_training_is_exact_and_compile_time_separate(run_cells: RunCells) -> None:
    small = {"workload": "llama-nano", "global_batch": 2, "sequence_length": 16}
    one = cell("single", 1, compile="block", **small)
    trial = run_cells(one).trials.iloc[0]
    assert (trial["status"], trial["parity_verdict"]) == ("ok", "exact"), trial["reason"]
    assert trial["label"] == "single(compile=block)"
    assert 0 < trial["compile_seconds"] < trial["first_step_seconds"]
    assert trial["step_seconds_p95"] < trial["compile_seconds"]
