"""An exported script that is killed and resumed continues as if it had never stopped."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from harness.analysis.consistency import loss_deviations
from harness.export import export_files, write_files
from harness.launch.launcher import Launcher
from tests.ranks.conftest import cell, representative
from tests.ranks.test_export import by_warm_ranks

SAVED_AFTER, KILLED_AFTER, STEPS = 3, 5, 6
"""Step counts; steps between the first two are trained before the kill and again after resuming."""


def losses(said: str) -> dict[int, float]:
    rows = [json.loads(line) for line in said.splitlines() if line.startswith('{"step"')]
    return {row["step"]: row["loss"] for row in rows}


def run(
    folder: Path, to: str, name: str, *words: str, killed_after: int | None = None
) -> dict[int, float]:
    place = folder.parent / name
    place.mkdir()
    copy = place / "set"
    copy.symlink_to(folder)
    return losses(by_warm_ranks(copy, to, *words, killed_after=killed_after))


@pytest.mark.parametrize(
    ("strategy", "to", "axes"),
    representative(
        [
            ("fsdp2", "torchrun", {}),
            ("deepspeed", "deepspeed", {"options": {"stage": 3}}),
            ("single", "torchrun", {"devices": 1}),
            ("ddp", "torchrun", {}),
            ("fsdp1", "torchrun", {}),
        ]
    ),
)
def test_a_killed_script_resumes(
    launcher: Launcher, tmp_path: Path, strategy: str, to: str, axes: dict[str, Any]
) -> None:
    """The `launcher` fixture is used because its fork server has imported the ranks' libraries."""
    if strategy == "deepspeed" and find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed: make setup")
    folder, saved = tmp_path / "set", tmp_path / "saved"
    write_files(export_files(cell(strategy, **axes), to)[0], folder)
    steps = ("--steps", str(STEPS))
    save = ("--save", str(saved), "--save-every", str(SAVED_AFTER))
    before = run(folder, to, "before", *steps, *save, killed_after=KILLED_AFTER)
    assert sorted(before) == list(range(KILLED_AFTER))
    assert [path.name for path in saved.iterdir()] == [f"step-{SAVED_AFTER}"]
    after = run(folder, to, "after", *steps, "--resume", str(saved))
    assert sorted(after) == list(range(SAVED_AFTER, STEPS))
    twice = range(SAVED_AFTER, KILLED_AFTER)
    gaps = loss_deviations([after[step] for step in twice], [before[step] for step in twice])
    assert max(gaps) < 1e-6
