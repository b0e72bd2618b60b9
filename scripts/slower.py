"""python -m scripts.slower --before PYTHON --after PYTHON: did a change make training slower?

Trains the same cells in two environments, such as two torch versions or two states of a project.
The sides take trials in turn, and the side that begins a pair alternates. Each side verifies parity
with its own reference. Trials are compared in pairs.

Exit code 1 if a cell is slower, fails, or needs more memory afterwards; 2 for a mistake.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harness.analysis.stats import Comparison, comparison, students_t
from harness.cell.errors import UsageError
from harness.run.runner import ProgressListener

if TYPE_CHECKING:
    from harness.analysis.compare import ComparedCell, RunComparison
    from harness.analysis.selection import RunSelection
    from harness.cell.cell import Cell
    from harness.record.trial import TrialRecord

ROOT = Path(__file__).parents[1]
RUN = "change"
FALSE_ALARM_RATE = 0.002
"""Upper bound on the probability that two equal sides differ in any cell's verdicts."""
METHOD = (
    "geometric mean of the ratios within rounds, with Student's paired t interval of their"
    f" logarithms. With {100 * (1 - FALSE_ALARM_RATE):g}% confidence all intervals hold at once"
    " (Bonferroni); a difference counts if its interval excludes 1 and it is large enough"
)
READY, GO, ENDED = "ready\n", "go\n", "ended\n"


@dataclass(frozen=True)
class Work:
    matrix: str
    only: tuple[str, ...]
    settings: tuple[str, ...]
    rounds: int


class Turns(ProgressListener):
    """Waits for permission before each trial."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line.makefile("rw")

    def say(self, word: str) -> None:
        self._line.write(word)
        self._line.flush()

    def trial_started(self, cell: Cell, trial: int, position: int) -> None:
        self.say(READY)
        if self._line.readline() != GO:
            raise KeyboardInterrupt

    def trial_finished(self, cell: Cell, trial: TrialRecord) -> None:
        if trial.status != "ok":
            print(f"{cell.name}: {trial.status}: {trial.reason}", file=sys.stderr, flush=True)


def train(results: str, descriptor: int, work: Work) -> None:
    from bench.api import run
    from bench.matrix import parse_changes

    sys.path.insert(0, os.getcwd())  # for the project's modules
    turns = Turns(socket.socket(fileno=descriptor))
    run(
        matrix=work.matrix,
        only=work.only,
        settings=parse_changes(work.settings),
        trials=work.rounds,
        timed_seconds=0.0,  # without a control, whose own torch would hide the change
        results=results,
        run_id=RUN,
        listener=turns,
    )
    turns.say(ENDED)


class Side:
    """A process in one environment. `folder`: where it starts."""

    def __init__(self, name: str, python: str, folder: Path, results: Path, work: Work) -> None:
        self.name, self.results = name, results / name
        if self.results.exists():
            raise UsageError(f"{str(self.results)!r} exists; name a new folder")
        ours, theirs = socket.socketpair()
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        given = [str(self.results.resolve()), str(theirs.fileno()), json.dumps(asdict(work))]
        with theirs, ours:
            self._line = ours.makefile("rw")
            try:
                self._process = subprocess.Popen(
                    [python, __file__, "side", *given],
                    cwd=folder,
                    env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
                    pass_fds=[theirs.fileno()],
                    stdout=sys.stderr,
                )
            except OSError as error:
                raise UsageError(f"--{name} {python}: cannot start it: {error.strerror}") from None
        self.ended = False

    def wait(self) -> None:
        word = self._line.readline()
        if word == ENDED:
            self.ended = self._process.wait() == 0
        if word != READY and not self.ended:
            code = self._process.wait()
            raise UsageError(f"the side {self.name!r} ended with exit code {code}; see above")

    def take_turn(self) -> None:
        if not self.ended:
            self._line.write(GO)
            self._line.flush()
            self.wait()

    def close(self) -> None:
        if not self.ended:
            self._process.terminate()
        self._process.wait()
        self._line.close()


def alternate(sides: Sequence[Side]) -> None:
    """Lets the sides take trials in turn."""
    for side in sides:
        side.wait()
    order = list(sides)
    while not all(side.ended for side in sides):
        for side in order:
            side.take_turn()
        order.reverse()


def compared(before: Path, after: Path) -> RunComparison:
    from harness.analysis.compare import compare_sides
    from harness.analysis.selection import select
    from harness.record.store import Store

    first, second = (
        _without_files(select(folder.name, Store(folder).load(steps=False)))
        for folder in (before, after)
    )
    found = compare_sides(first, second)
    confidence = 1 - FALSE_ALARM_RATE / max(1, found.comparisons)
    lines = tuple(_paired(line, confidence) for line in found.lines)
    return dataclasses.replace(found, lines=lines, test=METHOD, confidence=confidence)


def _without_files(side: RunSelection) -> RunSelection:
    """Returns the side with ids independent of a project's files."""
    from harness.cell.cell import without_folder

    cells = []
    for measured in side.cells:
        cell = measured.cell
        plain = cell.model_copy(
            update={
                "strategy": without_folder(cell.strategy),
                "strategy_digest": "",
                "workload": without_folder(cell.workload),
                "workload_digest": "",
                "defaults": {},
            }
        )
        result = dataclasses.replace(measured.result, cell=plain, cell_id=plain.id)
        cells.append(dataclasses.replace(measured, result=result))
    return dataclasses.replace(side, cells=tuple(cells))


def paired_ratio(
    first: Mapping[int, float], second: Mapping[int, float], confidence: float
) -> Comparison | None:
    """Returns the ratio of two sides' figures by round, in which drift cancels; None if they have
    no round in common."""
    logs = [math.log(first[r] / second[r]) for r in sorted(first.keys() & second.keys())]
    if not logs:
        return None
    half = None
    if len(logs) > 1:
        half = students_t(confidence, len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return comparison(statistics.fmean(logs), half, len(logs))


def _paired(line: ComparedCell, confidence: float) -> ComparedCell:
    if line.throughput is None or line.first is None or line.second is None:
        return line
    after, before = line.second.result, line.first.result
    speed = paired_ratio(after.speed.by_round, before.speed.by_round, confidence)
    if speed is None:
        return line
    memory = line.memory and paired_ratio(
        after.memory.peak_by_round, before.memory.peak_by_round, confidence
    )
    return dataclasses.replace(line, throughput=speed, memory=memory, kind=speed.verdict)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m scripts.slower", description=__doc__)
    for side in ("before", "after"):
        parser.add_argument(f"--{side}", required=True, metavar="PYTHON")
        parser.add_argument(f"--{side}-folder", type=Path, default=Path())
    parser.add_argument("--matrix", default="smoke")
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--set", dest="settings", action="append", default=[])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--summary", type=Path, help="Markdown file that the table is added to.")
    parser.add_argument("--json", action="store_true")
    return parser


def measure(arguments: Sequence[str]) -> int:
    from reports.runs import markdown

    given = _parser().parse_args(arguments)
    if given.rounds < 2:
        raise UsageError(f"--rounds {given.rounds}: an interval needs at least 2")
    work = Work(given.matrix, tuple(given.only), tuple(given.settings), given.rounds)
    sides = []
    try:
        for name in ("before", "after"):
            python, folder = getattr(given, name), getattr(given, f"{name}_folder")
            sides.append(Side(name, python, folder, given.results, work))
        alternate(sides)
    finally:
        for side in sides:
            side.close()
    found = compared(*(side.results for side in sides))
    text = markdown(found)
    print(json.dumps(found.as_json()) if given.json else text, flush=True)
    if given.summary:
        with given.summary.open("a") as sink:
            sink.write(text)
    if not found.comparisons and not found.regressions:
        raise UsageError("no cell could be compared; see the reasons in the table")
    return 1 if found.regressions else 0


def main(arguments: Sequence[str]) -> int:
    try:
        if arguments[:1] == ["side"]:
            results, descriptor, work = arguments[1:]
            train(results, int(descriptor), Work(**json.loads(work)))
            return 0
        return measure(arguments)
    except UsageError as mistake:
        print(f"slower: {mistake}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
