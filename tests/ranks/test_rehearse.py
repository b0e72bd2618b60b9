"""Rehearsed peaks match those that torch's memory tracker sees in real ranks."""

from __future__ import annotations

import pytest

from harness.cell.cell import Cell
from harness.launch.launcher import Launcher
from harness.planner.rehearsal.rehearse import rehearse
from harness.run.profile import profile_cell
from tests.ranks.conftest import cell

WITHIN = [
    cell("ddp", 2, workload="llama-micro"),
    cell("zero_redundancy", 2, workload="llama-micro"),
    cell("fsdp1", 2, workload="llama-micro"),
    cell("fsdp2", 2, workload="llama-micro"),
    cell("tensor", 2, workload="llama-micro"),
    cell("pipeline", 2, workload="llama-micro", micro_batches=4),
]


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("one", WITHIN, ids=lambda one: one.strategy)
def test_rehearsed_peaks_are_those_of_real_ranks(launcher: Launcher, one: Cell) -> None:
    row = profile_cell(launcher, "run", one)
    assert row.status == "ok", row.reason
    for expected in rehearse(one).ranks:
        measured = row.peak_tracked_bytes[expected.rank]
        assert expected.peak_bytes == pytest.approx(measured, rel=0.05)
