"""Faults that are injected into a results folder and the trials that write to it: how each is made,
and what the record has to say of it."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow.parquet as pq

from harness.launch.launcher import Launcher
from harness.record.check import check_folder, quarantine
from harness.record.plan import Plan
from harness.record.schema import VERSION, VERSION_KEY
from harness.record.store import Store
from harness.run.runner import Runner
from harness.spec.cell import Cell
from tests.ranks.conftest import Silent, cell


@dataclass
class Place:
    """Where faults are injected."""

    store: Store
    launcher: Launcher
    chance: random.Random
    temporary: Path
    """The folder for temporary files of runs that are processes of their own."""
    taken_out: set[str] = field(default_factory=set)
    """Names of trial files that a fault damaged, which were then quarantined."""

    def trial(self, tried: Cell) -> tuple[str, str]:
        """Runs a cell once, as a run of its own; returns its status and reason."""
        plan = Plan.new("campaign", [tried], 1, [])
        runner = Runner(self.store, plan, launcher=lambda packages: self.launcher)
        runner.begin()
        assert runner.run(Silent())
        trial = self.store.load([plan.run_id], steps=False).trials.iloc[0]
        return str(trial["status"]), str(trial["reason"])

    def files(self) -> list[Path]:
        """Of all trials that are recorded."""
        return sorted((self.store.folder / "trials").glob("*/*.parquet"))


Inject = Callable[[Place], None]
"""Injects a fault, and raises AssertionError where what follows is not what has to."""


def of_a_rank(
    fault: str, status: str, reason: str, devices: int = 2, first_step: int = 0
) -> Inject:
    """One of the plug-in's faults, at a random step of the last rank."""

    def inject(place: Place) -> None:
        tried = cell(
            "faulty",
            devices=devices,
            options={"fault": fault, "at_step": place.chance.randrange(first_step, 8)},
            time_limit_seconds=20,
        )
        if fault == "out_of_memory":
            tried = replace_axes(tried, memory_limit_bytes=256 * 2**20)
        found = place.trial(tried)
        assert found[0] == status, found
        assert re.search(reason, found[1]), found

    return inject


def replace_axes(tried: Cell, **axes: object) -> Cell:
    return tried.model_copy(update=axes)


def nothing(place: Place) -> None:
    """No fault: a good trial is recorded as one."""
    assert place.trial(cell("ddp"))[0] == "ok"


def damage(change: Callable[[bytearray, random.Random], bytes]) -> Inject:
    """Damages the file of a recorded trial: readers leave it out, the check finds it and moves it,
    and the rest is read as before."""

    def inject(place: Place) -> None:
        files = place.files()
        if not files:
            nothing(place)
            files = place.files()
        file = place.chance.choice(files)
        content = change(bytearray(file.read_bytes()), place.chance)
        file.write_bytes(content)
        problems = check_folder(place.store).problems
        assert [place.store.folder / problem.file for problem in problems] == [file], problems
        assert quarantine(place.store, problems[0]).read_bytes() == content
        place.taken_out.add(str(file))

    return inject


def cut(content: bytearray, chance: random.Random) -> bytes:
    return bytes(content[: chance.randrange(len(content))])


def flipped(content: bytearray, chance: random.Random) -> bytes:
    """With a flipped bit in the first page of data, which every file has behind its magic number
    and the header of the page."""
    content[chance.randrange(40, 60)] ^= 1 << chance.randrange(8)
    return bytes(content)


def foreign(content: bytearray, chance: random.Random) -> bytes:
    return chance.randbytes(2000)


def of_the_future(place: Place) -> None:
    """A file of a later schema: refused in words, and read again once it is gone."""
    nothing(place)
    file = place.chance.choice(place.files())
    before = file.read_bytes()
    rows = pq.read_table(file)
    pq.write_table(rows.replace_schema_metadata({VERSION_KEY: str(VERSION + 1)}), file)
    (problem,) = check_folder(place.store).problems
    assert not problem.damaged
    assert "newer version" in problem.what
    file.write_bytes(before)


def folder_removed(place: Place) -> None:
    """Somebody removes the copies that are only there to be read faster, and empty folders."""
    shutil.rmtree(place.store.folder / "gathered", ignore_errors=True)
    nothing(place)


class Run:
    """A run as a process of its own, which is stopped in the middle of its trials."""

    def __init__(self, place: Place) -> None:
        self.place = place
        matrix = place.temporary.parent / "campaign.yaml"
        matrix.write_text(
            "trials: 3\ntimed_seconds: 0\ndefaults: {workload: llama-nano, sequence_length: 32,"
            " batch: 8, devices: 2, warmup_steps: 1, timed_steps: 3}\ncells: [{strategy: ddp}]\n"
        )
        self.name = f"campaign-{place.chance.randrange(10**9)}"
        self.words = ["--matrix", str(matrix), "--run", self.name]
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        words = ["bench", "run", *self.words, "--results", str(self.place.store.folder)]
        return subprocess.Popen(
            [sys.executable, "-m", *words, "--no-report"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "TMPDIR": str(self.place.temporary)},
            start_new_session=True,
        )

    def recorded(self) -> int:
        return len(list((self.place.store.folder / "trials" / self.name).glob("*.parquet")))

    def until_in_the_middle(self) -> None:
        deadline = time.monotonic() + 90
        while self.recorded() < 1 and self.process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(self.place.chance.uniform(0.0, 0.6))

    def finish(self) -> None:
        """Goes on with the run until it ends; all of its trials are there once, and good."""
        if self.process.poll() is None:
            self.process.wait(timeout=120)
        if self.recorded() < 3:
            self.process = self.start()
            assert self.process.wait(timeout=120) == 0
        trials = self.place.store.load([self.name], steps=False).trials
        good = trials[trials["status"] == "ok"]
        assert sorted(good["trial"]) == [0, 1, 2], trials[["trial", "status", "reason"]]
        assert set(trials["status"]) <= {"ok", "interrupted", "failed"}


def of_a_run(signals: tuple[int, ...], pause: float = 0.0) -> Inject:
    """Signals to the process of a run, this many seconds apart; then the run goes on."""

    def inject(place: Place) -> None:
        run = Run(place)
        run.until_in_the_middle()
        for number in signals:
            if run.process.poll() is None:
                os.kill(run.process.pid, number)
                time.sleep(pause)
        run.finish()

    return inject


def two_runs(place: Place) -> None:
    """Two runs that write to one folder at the same time, and a reader."""
    runs = [Run(place), Run(place)]
    while any(run.process.poll() is None for run in runs):
        place.store.load(steps=False)
        time.sleep(0.2)
    for run in runs:
        run.finish()


HANGS = r"^hangs: nothing was finished for \d+ s in (step \d+|set-up)"
KINDS: dict[str, Inject] = {
    "no fault": nothing,
    "a rank raises": of_a_rank("raises", "failed", "rank 1: ValueError: the planted mistake"),
    "a rank raises in set-up": of_a_rank("raises_in_setup", "failed", "mistake in setup"),
    "a rank is killed": of_a_rank("killed", "failed", "rank 1 was killed by SIGKILL"),
    "a rank exits": of_a_rank("exits", "failed", "rank 1 left with exit code 0"),
    "a rank has a segmentation fault": of_a_rank("segfaults", "failed", "killed by SIGSEGV"),
    "a loss is no number": of_a_rank("nan", "diverged", "not finite at step"),
    "a rank floods its log": of_a_rank("floods_its_log", "failed", "the planted flood"),
    "a rank writes no text": of_a_rank("writes_no_text", "failed", "the planted bytes"),
    "a rank has no memory": of_a_rank("out_of_memory", "out_of_memory", "allocate memory"),
    "a rank starts many children": of_a_rank("forks", "failed", "the planted children"),
    "a collective is never entered": of_a_rank("hangs", "timeout", HANGS + ".*rank 1 never"),
    "a rank is stopped": of_a_rank("stops_itself", "timeout", HANGS + ".*rank 1 never"),
    "a rank loops in C": of_a_rank("loops_in_c", "timeout", HANGS, first_step=1),
    "a rank leaves a child": of_a_rank("leaves_children", "ok", "^$"),
    "a file is cut off": damage(cut),
    "a file has a flipped bit": damage(flipped),
    "a file is of another tool": damage(foreign),
    "a file is of the future": of_the_future,
    "copies are removed": folder_removed,
    "a run is killed": of_a_run((signal.SIGKILL,)),
    "a run is asked to end": of_a_run((signal.SIGTERM,)),
    "a run is suspended": of_a_run((signal.SIGSTOP, signal.SIGCONT), pause=2.0),
    "two runs write to one folder": two_runs,
}
"""By what they are called in the table."""
