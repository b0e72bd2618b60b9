"""The GPU check's driver, run on the CPU with probes that succeed, die or hang."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import typer

from bench.cli.doctor import CheckOptions, check_gpu, doctor
from bench.gpu_check import driver as driver_module
from bench.gpu_check.driver import CheckDriver, Timing, interleaved
from bench.gpu_check.limited_process import Limits, ProcessEnd
from bench.gpu_check.out_folder import Folders, packed
from bench.gpu_check.outcomes import NO_TIME, Report, StepOutcome
from bench.gpu_check.steps import CheckPlan, Step
from harness.spec.errors import UsageError
from tests.commands import told
from tests.conftest import runs
from tests.gpu.check_steps import FOLDER, begun

ROOT = Path(__file__).parents[2]


def step(name: str, probe: str = "holds", limit: float = 60) -> dict[str, object]:
    """Returns a step with one of the probes in check_steps."""
    probe = f"tests.gpu.check_steps:{probe}"
    return {"name": name, "claim": "it runs", "limit_seconds": limit, "probe": probe}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder in which probes record their starts; it also holds a new cache."""
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setenv("PARALLELISM_BENCH_CACHE", str(tmp_path / "cache"))
    return tmp_path


def plan_file(folder: Path, **sections: object) -> Path:
    file = folder / "plan.yaml"
    file.write_text(json.dumps(sections))
    return file


def check(folder: Path, plan: Path, resume: bool = False, **more: object) -> tuple[int, Report]:
    """Runs the check on the CPU; returns its exit code and report."""
    out, code = folder / "not" / "there", 0
    options = CheckOptions(out, resume, 280, "cpu", plan=plan, **more)  # type: ignore[arg-type]
    try:
        check_gpu(options)
    except typer.Exit as ended:
        code = ended.exit_code
    return code, Report.read(out / "report.json")


def drive(folder: Path, plan: dict[str, object], timing: Timing) -> Report:
    """Runs a driver with limits that are short enough for a test; returns its report."""
    folders = Folders.prepare(folder / "out")
    driver = CheckDriver(
        CheckPlan.model_validate(plan), folders.start("cpu"), folders, timing, print
    )
    driver.run()
    return driver.report


def words_of(plan: Path, out: Path) -> list[str]:
    """Returns the command line of a five-minute check on the CPU."""
    words = [sys.executable, "-m", "bench", "doctor", "--gpu-check", "--minutes", "5"]
    return [*words, "--device", "cpu", "--steps", str(plan), "--out", str(out)]


def verdicts(report: Report) -> dict[str, tuple[str, int | None]]:
    return {o.name: (o.verdict, o.exit_code) for o in report.outcomes}


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_without_a_gpu_it_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--device cpu"):
        check_gpu(CheckOptions(tmp_path / "out"))
    assert not list(tmp_path.iterdir())


def test_a_missing_folder_is_made_before_anything_runs(folder: Path) -> None:
    code, report = check(folder, plan_file(folder, probes=[step("one")]))
    assert (code, verdicts(report)) == (0, {"one": ("confirmed", 0)})
    assert report.stand_in
    (folder / "file").touch()
    with pytest.raises(UsageError, match="file"):
        check_gpu(CheckOptions(folder / "file", device="cpu", plan=folder / "plan.yaml"))
    assert begun("holds", folder) == begun("holds", folder)[:1]


def test_json_is_the_report_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CheckDriver, "run", lambda self: self.say("something"))
    plan, out = plan_file(folder, probes=[step("one")]), folder / "out"
    words = ("--gpu-check", "--device", "cpu", "--steps", str(plan), "--out", str(out))
    assert json.loads(told(doctor, *words, "--json"))["device"] == "cpu"
    assert "something" in told(doctor, *words[:-1], str(folder / "other"))


def test_settled_steps_are_not_repeated_unless_they_are_named(folder: Path) -> None:
    plan = plan_file(folder, probes=[step("one")], lanes=[[step("two")], [step("three")]])
    check(folder, plan)
    assert len(begun("holds", folder)) == 3
    check(folder, plan, resume=True)
    assert len(begun("holds", folder)) == 3
    check(folder, plan, resume=True, again=("two",))
    assert len(begun("holds", folder)) == 4
    with pytest.raises(UsageError, match="nowhere"):
        check(folder, plan, resume=True, again=("nowhere",))
    with pytest.raises(UsageError, match="--resume"):
        check(folder, plan)


def test_a_step_that_dies_is_recorded_with_its_last_lines(folder: Path) -> None:
    plan = plan_file(folder, lanes=[[step("bad", "dies"), step("good")]])
    code, report = check(folder, plan)
    assert code == 1
    assert verdicts(report) == {
        "bad": ("refuted", -signal.SIGKILL),
        "good": ("confirmed", 0),
    }
    bad = report.outcome("bad")
    assert bad is not None
    assert bad.log[-1] == "the last thing it said"
    check(folder, plan, resume=True)
    assert len(begun("dies", folder)) == 1, "a step that died is settled"


def test_a_probe_that_hung_goes_last_in_the_next_call(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[str] = []
    monkeypatch.setattr(CheckDriver, "_step", lambda self, step, *rest: began.append(step.name))
    folders = Folders.prepare(folder / "out")
    hung = StepOutcome("stuck", "probes", "it runs", "not checked", "", seconds=1e9)
    report = replace(folders.start("cpu"), outcomes=(hung,))
    steps = {"probes": [step("stuck"), step("one")], "lanes": [[step("two")]]}
    CheckDriver(CheckPlan.model_validate(steps), report, folders, Timing(120), print).run()
    assert list(dict.fromkeys(began)) == ["one", "two", "stuck"]


def test_a_step_that_hangs_is_ended_with_all_its_processes(folder: Path) -> None:
    lanes = [[step("stuck", "hangs", limit=2), step("good")]]
    report = drive(folder, {"lanes": lanes}, Timing(120, stop_seconds=1))
    assert verdicts(report) == {"stuck": ("not checked", None), "good": ("confirmed", 0)}
    left = [*begun("hangs", folder), *begun("children", folder)]
    assert len(left) == 2
    assert not [pid for pid in left if psutil.pid_exists(pid) and runs(psutil.Process(pid))]
    (folder / "free").touch()
    folders = Folders.prepare(folder / "out")
    again = CheckDriver(
        CheckPlan(lanes=[[Step(**step("stuck", "hangs"))]]),
        folders.resume("cpu"),
        folders,
        Timing(60),
        print,
    )
    again.run()
    assert verdicts(again.report)["stuck"] == ("confirmed", 0)


def test_a_step_for_which_no_time_is_left_waits_for_the_next_call(folder: Path) -> None:
    plan = {"probes": [step("first")], "later": [[step("last", limit=50)]]}
    report = drive(folder, {"lanes": [[step("last")]]}, Timing(budget_seconds=5))
    assert verdicts(report) == {"last": ("not checked", None)}
    assert not begun("holds", folder)
    assert [s.name for _, s in CheckPlan.model_validate(plan).steps()] == ["first", "last"]


def test_a_call_that_is_killed_leaves_a_report_that_the_next_call_goes_on_with(
    folder: Path,
) -> None:
    """The killed call's processes end, and its settled steps are not run again."""
    plan = plan_file(folder, probes=[step("one")], lanes=[[step("stuck", "hangs")], [step("two")]])
    out = folder / "out"
    command = words_of(plan, out)
    killed = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    wait_until(lambda: bool(begun("children", folder)))
    stuck = psutil.Process(begun("hangs", folder)[0])
    killed.kill()
    killed.wait()
    wait_until(lambda: not runs(stuck))
    report = Report.read(out / "report.json")
    assert verdicts(report)["one"] == ("confirmed", 0)
    assert verdicts(report)["stuck"] == ("not checked", None)
    names = {file.name for file in out.iterdir()} - {".partial"}
    assert names == {"report.json", "logs.tgz"}
    with tarfile.open(out / "logs.tgz") as archive:
        assert "logs/one.out" in archive.getnames()
    (folder / "free").touch()
    ended = subprocess.run([*command, "--resume"], cwd=ROOT, stdout=subprocess.DEVNULL)
    assert ended.returncode == 0
    report = Report.read(out / "report.json")
    assert verdicts(report) == dict.fromkeys(("one", "stuck", "two"), ("confirmed", 0))
    assert (len(begun("holds", folder)), len(begun("hangs", folder))) == (2, 2)
    for pid in begun("children", folder):  # the killed step could not end them
        os.kill(pid, signal.SIGKILL)


def test_ctrl_c_ends_the_steps_and_keeps_what_there_is(folder: Path) -> None:
    plan = plan_file(folder, probes=[step("one")], lanes=[[step("stuck", "waits")]])
    command = words_of(plan, folder / "out")
    stopped = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    wait_until(lambda: bool(begun("waits", folder)))
    stopped.send_signal(signal.SIGTERM)
    assert stopped.wait(60) == 130
    report = Report.read(folder / "out" / "report.json")
    assert verdicts(report) == {"one": ("confirmed", 0), "stuck": ("not checked", None)}


def test_a_check_ends_if_nothing_trains_and_tries_again(folder: Path) -> None:
    plan = plan_file(
        folder, probes=[step("one")], gate=step("gate", "trains_nothing"), alone=[step("two")]
    )
    code, report = check(folder, plan)
    assert (code, verdicts(report)) == (1, {"one": ("confirmed", 0), "gate": ("refuted", 0)})
    code, _ = check(folder, plan, resume=True)
    assert (code, len(begun("gate", folder))) == (1, 2)
    (folder / "fixed").touch()
    code, report = check(folder, plan, resume=True)
    assert (code, set(verdicts(report).values())) == (0, {("confirmed", 0)})
    check(folder, plan, resume=True)
    assert (len(begun("gate", folder)), len(begun("holds", folder))) == (3, 2)


@pytest.mark.parametrize("budget", [2, 4])
def test_a_gate_without_enough_time_waits_for_the_next_call(
    folder: Path, capsys: pytest.CaptureFixture[str], budget: float
) -> None:
    """It is not begun with 2 s, and ended early with 4 s, of which stopping it keeps 2."""
    sections = {"gate": step("gate", "hangs"), "alone": [step("two")]}
    folders = Folders.prepare(folder / "out")
    timing = Timing(budget, stop_seconds=2, least_seconds=1)
    plan = CheckPlan.model_validate(sections)
    driver = CheckDriver(plan, folders.start("cpu"), folders, timing, print)
    driver.run()
    assert not driver.at_the_gate
    assert verdicts(driver.report) == {"gate": ("not checked", None)}
    said = capsys.readouterr().out
    assert NO_TIME in said
    assert "nothing trained" not in said


def test_a_check_with_no_time_for_the_gate_is_no_failure(folder: Path) -> None:
    plan = plan_file(folder, gate=step("gate"), alone=[step("two")])
    options = CheckOptions(folder / "out", budget_seconds=0, device="cpu", plan=plan)
    check_gpu(options)
    report = Report.read(folder / "out" / "report.json")
    assert verdicts(report) == {"gate": ("not checked", None)}


def test_another_machine_goes_on_with_the_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the same machine, the check also continues if its report was deleted."""
    plan = plan_file(folder, probes=[step("one")])
    check(folder, plan)
    monkeypatch.setenv("PARALLELISM_BENCH_CACHE", str(folder / "other cache"))
    code, report = check(folder, plan, resume=True)
    assert (code, verdicts(report)["one"]) == (0, ("confirmed", 0))
    out = folder / "not" / "there"
    assert Folders.prepare(out).log("one").with_suffix(".out").exists()
    (out / "report.json").unlink()
    check(folder, plan, resume=True)
    assert len(begun("holds", folder)) == 1
    with pytest.raises(UsageError, match="device"):
        Folders.prepare(out).resume("cuda")
    monkeypatch.setenv("PARALLELISM_BENCH_CACHE", str(folder / "third cache"))
    with pytest.raises(UsageError, match="no report"):
        Folders.prepare(folder / "new").resume("cpu")
    (out / "report.json").write_text("[]")
    with pytest.raises(UsageError, match=re.escape(str(out / "report.json"))):
        Folders.prepare(out).resume("cpu")


def test_two_checks_never_share_a_working_folder(folder: Path) -> None:
    first = Folders.prepare(folder / "a")
    with first.locked(), pytest.raises(UsageError, match="another"), first.locked():
        pass
    with first.locked():
        pass


def test_records_of_real_cells_come_back(folder: Path) -> None:
    """Covers a run that trains on the CPU, a wrong command, and one that runs out of time."""
    small = "--only single --trials 1 --timed-seconds 0 --set workload=llama-micro"
    words = {
        "cell": f"run --matrix smoke {small} --set batch=2 --set sequence_length=16",
        "mistake": "run --matrix nowhere",
        "slow": "run --matrix full",
    }
    lane = [
        {"name": name, "claim": "it runs", "limit_seconds": 120, "words": text}
        for name, text in words.items()
    ]
    lane[-1]["limit_seconds"] = 0.3
    code, report = check(folder, plan_file(folder, gate=lane[0], lanes=[lane[1:]]))
    assert code == 1
    assert {o.name: o.verdict for o in report.outcomes} == {
        "cell": "confirmed",
        "mistake": "refuted",
        "slow": "not checked",
    }
    out = folder / "not" / "there"
    assert len((out / "cells.txt").read_text().splitlines()) == 1
    with open(out / "cells.csv", newline="") as file:
        assert [row["status"] for row in csv.DictReader(file)] == ["ok"]
    with tarfile.open(out / "results.tgz") as archive:
        assert [name for name in archive.getnames() if name.startswith("results/runs/cell-")]


def test_an_archive_that_would_be_too_large_lacks_the_largest_files(
    tmp_path: Path,
) -> None:
    (tmp_path / "logs").mkdir()
    for name, size in (("small", 1000), ("large", 50_000), ("larger", 60_000)):
        (tmp_path / "logs" / name).write_bytes(os.urandom(size))
    content, left_out = packed(tmp_path, "logs", 55_000)
    assert left_out == ["logs/larger"]
    assert 50_000 < len(content) <= 55_000
    assert packed(tmp_path, "nothing") == (b"", [])


def test_lanes_take_turns_where_one_follows_the_other() -> None:
    a, b, c, d = (Step(**step(name)) for name in "abcd")  # type: ignore[arg-type]
    assert interleaved([[a, b, c], [d]]) == [a, d, b, c]


def test_lanes_share_the_cores_and_several_gpus_make_one_lane(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several GPUs, a step uses all of them."""
    taken: list[tuple[str, tuple[int, ...]]] = []

    def run_limited(words: list[str], log: Path, limits: Limits, *_: object) -> ProcessEnd:
        taken.append((words[1], limits.cores))
        Path(f"{log}.out").write_text('{"verdict": "confirmed"}')
        Path(f"{log}.err").touch()
        return ProcessEnd(0, 1.0)

    monkeypatch.setattr(driver_module, "run_limited", run_limited)
    monkeypatch.setattr(driver_module, "allowed_cores", lambda: list(range(8)))
    names = ("a", "b", "c", "d")
    plan = {"lanes": [[step(name, name)] for name in names]}
    drive(folder, plan, Timing(120))
    shares = {cores for _, cores in taken}
    assert shares == {(0, 1), (2, 3), (4, 5), (6, 7)}
    taken.clear()
    monkeypatch.setattr(CheckDriver, "_gpus", lambda self: 8)
    (folder / "out" / "report.json").unlink()
    drive(folder, plan, Timing(120))
    assert [cores for _, cores in taken] == [tuple(range(8))] * 4
