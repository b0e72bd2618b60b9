"""Training continues unchanged from every library's checkpoints, and damage is detected."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from harness.cell.cell import Cell
from harness.host.folders import scratch_folder
from harness.launch.launcher import Launcher
from harness.launch.outcome import Outcome
from harness.record.checkpoint import NAME, Manifest
from harness.record.plan import Plan
from harness.record.store import Store
from harness.run.runner import ProgressListener, Runner
from harness.worker.spec import Checkpointing
from tests.ranks.conftest import Row, RunCells, cell, check_rows, representative

STEP = 4
"""Step of the checkpoint, half of the parity segment."""


def restarted(strategy: str, checkpoint: str = "sharded", **axes: Any) -> Cell:
    return cell(strategy, checkpoint=checkpoint, **axes)


RESTARTED = [
    restarted("fsdp2", "async"),
    restarted("pipeline", micro_batches=2),
    restarted("deepspeed", options={"stage": 3}),
    restarted("trainer", "full"),
    restarted("fsdp2", devices=4, checkpoint_from="fsdp2 x2"),
    restarted("ddp", micro_batches=2, checkpoint_from="pipeline x2"),
]
MORE = [
    restarted("single", "full", devices=1),
    restarted("ddp", "full"),
    restarted("fsdp1", "full"),
    restarted("tensor"),
    restarted("zero_redundancy", "full"),
    restarted("accelerate", "full"),
    restarted("horovod", "full"),
    restarted("fairscale_oss", "full"),
    restarted("fairscale_on_cpu"),
    restarted("fsdp2", devices=1, checkpoint_from="fsdp2 x2"),
    restarted("single", "full", devices=1, checkpoint_from="fsdp2 x2"),
]


@pytest.mark.parametrize("cells", representative([RESTARTED, MORE]), ids=["some", "more"])
def test_the_training_goes_on_as_if_it_was_never_killed(
    run_cells: RunCells, cells: list[Cell]
) -> None:
    found = check_rows(run_cells, [Row("exact", one, "") for one in cells])
    trials = pd.DataFrame(found)
    assert set(trials["checkpoint_step"]) == {STEP}
    assert (trials["checkpoint_bytes"] > 0).all()
    assert (trials["startup_seconds"] < trials["wall_seconds"] / 2).all(), "that of one launch"
    assert (trials["checkpoint_save_seconds"] >= trials["checkpoint_blocked_seconds"]).all()
    timed = trials[trials["strategy"] != "trainer"]
    assert (timed["checkpoint_load_seconds"] > 0).all()
    same_ranks = trials[trials["checkpoint_from"].isna()]
    assert (same_ranks["checkpoint_restores_bits"] == True).all()  # noqa: E712
    assert trials[trials["checkpoint_from"].notna()]["checkpoint_restores_bits"].isna().any()


class Tampering:
    """A launcher that damages checkpoints once they are saved."""

    def __init__(self, launcher: Launcher, damage: Callable[[Path, Path], None]) -> None:
        self.launcher, self.damage = launcher, damage

    def run(self, *args: Any, checkpoint: Checkpointing | None = None, **more: Any) -> Outcome:
        outcome = self.launcher.run(*args, checkpoint=checkpoint, **more)
        if checkpoint and not checkpoint.loads:
            with scratch_folder() as other:
                later = dataclasses.replace(checkpoint, folder=str(other), step=STEP + 1)
                self.launcher.run(*args, checkpoint=later, **more)
                self.damage(Path(checkpoint.folder), other)
        return outcome

    def ignore_pid(self, pid: int) -> None: ...


def truncated(folder: Path, later: Path) -> None:
    file = max(folder.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-100])


def missing_shard(folder: Path, later: Path) -> None:
    max(folder.glob("*.distcp")).unlink()


def mixed_steps(folder: Path, later: Path) -> None:
    """Replaces one shard by a later step's; torch stored the step number in the other shard."""
    shard = min(folder.glob("*.distcp"))
    shutil.copy(later / shard.name, shard)


def no_manifest(folder: Path, later: Path) -> None:
    (folder / NAME).unlink()


def other_step(folder: Path, later: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(later, folder)


DAMAGES = [no_manifest, mixed_steps, truncated, missing_shard, other_step]


def damaged(launcher: Launcher, results: Path, damage: Callable[[Path, Path], None]) -> Any:
    store = Store(results)
    plan = Plan.new("test", [restarted("fsdp2")], 1, [])
    plan = dataclasses.replace(plan, timed_seconds=0.0)
    tampering = Tampering(launcher, damage)
    runner = Runner(store, plan, launcher=lambda packages: tampering)  # type: ignore[arg-type]
    runner.begin()
    assert runner.run(ProgressListener())
    (trial,) = store.load([plan.run_id]).trials.to_dict("records")
    return trial


@pytest.mark.parametrize("damage", representative(DAMAGES))
def test_a_damaged_checkpoint_is_not_loaded(
    launcher: Launcher, tmp_path: Path, damage: Callable[[Path, Path], None]
) -> None:
    trial = damaged(launcher, tmp_path, damage)
    assert trial["status"] == "failed"
    assert (
        trial["checkpoint_load_seconds"] is None
        or trial["checkpoint_load_seconds"] != (trial["checkpoint_load_seconds"])
    )


@pytest.mark.parametrize("damage", representative([mixed_steps, truncated, missing_shard]))
def test_without_the_manifest_parity_sees_what_the_library_does_not(
    launcher: Launcher,
    tmp_path: Path,
    damage: Callable[[Path, Path], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Manifest, "verified", classmethod(lambda cls, _: cls(STEP, 2, ())))
    trial = damaged(launcher, tmp_path, damage)
    assert trial["status"] == {"mixed_steps": "diverged"}.get(damage.__name__, "failed")
