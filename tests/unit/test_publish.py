"""`bench publish`: each tool's client reads back the figures in the parquet files."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from bench.cli.publish import publish
from harness.analysis.summary import cells as summarise
from harness.cell.cell import Cell
from harness.cell.errors import UsageError
from harness.record.run_record import RunRecord, StepRecord
from harness.record.store import Results, Store, TrialKey
from harness.record.trial import TrialRecord
from reports.export_records import AXES
from reports.export_records import PUBLISHED as FIGURES
from reports.publish import CELL_TAG, LIBRARIES, PREFIX, RUN_TAG, quiet
from reports.publish import PROJECT as EXPERIMENT
from reports.publish import publish as write
from tests import commands
from tests.unit.html_page import HOSTILE
from tests.unit.made_results import REFERENCE, diverged_rows, left_out, run_row, trial_rows
from tests.unit.stored_trials import step as stored_step

DDP, FSDP, WRONG = (Cell(strategy=name, devices=2) for name in ("ddp", "fsdp2", "wrong"))
ABSENT = Cell(strategy="absent", devices=2)
OLD, NEW = "20260101T000000-aaaa", "20260102T000000-bbbb"
SPEEDS = [100.0, 104.5, 96.25]
FILE = "parallelism_bench_full.prom"


def steps(run_id: str, cell_id: str, trial: int) -> list[StepRecord]:
    plain = stored_step(TrialKey(cell_id, trial), run_id=run_id)
    return [
        replace(plain, rank=rank, step=step, step_seconds=0.1 + 0.01 * step + 0.001 * rank)
        for rank in range(2)
        for step in range(3)
    ]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    found = Store(tmp_path_factory.mktemp("publish") / "results")
    for run_id in (OLD, NEW):
        found.write_run(RunRecord(**run_row(run_id=run_id)))
        rows = trial_rows(DDP, SPEEDS) + trial_rows(FSDP, [50.0], peak_memory_bytes=None)
        for row in (
            rows
            + diverged_rows(WRONG)
            + left_out(ABSENT, "unavailable", "package absent is not installed")
        ):
            found.write_trial(
                TrialRecord(**(row | {"run_id": run_id})),
                steps(run_id, row["cell_id"], row["trial"]),
            )
    return found


@pytest.fixture(scope="module")
def results(store: Store) -> Results:
    return store.load([NEW])


def known(row: Any) -> dict[str, float]:
    """Returns the finite published figures in a cell's row of the frame."""
    return {
        name: float(row[name])
        for name in FIGURES
        if row[name] is not None and math.isfinite(row[name])
    }


def frame(results: Results) -> dict[str, Any]:
    return {
        str(cell_id): row
        for cell_id, row in summarise(results.trials).set_index("cell_id", drop=False).iterrows()
    }


def test_mlflow_reads_what_the_parquet_says(results: Results, tmp_path: Path) -> None:
    done = write("mlflow", results, tmp_path / "ml runs")
    assert (done.cells, done.already) == (4, 0)
    with quiet():
        from mlflow.tracking import MlflowClient

        client = MlflowClient(tracking_uri=(tmp_path / "ml runs").as_uri())
        experiment = client.get_experiment_by_name(EXPERIMENT)
        assert experiment is not None
        runs = {
            run.data.tags[CELL_TAG]: run for run in client.search_runs([experiment.experiment_id])
        }
        rows = frame(results)
        assert set(runs) == set(rows)
        for cell_id, row in rows.items():
            run = runs[cell_id]
            own = {
                key: value
                for key, value in run.data.metrics.items()
                if key != "loss" and not key.startswith("trial_")
            }
            assert own == known(row), "64 bits, exactly"
            assert run.info.run_name == row["cell_name"]
            assert run.info.status == ("FINISHED" if row["status"] == "ok" else "FAILED")
            assert (run.data.tags[RUN_TAG], run.data.tags["bench.status"]) == (NEW, row["status"])
            assert (run.data.params["strategy"], run.data.params["devices"]) == (
                row["strategy"],
                "2",
            )
        history = client.get_metric_history(runs[DDP.id].info.run_id, "trial_samples_per_second")
        assert [(point.step, point.value) for point in history] == list(enumerate(SPEEDS))
        losses = client.get_metric_history(runs[DDP.id].info.run_id, "loss")
        assert [point.value for point in losses] == [loss * (1 + 1e-7) for loss in REFERENCE]
    again = write("mlflow", results, tmp_path / "ml runs")
    assert (again.cells, again.already) == (0, 4)


NO_WANDB = pytest.mark.skipif(
    find_spec("wandb") is None, reason="wandb is not installed: pip install wandb"
)


def wandb_records(file: Path) -> list[Any]:
    """Reads a run's protobuf records: LevelDB's log format after a 7-byte header."""
    from wandb.proto import wandb_internal_pb2

    content, place, parts, found = file.read_bytes(), 7, b"", []
    while place + 7 <= len(content):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        size, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        parts += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):
            found.append(wandb_internal_pb2.Record.FromString(parts))
            parts = b""
    return found


def wandb_items(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


@NO_WANDB
def test_wandb_has_what_the_parquet_says(results: Results, tmp_path: Path) -> None:
    done = write("wandb", results, tmp_path)
    assert (done.cells, done.already) == (4, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["wandb"]
    for cell_id, row in frame(results).items():
        (folder,) = (tmp_path / "wandb").glob(f"offline-run-*-{NEW}-{cell_id}")
        written = wandb_records(folder / f"run-{NEW}-{cell_id}.wandb")
        (run,) = [one.run for one in written if one.WhichOneof("record_type") == "run"]
        config = {item.key: json.loads(item.value_json) for item in run.config.update}
        assert (run.display_name, run.run_group) == (row["cell_name"], NEW)
        assert set(AXES) <= set(config)
        assert (config["strategy"], config["bench.status"]) == (row["strategy"], row["status"])
        summary: dict[str, Any] = {}
        history = []
        for one in written:
            summary |= wandb_items(one.summary.update)
            if one.WhichOneof("record_type") == "history":
                history.append(wandb_items(one.history.item))
        figures = {name: value for name, value in summary.items() if name in FIGURES}
        assert figures == known(row), "64 bits, exactly"
        trials = results.trials[results.trials["cell_id"] == cell_id]
        speeds = trials["samples_per_second"].dropna().tolist()
        name = "trials/samples_per_second"
        assert [one[name] for one in history if name in one] == speeds
        if row["status"] == "ok":
            losses = [one["loss"] for one in history if "loss" in one]
            assert losses == [loss * (1 + 1e-7) for loss in REFERENCE]
        (ended,) = [one.exit for one in written if one.WhichOneof("record_type") == "exit"]
        assert ended.exit_code == (0 if row["status"] == "ok" else 1)
    again = write("wandb", results, tmp_path)
    assert (again.cells, again.already) == (0, 4)


@NO_WANDB
def test_wandb_gets_a_run_whose_id_ends_like_anothers(tmp_path: Path) -> None:
    store = Store(tmp_path / "results")
    for run_id in ("small-gpu", "gpu"):
        store.write_run(RunRecord(**run_row(run_id=run_id)))
        for row in trial_rows(DDP, [50.0]):
            store.write_trial(TrialRecord(**(row | {"run_id": run_id})))
        assert write("wandb", store.load([run_id]), tmp_path / "out").cells == 1


def test_prometheus_reads_what_the_parquet_says(results: Results, tmp_path: Path) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    done = write("prometheus", results, tmp_path)
    assert done.path == tmp_path / FILE
    samples = [
        one
        for family in text_string_to_metric_families(done.path.read_text())
        for one in family.samples
    ]
    found: dict[str, dict[str, float]] = {}
    for one in samples:
        if one.name.startswith(f"{PREFIX}cell_"):
            found.setdefault(one.labels["cell_id"], {})[one.name.removeprefix(f"{PREFIX}cell_")] = (
                one.value
            )
    rows = frame(results)
    assert found == {
        cell_id: known(row) | {"ok": float(row["ranked"])} for cell_id, row in rows.items()
    }
    about = {one.name: one.value for one in samples if "cell_id" not in one.labels}
    assert about[f"{PREFIX}run_cells"] == 4
    assert about[f"{PREFIX}run_failures"] == 1
    assert (
        about[f"{PREFIX}run_started_timestamp_seconds"]
        == results.runs["started_at"].iloc[0].timestamp()
    )


def ask(*words: str) -> str:
    return commands.told(publish, *words)


def test_the_command_publishes(store: Store, tmp_path: Path) -> None:
    folder = ("--results", str(store.folder))
    told = json.loads(ask("prometheus", str(tmp_path / "prom"), "latest~1", "--json", *folder))
    assert told == {
        "target": "prometheus",
        "path": str(tmp_path / "prom" / FILE),
        "runs": [OLD],
        "cells": 4,
        "already_there": 0,
    }
    (tmp_path / "file").write_text("")
    for words in (
        ["prometheus", str(tmp_path / "prom"), "--all"],
        ["mlflow", str(tmp_path / "file")],
        ["mlflow", str(tmp_path / "file" / "below")],
        ["prometheus", str(tmp_path / "prom"), "nope"],
    ):
        with pytest.raises(UsageError):
            ask(*words, *folder)


@pytest.mark.parametrize("target", list(LIBRARIES))
def test_a_missing_library_is_a_sentence_that_names_the_extra(
    target: str, results: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = LIBRARIES[target]
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UsageError, match=rf"{library}.*\[{target}\]"):
        write(target, results, tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


@pytest.mark.slow
@pytest.mark.parametrize("text", [*HOSTILE, "", "../../escaped", "a/b\\c\nd"])
def test_hostile_text_is_only_text(text: str, tmp_path: Path) -> None:
    ran, absent = (Cell(strategy=text, workload=text, devices=n) for n in (2, 3))
    odd: dict[str, Any] = dict.fromkeys(("parity_reason", "memory_method"), text)
    store = Store(tmp_path / "results")
    names = dict.fromkeys(("host", "matrix", "cpu_model", "git_commit"), text)
    store.write_run(RunRecord(**run_row(run_id=NEW, **names)))
    rows = trial_rows(
        ran, [3.0, 3.1], **odd | {"peak_memory_bytes": None, "tokens_per_second": math.nan}
    )
    for row in rows + left_out(absent, "failed", text, **odd):
        store.write_trial(
            TrialRecord(**(row | {"run_id": NEW})), steps(NEW, row["cell_id"], row["trial"])
        )
    results = store.load()
    targets = [target for target, library in LIBRARIES.items() if find_spec(library)]
    for target in targets:
        write(target, results, tmp_path / "out" / target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "results"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(targets)
    from prometheus_client.parser import text_string_to_metric_families

    (written,) = (tmp_path / "out" / "prometheus").iterdir()
    told = written.read_text()
    labels = {
        one.labels.get("cell", ran.name)
        for family in text_string_to_metric_families(told)
        for one in family.samples
    }
    assert labels == {ran.name, absent.name}
