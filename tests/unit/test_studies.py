"""Scripts of studies that have no other test."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from docs.studies import exported_scripts, parity_deviations
from tests.commands import needs_horovod

REFERENCE = Path(__file__).parents[2] / "results" / "reference"


def test_deviations_are_compared_with_their_limits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    needs_horovod()
    monkeypatch.setattr(sys, "argv", ["parity_deviations", str(REFERENCE)])
    assert parity_deviations.main() in (0, 1)
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if "|" in line]
    found = {row[1].strip(): row[2:5] for row in rows[2:]}
    assert {"loss", "update", "decay", "moment", "gradient norm"} <= set(found)
    deviation, limit, headroom = map(float, found["loss"])
    assert 0 < deviation < limit
    assert headroom == pytest.approx(limit / deviation, rel=0.1)


def test_each_cell_of_the_exported_scripts_is_in_a_matrix() -> None:
    assert {cell.strategy for cell in exported_scripts.studied()} >= set(exported_scripts.LIBRARIES)
