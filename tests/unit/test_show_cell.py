"""`bench show`: a cell's recorded numbers in JSON and text, and hostile text on a terminal."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench.cli import terminal
from bench.cli.show import show
from harness.cell.cell import Cell
from harness.cell.errors import UsageError
from harness.record.profile_record import COMPONENTS, ProfileRecord
from harness.record.run_record import RunRecord, StepRecord
from harness.record.store import Store, TrialKey
from harness.record.trial import TrialRecord
from reports.cell_detail import STEPS, in_full, sparkline
from tests import commands
from tests.unit.made_results import MIB, left_out, run_row, states, trial_rows
from tests.unit.stored_trials import step as stored_step

DDP, OTHER, BROKEN = (Cell(strategy=name, devices=2) for name in ("ddp", "fsdp2", "tensor"))
TWO = Cell(strategy="fsdp2", devices=2, precision="bf16")
OLD, NEW = "20260101T000000-aaaa", "20260102T000000-bbbb"
SPEEDS = [100.0, 104.0, 96.0]


def steps(run_id: str, trial: int, cell_id: str = DDP.id) -> list[StepRecord]:
    """Returns a warm-up and three timed steps of two ranks; rank 1 is 10 ms slower."""
    plain = stored_step(TrialKey(cell_id, trial), run_id=run_id)
    return [
        replace(
            plain,
            rank=rank,
            step=step,
            phase="timed" if step else "warmup",
            step_seconds=0.1 * (4 - step) + 0.01 * rank,
        )
        for rank in range(2)
        for step in range(4)
    ]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    found = Store(tmp_path / "results")
    kept = states((4, 0, 8, 4), (4, 0, 8, 4), formula=(4, 0, 10, 4))
    for run_id, factor in ((OLD, 0.5), (NEW, 1.0)):
        found.write_run(RunRecord(**run_row(run_id=run_id)))
        rows = trial_rows(
            DDP,
            [factor * speed for speed in SPEEDS],
            **kept,
            peak_memory_bytes_by_rank=[90 * MIB, 102 * MIB],
        )
        for row in rows:
            found.write_trial(
                TrialRecord(**(row | {"run_id": run_id})), steps(run_id, row["trial"])
            )
        for row in trial_rows(OTHER, [200.0, 201.0, 202.0]) + trial_rows(TWO, [1.0]):
            found.write_trial(TrialRecord(**(row | {"run_id": run_id})))
    for row in left_out(BROKEN, "failed", "rank 1: it broke"):
        found.write_trial(TrialRecord(**(row | {"run_id": OLD})))
    return found


def ask(store: Store, *words: str) -> str:
    return commands.told(show, *words, "--results", str(store.folder))


@pytest.mark.parametrize("which", ["ddp", DDP.id, DDP.name, "dd*x2*"])
def test_json_has_the_stores_numbers(store: Store, which: str) -> None:
    told = json.loads(ask(store, which, "--json"), parse_constant=pytest.fail)
    of_newest = (NEW, DDP.id)
    assert (told["cell"]["run_id"], told["cell"]["cell_id"]) == of_newest
    assert [trial["samples_per_second"] for trial in told["trials"]] == SPEEDS
    assert told["cell"]["samples_per_second"] == pytest.approx((100 * 104 * 96) ** (1 / 3))
    assert told["cell"]["samples_per_second_low"] < 100 < told["cell"]["samples_per_second_high"]
    assert told["trials"][0]["slowest_rank_step_seconds"] == pytest.approx([0.41, 0.31, 0.21, 0.11])
    assert told["trials"][0]["phases"] == ["warmup", "timed", "timed", "timed"]
    medians = [rank["step_seconds_p50"] for rank in told["ranks"]]
    assert medians == pytest.approx([0.2, 0.21]), "of timed steps"
    assert [rank["peak_memory_bytes"] for rank in told["ranks"]] == [90 * MIB, 102 * MIB]
    assert [(kind["bytes"], kind["formula_bytes"]) for kind in told["memory"]["kinds"]] == [
        (size * MIB, formula * MIB) for size, formula in ((4, 4), (0, 0), (8, 10), (4, 4))
    ]
    assert told["memory"]["formula_deviation"] == pytest.approx(16 / 18 - 1)
    ranking = told["ranking"]
    assert (ranking["place"], ranking["of"], ranking["baseline"]) == (2, 2, "")
    assert ranking["may_be_fastest"] is False
    assert told["time"] is None


def test_a_run_can_be_named(store: Store) -> None:
    told = json.loads(ask(store, "ddp", "--run", "latest~1", "--json"))
    assert told["cell"]["run_id"] == OLD
    assert told["cell"]["samples_per_second"] == pytest.approx((50 * 52 * 48) ** (1 / 3))
    newest_that_has_it = json.loads(ask(store, "tensor", "--json"))
    assert newest_that_has_it["cell"]["run_id"] == OLD


def test_parts_of_a_profiled_step(store: Store) -> None:
    parts: dict[str, Any] = {f"{name}_seconds": (0.5, 0.5) for name in COMPONENTS}
    store.write_profile(
        ProfileRecord(
            run_id=NEW,
            cell_id=DDP.id,
            cell_name=DDP.name,
            started_at=datetime(2026, 1, 2, tzinfo=timezone.utc),
            status="ok",
            profiled_steps=1,
            plain_step_seconds=1.0,
            profiled_step_seconds=1.0,
            **parts,
        )
    )
    told = json.loads(ask(store, "ddp", "--json"))
    assert told["time"] == {
        **{f"{name}_seconds": 0.5 for name in COMPONENTS},
        "profiled_step_seconds": 1.0,
        "plain_step_seconds": 1.0,
        "straggler_rank": None,
        "gpu_seconds": None,
    }


@pytest.mark.parametrize("words", [["dpp"], ["tensor", "--run", NEW], ["ddp", "--run", "nope"]])
def test_unknown_cells_and_runs_are_refused(store: Store, words: list[str]) -> None:
    with pytest.raises(UsageError):
        ask(store, *words)


def test_the_simplest_of_several_cells_is_shown(store: Store) -> None:
    told = json.loads(ask(store, "fsdp2", "--json"))
    assert (told["cell"]["cell_id"], told["others"]) == (OTHER.id, [TWO.id])
    assert "the simplest of the 2 cells that match 'fsdp2'" in ask(store, "fsdp2")
    assert "the simplest" not in ask(store, "ddp")


@pytest.mark.parametrize("width", [40, 80, 200])
def test_tables_fold_into_the_terminal(store: Store, width: int) -> None:
    out = Console(file=io.StringIO(), width=width, highlight=False, soft_wrap=True)
    results = store.load([NEW], steps=False)
    terminal.write(out, in_full(results, store.steps_of(NEW, DDP.id), DDP.id).blocks())
    assert isinstance(out.file, io.StringIO)
    tables = [line for line in out.file.getvalue().splitlines() if line[:1] in tuple("┏┃┡│└")]
    assert tables
    assert max(map(len, tables)) <= width


def test_charts_of_characters() -> None:
    assert sparkline([]) == ""
    assert sparkline([None, 1.0, 2.0]) == "▁█"
    long = sparkline([0.0] * 999 + [1.0])
    assert (len(long), long[-1], set(long[:-1])) == (STEPS, "█", {"▁"})
