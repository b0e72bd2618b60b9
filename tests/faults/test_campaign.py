"""Fault injection, by default short and with a fixed seed. FAULTS=500 makes it long, with all kinds
of faults. SEED=7 always gives the same faults. KINDS="a run|a disk" selects kinds by their name."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.launch.launcher import Launcher
from tests.faults.campaign import HANG_SECONDS, Campaign, table
from tests.faults.host_kinds import HOST_KINDS, left_out
from tests.faults.kinds import KINDS
from tests.faults.side_kinds import LACKING, PAIRS, SIDE_KINDS

FAULTS = int(os.environ.get("FAULTS", "12"))
SEED = int(os.environ.get("SEED", "20261123"))
LONG = {
    "the fork server is killed",
    "a run is killed",
    "a run is asked to end",
    "a run is suspended",
    "a machine is suspended",
    "two runs write to one folder",
    *HOST_KINDS,
    *SIDE_KINDS,
    *PAIRS,
}
"""Kinds that take ten times as long, since they start separate runs or a new fork server."""
ELSEWHERE = {
    "a rank raises",
    "a rank raises in set-up",
    "a rank is killed",
    "a rank exits",
    "a loss is no number",
    "a rank has no memory",
    "a collective is never entered",
    "a rank leaves a child",
}
"""Kinds that tests/ranks/test_failures.py injects too."""
LEFT_OUT = left_out(list(KINDS), LACKING) if "FAULTS" in os.environ else {}
CHOSEN = [
    kind
    for kind in KINDS
    if re.search(os.environ.get("KINDS", ""), kind)
    and kind not in LEFT_OUT
    and ("FAULTS" in os.environ or kind not in LONG | ELSEWHERE)
]


@pytest.fixture(scope="module")
def temporary() -> Iterator[Path]:
    """A short path, because a socket's path may have at most 107 characters."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder, "tmp")


@pytest.mark.timeout(300 + 20 * FAULTS)
def test_nothing_is_lost_whatever_breaks(
    tmp_path: Path, temporary: Path, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARALLELISM_BENCH_HANG_SECONDS", HANG_SECONDS)
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary.parent))
    campaign = Campaign(tmp_path, temporary, SEED, launcher)
    faults = campaign.order(FAULTS, CHOSEN)
    assert len(set(faults)) == min(FAULTS, len(CHOSEN))
    failed: dict[str, list[str]] = {}
    started = time.monotonic()
    for done, kind in enumerate(faults):
        left = (time.monotonic() - started) * (FAULTS - done) / max(done, 1) / 60
        print(f"{done + 1} of {FAULTS}, {left:.0f} min left: {kind}", file=sys.stderr, flush=True)
        try:
            campaign.strike(kind)
        except Exception as error:  # the others are still injected
            failed.setdefault(kind, []).append(f"{type(error).__name__}: {error}")
            print(f"failed: {failed[kind][-1]}", file=sys.stderr, flush=True)
    print(f"\nseed {SEED}\n\n{table(Counter(faults), failed, campaign.seconds)}")
    for kind, reason in LEFT_OUT.items():
        print(f"left out: {kind}: {reason}")
    assert failed == {}
    campaign.end()
