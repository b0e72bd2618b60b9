"""Checkpoints: their manifest, the cells that can have one, and their section in a report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from harness.analysis.summary import cell_results
from harness.cell.cell import Cell
from harness.cell.errors import BadCheckpoint, Refused, UsageError
from harness.record.checkpoint import NAME, Manifest
from harness.seam.registry import validate
from harness.workloads import make_workload
from reports.run_report import ran
from reports.run_sections import run_text
from tests.unit.made_results import stored, trial_rows
from tests.unit.stored_trials import frame_of, trial_row

COSTS = {
    "checkpoint_step": 6,
    "checkpoint_ranks": 2,
    "checkpoint_bytes": 2**20,
    "checkpoint_files": 3,
    "checkpoint_save_seconds": 0.25,
    "checkpoint_blocked_seconds": 0.125,
    "checkpoint_load_seconds": 0.5,
    "checkpoint_restores_random": False,
    "checkpoint_restores_bits": True,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "shards").mkdir()
    (tmp_path / "model.pt").write_bytes(b"model")
    (tmp_path / "shards" / "0.pt").write_bytes(b"shard")
    Manifest.of(tmp_path, step=6, ranks=2).write(tmp_path)
    return tmp_path


def test_an_intact_checkpoint_is_as_its_manifest_says(folder: Path) -> None:
    manifest = Manifest.verified(folder)
    assert (manifest.step, manifest.ranks, manifest.total_bytes) == (6, 2, 10)
    assert [file.path for file in manifest.files] == ["model.pt", "shards/0.pt"]
    assert sorted(path.name for path in folder.iterdir()) == [NAME, "model.pt", "shards"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / NAME).unlink(),
        lambda folder: (folder / NAME).write_text('{"step": 6'),
        lambda folder: (folder / NAME).write_text('{"step": 6}'),
        lambda folder: (folder / "model.pt").write_bytes(b"mode"),
        lambda folder: (folder / "model.pt").write_bytes(b"mOdel"),
        lambda folder: (folder / "shards" / "0.pt").unlink(),
    ],
)
def test_a_damaged_checkpoint_is_bad(folder: Path, damage: Callable[[Path], object]) -> None:
    damage(folder)
    with pytest.raises(BadCheckpoint):
        Manifest.verified(folder)


@pytest.mark.parametrize(
    "axes",
    [
        {"strategy": "deepspeed", "checkpoint": "full"},
        {"strategy": "post_local_sgd", "checkpoint": "full"},
        {"strategy": "ddp_elastic", "checkpoint": "full"},
        {"strategy": "ddp", "checkpoint": "full", "nodes": 2},
        {"strategy": "ddp", "checkpoint": "full", "options": {"comm_hook": "powersgd"}},
        {"strategy": "ddp", "checkpoint": "full", "precision": "fp16"},
        {"strategy": "ddp", "checkpoint": "full", "compile": "block"},
        {"strategy": "ddp", "checkpoint": "full", "parity_steps": 5},
        {"strategy": "ddp", "checkpoint_from": "single x1"},
        {"strategy": "ddp", "checkpoint": "full", "schedule": "warmup_cosine"},
        {"strategy": "ddp", "checkpoint": "full", "checkpoint_from": "fairscale_oss x2"},
        {"strategy": "ddp", "checkpoint": "sharded", "checkpoint_from": "pipeline x2"},
    ],
)
def test_cells_that_cannot_restart_are_refused(axes: dict[str, object]) -> None:
    cell = Cell(**{"workload": "llama-nano", "devices": 2, **axes})
    with pytest.raises(Refused):
        validate(cell, make_workload(cell.workload), here=False)


@pytest.mark.parametrize("words", ["ddp", "ddp x", "ddp 2", "ddp x0", "ddp x²", "nobody x2"])
def test_checkpoint_from_is_a_strategy_and_a_number(words: str) -> None:
    cell = Cell(strategy="ddp", devices=2, checkpoint="full", checkpoint_from=words)
    with pytest.raises(UsageError):
        validate(cell, make_workload(cell.workload), here=False)


def test_the_reference_is_the_training_without_a_restart() -> None:
    plain = Cell(strategy="ddp", devices=2)
    cell = plain.model_copy(update={"checkpoint": "full", "checkpoint_from": "single x1"})
    assert cell.reference() == plain.reference()
    assert cell.id != plain.id


@pytest.mark.parametrize(
    ("by_trial", "of_cell"),
    [
        ((True, True), True),
        ((True, False), False),
        ((None, True), True),
        ((True, True, False), False),
        ((None, None), None),
    ],
)
def test_a_cell_restores_only_what_every_trial_restored(
    by_trial: tuple[bool | None, ...], of_cell: bool | None
) -> None:
    """A trial that failed because it did not restore counts too."""
    cell = Cell(strategy="ddp", devices=2, checkpoint="full")
    failed = {"status": "failed", "samples_per_second": None, "parity_verdict": None}
    rows = [
        trial_row(
            cell,
            trial,
            checkpoint_restores_bits=restored,
            **(failed if restored is False else {}),
        )
        for trial, restored in enumerate(by_trial)
    ]
    (result,) = cell_results(frame_of(rows))
    assert result.checkpoint.checkpoint_restores_bits is of_cell


def test_the_section_is_for_runs_with_checkpoints(tmp_path: Path) -> None:
    cell = Cell(strategy="ddp", devices=2, checkpoint="async")
    with_one = stored(tmp_path / "one", trial_rows(cell, [10.0, 11.0], **COSTS))
    without = stored(tmp_path / "none", trial_rows(Cell(strategy="ddp", devices=2), [10.0, 11.0]))
    text = run_text(ran(with_one), requested=["checkpoints"]).text
    row = next(line for line in text.splitlines() if line.startswith("| ddp"))
    shown = [word.strip() for word in row.split("|")[4:-1]]
    assert shown == ["250", "125", "500", "1.00 MiB", "3", "restored", "not restored"]
    with pytest.raises(UsageError):
        run_text(ran(without), requested=["checkpoints"])
