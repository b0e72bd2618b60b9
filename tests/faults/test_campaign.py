"""A short campaign with a fixed seed; `make campaign` is the long one."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.launch.launcher import Launcher
from tests.faults.campaign import HANG_SECONDS, Campaign
from tests.faults.kinds import KINDS

FAULTS = 20
LONG = {"a run is asked to end", "a run is suspended", "two runs write to one folder"}
"""Kinds that take runs as processes of their own: one of them is enough here."""


@pytest.fixture(scope="module")
def temporary() -> Iterator[Path]:
    """A short path: that of a socket in it may have 107 characters."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder, "tmp")


@pytest.mark.timeout(300)
def test_nothing_is_lost_whatever_breaks(
    tmp_path: Path, temporary: Path, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARALLELISM_BENCH_HANG_SECONDS", HANG_SECONDS)
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary.parent))
    campaign = Campaign(tmp_path, temporary, seed=20261123, launcher=launcher)
    kinds = [kind for kind in KINDS if kind not in LONG]
    faults = campaign.order(FAULTS, kinds)
    assert len(set(faults)) == FAULTS
    for kind in faults:
        campaign.strike(kind)
    campaign.end()
