"""Thirty nights of two matrices, with drawn noise: what is reported, when, and as what."""

from __future__ import annotations

import json
import math
import random
import subprocess
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench.cli.night import night
from bench.cli.prune import prune
from bench.cluster import night as nightly
from bench.cluster.jobs import JobState, Submission, keep_submission
from bench.cluster.night import Nights, Outcome, tell
from bench.cluster.site import Nightly, Notify
from harness.analysis.nights import Noise, smallest_slowdown
from harness.cell.cell import Cell
from harness.cell.errors import UsageError
from harness.record.files import RunFiles, arrow_schema
from harness.record.plan import Plan
from harness.record.run_record import RunRecord
from harness.record.store import Store
from harness.record.table import arrow_table
from harness.record.trial import TrialRecord
from tests.commands import ask, told
from tests.unit.made_results import left_out, run_row, trial_rows

CELLS = [Cell(strategy=name, devices=2) for name in ("single", "ddp", "fsdp2", "tensor")]
TRIALS, OF_A_TRIAL, BETWEEN = 16, 0.02, 0.007
SLOWER = CELLS[1]


def run_id(day: int, matrix: str) -> str:
    return f"{datetime(2026, 1, 1) + timedelta(days=day):%Y%m%dT%H%M%S}-{matrix}"


class Simulated:
    """Nights of one matrix, whose runs are made of drawn throughputs."""

    def __init__(self, results: Path, matrix: str, seed: int) -> None:
        self.nights = Nights(results, matrix)
        self.chance = random.Random(seed)
        self.store = Store(results)

    def submitted(self, day: int) -> str:
        job = str(1000 * len(self.nights.matrix) + day)
        self.nights.folder.mkdir(parents=True, exist_ok=True)
        made = Submission(job, "", self.nights.matrix, 1, 0)
        keep_submission(made, self.nights.folder)
        return job

    def begin(self, day: int) -> list[Outcome]:
        job = self.submitted(day)
        lost = list(self.nights.unreported(job))
        self.nights.note("began", run=run_id(day, self.nights.matrix), job=job)
        return lost

    def record(self, day: int, rows: Sequence[dict[str, Any]], **changes: Any) -> str:
        name = run_id(day, self.nights.matrix)
        started = datetime(2026, 1, 1, tzinfo=timezone.utc) + timedelta(days=day)
        plan = Plan.new(self.nights.matrix, CELLS, TRIALS, [], name)
        fields = {"run_id": name, "started_at": started, "matrix": self.nights.matrix}
        self.store.write_run(RunRecord(**run_row(**fields, plan=plan.to_json(), **changes)))
        trials = [TrialRecord(**(row | {"run_id": name})) for row in rows]
        part = arrow_table(trials, arrow_schema("trials"))
        RunFiles(self.store.folder).write_copy("trials", name, [], [part])
        return name

    def rows(self, slowdown: float = 0.0) -> list[dict[str, Any]]:
        rows = []
        for cell in CELLS:
            level = math.log(50) + self.chance.gauss(0, BETWEEN)
            level += math.log1p(-slowdown) if cell is SLOWER else 0.0
            speeds = [math.exp(level + self.chance.gauss(0, OF_A_TRIAL)) for _ in range(TRIALS)]
            rows += trial_rows(cell, speeds, peak_memory_bytes=100 * 2**20)
        return rows

    def night(self, day: int, slowdown: float = 0.0, code: int = 0, **changes: Any) -> Outcome:
        name = self.record(day, self.rows(slowdown), **changes)
        return self.nights.end(name, str(1000 * len(self.nights.matrix) + day), code)


@pytest.fixture(autouse=True)
def no_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nightly, "states", lambda job: [])


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(3))
def test_thirty_nights_report_the_slowdown_and_nothing_else(tmp_path: Path, seed: int) -> None:
    slow, steady = Simulated(tmp_path, "slow", seed), Simulated(tmp_path, "steady", 100 + seed)
    reported: dict[tuple[str, int], str] = {}
    texts = {}
    for day in range(1, 31):
        for simulated in (slow, steady):
            matrix = simulated.nights.matrix
            if (matrix, day) == ("steady", 7):  # no node was free all night
                simulated.submitted(day)
                continue
            for lost in simulated.begin(day):
                reported[matrix, day] = lost.name
            if (matrix, day) == ("slow", 5):  # its job was killed
                simulated.record(day, simulated.rows()[:TRIALS])
                continue
            done = simulated.night(
                day,
                0.05 if matrix == "slow" and day >= 20 else 0.0,
                torch_version="2.13.0" if day < 10 else "2.15.0",
            )
            texts[matrix, day] = done.text
            if done.name == "regression" and (matrix, day - 1) not in reported:
                reported[matrix, day] = done.name
                simulated.nights.accept(done.run_id)
            elif done.name != "suspected":
                assert done.name == "ok", (matrix, day, done.text)
    found = [day for (_, day), name in reported.items() if name == "regression"]
    assert len(found) == 1
    assert found[0] in (20, 21)
    assert SLOWER.name in texts["slow", found[0]]
    assert "on bench-host" in texts["slow", found[0]]
    assert reported == {
        ("slow", 6): "killed",
        ("steady", 8): "not begun",
        ("slow", found[0]): "regression",
    }
    for matrix in ("slow", "steady"):
        assert "torch 2.13.0 → 2.15.0" in texts[matrix, 10]
        assert "torch" not in texts[matrix, 9]
    assert "1 false alarm a year" in texts["steady", 30]


@pytest.mark.thorough
def test_a_slow_drift_is_found_although_each_night_is_like_the_last(tmp_path: Path) -> None:
    drifting = Simulated(tmp_path, "drifting", 1)
    found = [drifting.night(day, 0.004 * day).name for day in range(1, 21)]
    assert found[0] == "ok"
    assert "regression" in found


def test_a_first_night_with_failed_cells_is_no_standard(tmp_path: Path) -> None:
    nights = Simulated(tmp_path, "fails", 1)
    rows = nights.rows()[:TRIALS] + left_out(CELLS[1], "failed", "rank 1: it broke")
    done = nights.nights.end(nights.record(1, rows), "1", 1)
    assert done.name == "failed"
    assert CELLS[1].name in done.text
    assert nights.nights.good() == []
    assert nights.night(2).name == "ok"
    assert nights.nights.good() == [run_id(2, "fails")]


def test_a_run_that_stopped_early_is_reported_with_its_exit_code(tmp_path: Path) -> None:
    nights = Simulated(tmp_path, "stops", 1)
    done = nights.night(1, code=75)
    assert done.name == "failed"
    assert "75" in done.text


def test_the_standard_must_be_of_the_same_matrix(tmp_path: Path) -> None:
    one, other = Simulated(tmp_path, "one", 1), Simulated(tmp_path, "other", 2)
    for simulated in (one, other):
        assert simulated.night(1).name == "ok"
    with pytest.raises(UsageError, match="of matrix 'one'"):
        other.nights.accept(run_id(1, "one"))
    (other.nights.folder / "last-good").write_text(run_id(1, "one"))
    done = other.night(2)
    assert done.name == "not compared"
    assert "of matrix 'one'" in done.text


def test_a_requeued_night_is_not_reported_as_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nights = Simulated(tmp_path, "again", 1)
    nights.begin(1)
    waiting = JobState("5001", "PENDING", "BeginTime", "", 1, "")
    monkeypatch.setattr(nightly, "states", lambda job: [waiting])
    assert list(nights.nights.unreported("5002")) == []
    monkeypatch.setattr(nightly, "states", lambda job: [])
    assert [lost.name for lost in nights.nights.unreported("5002")] == ["killed"]
    assert list(nights.nights.unreported("5003")) == [], "each night is reported once"


def test_more_trials_and_less_noise_find_smaller_slowdowns() -> None:
    chance = random.Random(1)
    trials = tuple(chance.gauss(0, 0.03) for _ in range(400))
    found = [
        smallest_slowdown(Noise(trials, between), count, 6)
        for count, between in ((2, 0.01), (3, 0.01), (60, 0.01), (60, 0.003))
    ]
    assert found == sorted(found, reverse=True)
    assert found[0] > 0.08
    assert found[-1] < 0.03


def test_notifications_need_no_shell(tmp_path: Path) -> None:
    program = tmp_path / "my program"
    program.write_text(f'#!/bin/sh\necho "$@" >"{tmp_path}/heard"\ncat >>"{tmp_path}/heard"\n')
    program.chmod(0o755)
    site = Nightly(textfile=str(tmp_path), notify=Notify(command=f"'{program}' --to 'you; true'"))
    done = Outcome("not begun", "", "job 7")
    assert list(tell(site, "full", done, "details\n")) == []
    assert (tmp_path / "heard").read_text() == "--to you; true not begun\ndetails\n"
    metrics = (tmp_path / "parallelism_bench_night_full.prom").read_text()
    assert 'night_outcome{matrix="full",outcome="not begun"} 1' in metrics
    assert metrics.count("} 0\n") == len(nightly.OUTCOMES) - 1
    program.unlink()
    (problem,) = tell(site, "full", done, "")
    assert "could not notify" in problem
    rules = yaml.safe_load((Path(__file__).parents[2] / "slurm" / "prometheus.yaml").read_text())
    for rule in rules["groups"][0]["rules"]:
        names = {name for name in ("night_end_seconds", "night_outcome") if name in rule["expr"]}
        assert names
        assert all(f"parallelism_bench_{name}" in metrics for name in names)


def test_the_job_begins_and_reports_a_night(tmp_path: Path) -> None:
    nights = Simulated(tmp_path, "jobs", 1)
    site = Nightly(publish=str(tmp_path / "pages"), textfile=str(tmp_path))
    words = ["jobs", "--results", str(tmp_path)]
    for day in (1, 2):
        name = nights.record(day, nights.rows())
        nights.nights.folder.mkdir(parents=True, exist_ok=True)
        (nights.nights.folder / "site.json").write_text(site.model_dump_json())
        told(night, *words, "--begin", name)
        assert ask(night, *words, "--end", name, "--code", "0")[0] == 0
    assert ask(night, *words, "--end", name, "--code", "75")[0] == 1
    pages = {page.name for page in (tmp_path / "pages").iterdir()}
    assert pages >= {f"{name}.html", "jobs-trend.html", "index.html"}
    assert f"{name}-against-good-nights.html" in pages
    assert (tmp_path / "parallelism_bench_jobs.prom").exists()
    told(night, *words, "--accept", "latest")
    listed = json.loads(told(night, *words, "--json"))
    assert listed["nights"][-1]["event"] == "accepted"
    assert "a slowdown of" in listed["power"]
    assert "a slowdown of" in told(night, *words)
    folder = ["--results", str(tmp_path)]
    assert "would remove 1 run" in told(prune, "--keep", "1", *folder, "--dry-run")
    pruned = json.loads(told(prune, "--keep", "1", *folder, "--json"))
    assert pruned["removed"] == [run_id(1, "jobs")]
    assert nights.store.run_ids() == [name]
    assert not (tmp_path / "gathered" / run_id(1, "jobs")).exists()


@pytest.mark.parametrize(("requeued", "ends"), [("", 1), ("yes", 0)])
def test_the_script_reports_whatever_ended_it(tmp_path: Path, requeued: str, ends: int) -> None:
    scripts = Path(nightly.__file__).with_name("slurm")
    (tmp_path / "python").write_text(f'#!/bin/sh\necho "$@" >>"{tmp_path}/calls"\n')
    (tmp_path / "python").chmod(0o755)
    (tmp_path / "lib.sh").write_text(
        (scripts / "lib.sh").read_text() + f"\nrun_matrix() {{ requeued={requeued}; exit 75; }}\n"
    )
    variables = {"BENCH_MATRIX": "m", "BENCH_RUN": "r", "BENCH_PYTHON": str(tmp_path / "python")}
    variables |= {"BENCH_RESULTS": str(tmp_path), "BENCH_SCRIPTS": str(tmp_path)}
    subprocess.run(
        ["bash", str(scripts / "nightly.sbatch")],
        env={
            "PATH": "/usr/bin:/bin",
            "BENCH_WORK": str(tmp_path),
            "SLURM_JOB_ID": "1",
            **variables,
        },
        check=False,
    )
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[0].startswith("-m bench night m --begin r")
    assert sum("--end r --code 75" in call for call in calls) == ends


def test_a_line_that_a_killed_process_left_unfinished_is_left_out(tmp_path: Path) -> None:
    nights = Nights(tmp_path, "smoke")
    nights.note("began", run="a", job="1")
    with (nights.folder / "nights.jsonl").open("a") as file:
        file.write('\n{"event": "end')
    nights.note("began", run="b", job="2")
    assert [event["run"] for event in nights.events()] == ["a", "b"]
