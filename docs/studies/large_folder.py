"""Measures how long commands take in a large results folder, including process start.

`python -m docs.studies.large_folder [FOLDER] [--runs 700]` fills a folder (default: a temporary
one) with runs of one trial per cell of the reference full run. Exit code 1 if a command is too
slow.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pyarrow as pa

from harness.record.files import RunFiles, arrow_schema, read_file, write_file
from harness.record.plan import kept_plan
from harness.record.run_record import RunRecord, StepRecord
from harness.record.store import Store, load
from harness.record.trial import TrialRecord

REFERENCE = Path(__file__).parents[2] / "results" / "reference"
BEGAN = datetime(2026, 1, 1, tzinfo=timezone.utc)
TIMES = 3
"""Number of measurements per command. The fastest counts, since other programs use the machine
too."""
COMMANDS = (
    ("status", 1.0),
    ("run --resume --no-report", 3.0),
    ("report --out {out}/report.html", 5.0),
)
"""Commands, and the maximum number of seconds that each may take."""


def name_of(number: int) -> str:
    return f"{BEGAN + timedelta(hours=number):%Y%m%dT%H%M%S}-{number:04x}"


def write_first(store: Store, number: int) -> None:
    reference = load(REFERENCE)
    run = RunRecord.from_frame(reference.runs)[-1]
    name = name_of(number)
    plan = dataclasses.replace(
        kept_plan(Store(REFERENCE), run.run_id), run_id=name, trials=1, until_answered=False
    )
    began = BEGAN + timedelta(hours=number)
    run = dataclasses.replace(run, run_id=name, started_at=began, plan=plan.to_json())
    store.write_run(run)
    steps = {
        cell_id: [dataclasses.replace(step, run_id=name) for step in StepRecord.from_frame(rows)]
        for cell_id, rows in reference.steps[reference.steps["trial"] == 0].groupby("cell_id")
    }
    for trial in TrialRecord.from_frame(reference.trials[reference.trials["trial"] == 0]):
        store.write_trial(dataclasses.replace(trial, run_id=name), steps.get(trial.cell_id, ()))
    store.gather(name)


@functools.cache
def trials_of(folder: Path, run_id: str) -> dict[str, pa.Table]:
    files = sorted((folder / "trials" / run_id).glob("*.parquet"))
    return {file.name: read_file("trials", file) for file in files}


def write_like(store: Store, first: int, number: int) -> None:
    name, schema, files = name_of(number), arrow_schema("trials"), RunFiles(store.folder)
    if files.copy("trials", name).exists():
        return
    run = RunRecord.from_row(store.run_row(name_of(first)))
    began = BEGAN + timedelta(hours=number)
    store.write_run(dataclasses.replace(run, run_id=name, started_at=began))
    written: dict[Path, pa.Table] = {}
    for file, rows in trials_of(store.folder, name_of(first)).items():
        index = rows.column_names.index("run_id")
        rows = rows.set_column(index, schema.field("run_id"), [[name] * len(rows)])
        written[write_file(store.folder / "trials" / name / file, schema, [rows])] = rows
    whole = pa.concat_tables(written.values()).combine_chunks()
    files.write_copy("trials", name, list(written), [whole])


def make(store: Store, runs: int) -> None:
    last = runs - 1
    if name_of(last) not in store.run_ids():
        write_first(store, last)
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        pool.map(functools.partial(write_like, store, last), range(last), chunksize=8)


def seconds_of(arguments: Sequence[str], store: Store) -> float:
    took = []
    with tempfile.TemporaryDirectory() as out:
        given = [word.format(out=out) for word in arguments]
        command = [sys.executable, "-m", "bench", *given, "--results", str(store.folder)]
        for _ in range(TIMES):
            began = time.perf_counter()
            subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
            took.append(time.perf_counter() - began)
    return min(took)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--runs", type=int, default=700)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        sys.exit(1 if slow(Store(given.folder or Path(made, "results")), given.runs) else 0)


def slow(store: Store, runs: int) -> bool:
    if len(store.run_ids()) < runs:
        make(store, runs)
    late = False
    for command, most in COMMANDS:
        took = seconds_of(command.split(), store)
        late |= took > most
        print(f"bench {command}: {took:.2f} s, at most {most:g} s")
    return late


if __name__ == "__main__":
    main()
