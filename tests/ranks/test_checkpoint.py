"""Training continues unchanged from every library's checkpoints, and damage is detected."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from harness.cell.cell import Cell
from harness.host.folders import scratch_folder
from harness.launch.launcher import Launcher
from harness.launch.outcome import Outcome
from harness.record.checkpoint import NAME, Manifest
from harness.record.plan import Plan
from harness.record.store import Store
from harness.run.runner import Runner, SilentListener
from harness.worker.spec import Checkpointing
from tests.ranks.conftest import RunCells, cell

STEP = 4
"""Step of the checkpoint, half of the parity segment."""


def restarted(strategy: str, checkpoint: str = "sharded", **axes: Any) -> Cell:
    return cell(strategy, checkpoint=checkpoint, **axes)


BY_TORCH = [
    restarted("single", "full", devices=1),
    restarted("ddp", "full"),
    restarted("fsdp2", "async"),
    restarted("fsdp1", "full"),
    restarted("tensor"),
    restarted("pipeline", micro_batches=2),
    restarted("zero_redundancy", "full"),
]
RESHARDED = [
    restarted("fsdp2", devices=1, checkpoint_from="fsdp2 x2"),
    restarted("fsdp2", devices=4, checkpoint_from="fsdp2 x2"),
    restarted("single", "full", devices=1, checkpoint_from="fsdp2 x2"),
    restarted("ddp", micro_batches=2, checkpoint_from="pipeline x2"),
]
BY_LIBRARIES = [
    restarted("deepspeed", options={"stage": 3}),
    restarted("accelerate", "full"),
    restarted("trainer", "full"),
    restarted("horovod", "full"),
    restarted("fairscale_oss", "full"),
    restarted("fairscale_on_cpu"),
]


def test_the_training_goes_on_as_if_it_was_never_killed(run_cells: RunCells) -> None:
    here = [c for c in BY_LIBRARIES if find_spec(c.strategy.split("_")[0]) or c.strategy in TOOLS]
    trials = run_cells(*BY_TORCH, *RESHARDED, *here).trials
    assert dict(zip(trials["cell_name"], trials["parity_verdict"], strict=True)) == {
        c.name: "exact" for c in (*BY_TORCH, *RESHARDED, *here)
    }
    assert set(trials["checkpoint_step"]) == {STEP}
    assert (trials["checkpoint_bytes"] > 0).all()
    assert (trials["startup_seconds"] < trials["wall_seconds"] / 2).all(), "that of one launch"
    assert (trials["checkpoint_save_seconds"] >= trials["checkpoint_blocked_seconds"]).all()
    timed = trials[~trials["strategy"].isin(["trainer"])]
    assert (timed["checkpoint_load_seconds"] > 0).all()
    same_ranks = trials[trials["checkpoint_from"].isna()]
    assert (same_ranks["checkpoint_restores_bits"] == True).all()  # noqa: E712
    assert trials[trials["checkpoint_from"].notna()]["checkpoint_restores_bits"].isna().sum() >= 3


TOOLS = ("trainer",)


@pytest.mark.parametrize(
    ("mistake", "status"),
    [
        ("none", "ok"),
        ("nothing_loaded", "diverged"),
        ("no_optimizer_state", "diverged"),
        ("no_step_counts", "diverged"),
        ("one_shard_not_loaded", "diverged"),
        ("data_position_ignored", "failed"),
        ("library_counter_lost", "failed"),
    ],
)
def test_what_loading_loses_is_noticed(run_cells: RunCells, mistake: str, status: str) -> None:
    trials = run_cells(restarted("checkpoint_traps", options={"mistake": mistake})).trials
    (trial,) = trials.to_dict("records")
    assert trial["status"] == status, trial["log_tail"]
    if mistake == "none":
        assert trial["checkpoint_restores_bits"]


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


DAMAGES = [truncated, missing_shard, mixed_steps, no_manifest, other_step]


def damaged(launcher: Launcher, results: Path, damage: Callable[[Path, Path], None]) -> Any:
    store = Store(results)
    plan = Plan.new("test", [restarted("fsdp2")], 1, [])
    plan = dataclasses.replace(plan, timed_seconds=0.0)
    tampering = Tampering(launcher, damage)
    runner = Runner(store, plan, launcher=lambda packages: tampering)  # type: ignore[arg-type]
    runner.begin()
    assert runner.run(SilentListener())
    (trial,) = store.load([plan.run_id]).trials.to_dict("records")
    return trial


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_not_loaded(
    launcher: Launcher, tmp_path: Path, damage: Callable[[Path, Path], None]
) -> None:
    trial = damaged(launcher, tmp_path, damage)
    assert trial["status"] == "failed"
    assert (
        trial["checkpoint_load_seconds"] is None
        or trial["checkpoint_load_seconds"] != (trial["checkpoint_load_seconds"])
    )


@pytest.mark.parametrize("damage", [truncated, missing_shard, mixed_steps])
def test_without_the_manifest_parity_sees_what_the_library_does_not(
    launcher: Launcher,
    tmp_path: Path,
    damage: Callable[[Path, Path], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Manifest, "verified", classmethod(lambda cls, _: cls(STEP, 2, ())))
    trial = damaged(launcher, tmp_path, damage)
    assert trial["status"] == {"mixed_steps": "diverged"}.get(damage.__name__, "failed")
