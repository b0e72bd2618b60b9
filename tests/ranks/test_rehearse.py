"""Rehearsed peaks match those of torch's allocator in real ranks, all from one launch."""

from __future__ import annotations

import pytest

from harness.planner.rehearsal.allocator import measure
from harness.planner.rehearsal.rehearse import rehearse
from tests.ranks.conftest import cell

WITHIN = [
    (cell("ddp", 2, workload="llama-micro"), 0.001),
    (cell("zero_redundancy", 2, workload="llama-micro"), 0.001),
    (cell("fsdp1", 2, workload="llama-micro"), 0.03),
    (cell("fsdp2", 2, workload="llama-micro"), 0.03),
    (cell("tensor", 2, workload="llama-micro"), 0.03),
    (cell("pipeline", 2, workload="llama-micro", micro_batches=4), 0.03),
]
"""Cells, and the largest relative deviation from their measured peaks."""


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
def test_rehearsed_peaks_are_those_of_real_ranks() -> None:
    launched = measure([one for one, _ in WITHIN])
    for (one, deviation), ranks in zip(WITHIN, launched, strict=True):
        rehearsed = rehearse(one).ranks
        for expected, real in zip(rehearsed, ranks, strict=True):
            assert expected.rank == real.rank
            assert expected.peak_bytes == pytest.approx(real.peak_bytes, rel=deviation), one.name
            assert real.largest_peak_bytes >= real.peak_bytes
            assert expected.kept_bytes == pytest.approx(real.kept_bytes, rel=deviation)
