"""Commands on one run neither read nor import what only other commands need."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.execution import prepare
from bench.run_options import CommandOptions
from harness.cell.cell import Cell
from harness.cell.errors import DamagedFileWarning
from harness.host.environment import environment
from harness.record.run_record import RunRecord
from harness.record.store import Store
from harness.record.trial import TrialRecord
from harness.run.expected import MOST_RUNS, expected_seconds
from tests.unit.stored_trials import one_cell_run, trial_row

CELL, RARE = (Cell(strategy="single", workload="llama-nano", seed=seed) for seed in (0, 1))


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Thirty runs. In run n the trials of CELL take n and n + 2 seconds; only run 0 has RARE."""
    store = Store(tmp_path_factory.mktemp("many"))
    for number in range(30):
        run_id = f"run-{number:02}"
        store.write_run(RunRecord(**one_cell_run(run_id)))
        for cell in [CELL, RARE] if number == 0 else [CELL]:
            for trial in range(2):
                row = trial_row(cell, trial, run_id, wall_seconds=float(number + 2 * trial))
                store.write_trial(TrialRecord(**row | {"position": trial}))
    return store


def test_the_expected_time_is_that_of_the_newest_run(
    many: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    ended_trials = Store.ended_trials

    def noted(store: Store, run_id: str) -> object:
        read.append(run_id)
        return ended_trials(store, run_id)

    monkeypatch.setattr(Store, "ended_trials", noted)
    monkeypatch.setattr("harness.run.expected.trial_seconds", lambda *_: 7.0)
    assert expected_seconds(many, [CELL], 2, hardware={}) == {CELL.id: 30.0}
    assert read == ["run-29"]
    read.clear()
    assert expected_seconds(many, [RARE], 2, hardware={}) == {RARE.id: 7.0}
    assert len(read) == MOST_RUNS
    assert expected_seconds(many, [CELL], 2) == {CELL.id: 7.0}, "no run is of another host"


def test_the_expected_time_is_that_of_the_same_hardware(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for seconds, cores in ((5.0, 2), (20.0, 64)):
        run_id = f"run-{cores:02}"
        store.write_run(RunRecord(**one_cell_run(run_id) | {"cpu_cores": cores, "gpus": ["L4"]}))
        store.write_trial(TrialRecord(**trial_row(CELL, 0, run_id, wall_seconds=seconds)))
    for cores, seconds in ((2, 5.0), (64, 20.0)):
        hardware = {"cpu_model": None, "cpu_cores": cores, "gpus": ["L4"]}
        assert expected_seconds(store, [CELL], 2, hardware=hardware) == {CELL.id: seconds}
    (store.folder / "runs" / "run-02.parquet").write_bytes(b"PAR1 damaged PAR1")
    with pytest.warns(DamagedFileWarning):
        unknown = expected_seconds(store, [CELL], 2, hardware={"cpu_cores": 2})
    assert unknown != {CELL.id: 5.0}


def test_times_of_this_host_do_not_count_for_another(tmp_path: Path) -> None:
    matrix = tmp_path / "m.yaml"
    matrix.write_text("cells: [{strategy: single, workload: llama-nano, device: cpu}]\n")

    def expected(**host: str) -> dict[str, float]:
        results = tmp_path / "results"
        options = CommandOptions(matrix=str(matrix), results=results, dry_run=True, **host)
        return prepare(options).seconds

    store = Store(tmp_path / "results")
    (cell_id,) = expected()
    columns = {name: environment()[name] for name in ("cpu_model", "cpu_cores", "gpus")}
    store.write_run(RunRecord(**one_cell_run("run") | columns))
    cell = CELL.model_copy(update={"device": "cpu"})
    assert cell.id == cell_id
    store.write_trial(TrialRecord(**trial_row(cell, 0, "run", wall_seconds=77.0)))
    assert expected() == {cell_id: 77.0}
    assert expected(host="1 x l4")[cell_id] < 77.0


def test_the_expected_time_is_that_of_separate_trials(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.write_run(RunRecord(**one_cell_run("run")))
    turns = {"turn_began": (0.0,), "turn_samples_per_second": (8.0,)}
    for trial, more in enumerate([{"wall_seconds": 5.0}, *2 * [{"wall_seconds": 20.0, **turns}]]):
        store.write_trial(TrialRecord(**trial_row(CELL, trial, "run", **more)))
    assert expected_seconds(store, [CELL], 2, hardware={}) == {CELL.id: 5.0}


def test_the_status_of_a_run_needs_no_pandas(many: Store) -> None:
    """Importing pandas takes longer than everything else that the command does."""
    code = f"""
import sys
sys.argv = ["bench", "status", "run-07", "--results", {str(many.folder)!r}]
from bench.cli import main
try:
    main()
finally:
    print("pandas" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, newest, imported = done.stdout.splitlines()
    assert first == "run run-07 of matrix test: 0 of 1 planned trials and 2 further trials (2 ok)"
    assert newest.startswith("newest: single llama-nano x1 fp32 batch 8 trial ")
    assert imported == "False"
