"""How often a comparison is right on this machine: a cell against itself, and against one that is
slower by 3 %.

A comparison takes the default number of trials of each cell, one after the other in random order,
or one of each and then heats, as in the race. It shares none with another comparison.
BENCH_COMPARISONS sets their number (20). Half of a cell's comparisons with itself run next to a
busy neighbour, which computes on one core for some of the rounds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bench.matrix import DEFAULT_TRIALS
from harness.analysis.estimates import estimates_of
from harness.analysis.stats import SpeedVerdict
from harness.analysis.stats import ratio as over
from harness.cell.cell import Cell
from harness.launch.interleaved import InterleavedLauncher, Launch
from harness.launch.launcher import Launcher
from harness.launch.outcome import Outcome
from harness.record.trial import TrialRecord
from harness.seam.registry import validate
from harness.workloads import make_workload, prepare_data
from harness.workloads.counts import model_facts
from tests.benchmarks.conftest import Ratio
from tests.unit.recording import figures

COMPARISONS = int(os.environ.get("BENCH_COMPARISONS", "20"))
SLOWER = {"cell": 0.0, "same": 0.0, "slower": 3.0}
"""Percentage added to the step's time, by the name of the cell."""
Take = Callable[[int, Sequence[str]], list[TrialRecord]]
"""Runs a trial of each of these cells in this order. The number is that of the round."""


def launch_of(name: str, devices: int, timed_steps: int) -> Launch:
    cell = Cell(
        strategy="slowed",
        options={"percent": SLOWER[name]},
        devices=devices,
        workload="llama-nano",
        global_batch=8,
        sequence_length=64,
        warmup_steps=3,
        parity_steps=3,
        timed_steps=timed_steps,
    )
    workload = make_workload(cell.workload)
    data = prepare_data(cell.data, workload, cell.sequence_length)
    return Launch(cell, data, validate(cell, workload)[1].processes)


def recorded(number: int, name: str, launch: Launch, outcome: Outcome) -> TrialRecord:
    """Returns the trial with the cell's name as its id, because equal cells have the same id."""
    assert outcome.status == "ok", outcome.reason
    facts = model_facts(make_workload(launch.cell.workload), launch.cell.sequence_length)
    trial = figures(launch.cell, outcome.answers, facts, None)
    return dataclasses.replace(trial, cell_id=name, trial=number)


def separate(launcher: Launcher) -> Take:
    """One trial after the other: DDP on two ranks, 10 steps."""

    def take(number: int, names: Sequence[str]) -> list[TrialRecord]:
        launches = [(name, launch_of(name, 2, 10)) for name in names]
        return [
            recorded(number, name, launch, launch.run(launcher, None)) for name, launch in launches
        ]

    return take


def in_heats(launcher: Launcher, interleaved: InterleavedLauncher) -> Take:
    """A separate trial of each cell, then heats: one rank, 60 steps."""

    def take(number: int, names: Sequence[str]) -> list[TrialRecord]:
        launches = [launch_of(name, 1, 60) for name in names]
        if number:
            outcomes = interleaved.together(launches)
        else:
            outcomes = [launch.run(launcher, None) for launch in launches]
        trials = zip(names, launches, outcomes, strict=True)
        return [recorded(number, *trial) for trial in trials]

    return take


@pytest.fixture
def interleaved(plugin: object, launcher: Launcher) -> Iterator[InterleavedLauncher]:
    with contextlib.closing(InterleavedLauncher(["bench_plugin"], 2)) as found:
        for pid in found.pids:
            launcher.ignore_pid(pid)
        yield found


def rounds(
    take: Take, names: Sequence[str], count: int, busy: bool, rng: random.Random
) -> list[TrialRecord]:
    """Runs rounds. `busy`: a neighbour computes on one core during some of them."""
    found = []
    from_round, to_round = sorted(rng.sample(range(count + 1), 2)) if busy else (0, 0)
    neighbour: subprocess.Popen[bytes] | None = None
    try:
        for number in range(count):
            if busy and number == from_round:
                neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            if neighbour and number == to_round:
                neighbour.kill()
                neighbour.wait()
                neighbour = None
            found += take(number, rng.sample(names, len(names)))
    finally:
        if neighbour:
            neighbour.kill()
            neighbour.wait()
    return found


def verdict(trials: Sequence[TrialRecord], name: str) -> SpeedVerdict:
    cells = estimates_of(trials).cells
    return over(cells[name], cells["cell"]).verdict


def count_verdicts(
    take: Take, trials: int, benchmark: BenchmarkFixture, ratio: Ratio, how: str, wanted: str
) -> None:
    """Counts false alarms of a cell against itself, and how often a 3 % difference is found."""
    rng, alarms, seen, speeds = random.Random(1), [], [], []

    def compare() -> None:
        taken = rounds(take, ["cell", "same"], trials, len(alarms) % 2 == 1, rng)
        alarms.append(verdict(taken, "same") != "no difference seen")
        taken = rounds(take, ["cell", "slower"], trials, False, rng)
        seen.append(verdict(taken, "slower") == "slower")
        speeds.extend(trial.samples_per_second or 0.0 for trial in taken if trial.cell_id == "cell")

    benchmark.pedantic(compare, rounds=COMPARISONS)
    spread = statistics.stdev(speeds) / statistics.fmean(speeds)
    ratio(
        f"spread of {len(speeds)} trials of one cell, {how}, standard deviation over mean",
        [spread],
        "",
    )
    ratio(
        f"A/A alarms in {len(alarms)} comparisons of {trials} trials, {how}, share",
        [statistics.fmean(alarms)],
        "at most 0.01",
    )
    ratio(
        f"A/B of 3 %, {how}, seen in {len(seen)} comparisons, share",
        [statistics.fmean(seen)],
        wanted,
    )


@pytest.mark.timeout(120 + 60 * COMPARISONS)
@pytest.mark.benchmark(group="verdicts: all rounds of all comparisons")
def test_default_trials(benchmark: BenchmarkFixture, ratio: Ratio, launcher: Launcher) -> None:
    count_verdicts(separate(launcher), DEFAULT_TRIALS, benchmark, ratio, "one after the other", "")


@pytest.mark.timeout(120 + 240 * COMPARISONS)
@pytest.mark.benchmark(group="verdicts: all rounds of all comparisons")
def test_heats(
    benchmark: BenchmarkFixture,
    ratio: Ratio,
    launcher: Launcher,
    interleaved: InterleavedLauncher,
) -> None:
    take = in_heats(launcher, interleaved)
    count_verdicts(take, 1 + DEFAULT_TRIALS, benchmark, ratio, "in heats", "at least 0.95")
