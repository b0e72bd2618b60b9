"""Nights of a matrix: their folder, their judgement, and the report of how each one ended."""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.cluster.jobs import states, submissions
from bench.cluster.site import Nightly
from bench.select import find_sides
from harness.analysis.compare import RunComparison, compare_sides
from harness.analysis.history import Series, histories
from harness.analysis.nights import (
    MOST_NIGHTS,
    judged,
    power_sentence,
    rates,
    recorded_noise,
    where,
)
from harness.analysis.selection import MeasuredCell, measured, select
from harness.cell.durable import write_atomically
from harness.cell.errors import UsageError
from harness.record.plan import kept_plan, matrix_name
from harness.record.store import Store
from harness.record.trial import NOT_LAUNCHED

OUTCOMES = ("ok", "suspected", "regression", "not compared", "failed", "killed", "not begun")
"""How nights end. Later nights find the last two, whose jobs could not report anything."""
FINE = OUTCOMES[:2]
TREND_NIGHTS = 60
"""Number of runs in the trend, and in the test for slow drift."""
METRICS = """\
# HELP parallelism_bench_night_end_seconds When the last night ended, in seconds since 1970.
# TYPE parallelism_bench_night_end_seconds gauge
parallelism_bench_night_end_seconds{{matrix="{matrix}"}} {now}
# HELP parallelism_bench_night_outcome Outcome of the last night: 1 for it, 0 for others.
# TYPE parallelism_bench_night_outcome gauge
"""


@dataclass(frozen=True)
class Outcome:
    name: str
    run_id: str
    text: str
    suspected: tuple[str, ...] = ()
    """Ids of cells that are slower if the next night shows it too."""
    against: tuple[RunComparison, ...] = ()


class Nights:
    """Folder `slurm/nightly/MATRIX` of a results folder."""

    def __init__(self, results: Path, matrix: str) -> None:
        self.results, self.matrix, self.store = results, matrix_name(matrix), Store(results)
        self.folder = results / "slurm" / "nightly" / self.matrix
        self._measured: dict[str, list[MeasuredCell]] = {}
        self._good, self._events = self.folder / "last-good", self.folder / "nights.jsonl"

    def site(self) -> Nightly:
        return Nightly.model_validate_json((self.folder / "site.json").read_text())

    def events(self) -> list[dict[str, Any]]:
        """Returns what was noted, without a line that a killed process left unfinished."""
        noted = []
        for line in self._events.read_text().splitlines() if self._events.exists() else ():
            with contextlib.suppress(ValueError):
                noted.append(json.loads(line))
        return noted

    def note(self, event: str, **details: object) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self._events, "a") as file:
            # Begins a line of its own, even after an unfinished one.
            file.write("\n" + json.dumps({"event": event, "at": int(time.time()), **details}))

    def good(self) -> list[str]:
        """Returns ids of good nights, oldest first. Raises UsageError for another matrix's run."""
        listed = self._good.read_text().split() if self._good.exists() else []
        return [self._of_this_matrix(run_id) for run_id in listed if run_id in self.store.run_ids()]

    def accept(self, run_id: str) -> None:
        """Makes a run the only standard, which acknowledges all changes until then."""
        self.note("accepted", run=self._of_this_matrix(run_id))
        write_atomically(self._good, f"{run_id}\n")

    def _of_this_matrix(self, run_id: str) -> str:
        if (other := matrix_name(self.store.run_row(run_id)["matrix"])) != self.matrix:
            raise UsageError(
                f"run {run_id!r} is of matrix {other!r} and cannot be a standard for"
                f" {self.matrix!r}; name a run of it with: bench night {self.matrix} --accept RUN"
            )
        return run_id

    def unreported(self, job: str = "") -> Iterator[Outcome]:
        """Yields nights that were killed or never began, once each. `job`: the running one."""
        events = self.events()
        reported = {event["job"] for event in events if event["event"] == "ended"}
        began = {event["job"]: event["run"] for event in events if event["event"] == "began"}
        ours = [s.job for s in submissions(self.results) if self._is_ours(s.matrix, s.run_id)]
        before = ours[: ours.index(job)] if job in ours else ours
        for other in dict.fromkeys((*began, *before)):
            now = [f"{state.state} {state.reason}".strip() for state in states(other)]
            alive = any(state.startswith(("RUNNING", "COMPLETING")) for state in now)
            requeued = other in began and any(state.startswith("PENDING") for state in now)
            if other in (job, *reported) or alive or requeued:
                continue
            name = "killed" if other in began else "not begun"
            text = f"job {other}: {name}; SLURM says: {', '.join(now) or 'nothing any more'}"
            self.note("ended", run=began.get(other, ""), job=other, outcome=name)
            yield Outcome(name, began.get(other, ""), text)

    def _is_ours(self, matrix: str, run_id: str) -> bool:
        return not run_id and matrix_name(matrix) == self.matrix

    def end(self, run_id: str, job: str, code: int, baseline: str = "") -> Outcome:
        """Judges a night. `code`: exit code of its run."""
        if code in (0, 1):
            try:
                done = self._judged(run_id, baseline)
            except UsageError as error:
                done = Outcome("not compared", run_id, str(error))
        else:
            done = Outcome("failed", run_id, f"the run stopped early with exit code {code}")
        judged_now = {"suspected": done.suspected} if done.against else {}
        self.note("ended", run=run_id, job=job, outcome=done.name, **judged_now)
        if done.name == "ok":
            good = dict.fromkeys([*self.good(), run_id])
            write_atomically(self._good, "".join(f"{name}\n" for name in [*good][-MOST_NIGHTS:]))
        return done

    def _judged(self, run_id: str, baseline: str) -> Outcome:
        tonight, good = select(run_id, self.store.load([run_id], steps=False)), self.good()
        power = self.power()
        if not good:
            failed = [
                cell.cell_name
                for cell in tonight.cells
                if not (cell.ok or cell.result.expected or cell.result.status in NOT_LAUNCHED)
            ]
            if failed or not any(cell.ok for cell in tonight.cells):
                text = f"the first night cannot be the standard: failed: {', '.join(failed)}"
                return Outcome("failed", run_id, text)
            return Outcome("ok", run_id, f"the first night is the standard\n{power}")
        before = [event["suspected"] for event in self.events() if "suspected" in event]
        last = select(good[-1], self.store.load(good[-1:], steps=False))
        suspected = before[-1] if before else ()
        compared, suspects = judged(last, tonight, self.cells(good), suspected)
        against = [compared]
        if baseline:
            against.append(compare_sides(*find_sides([baseline, run_id], self.results)))
        drifts = self.drifts(rates(len(tonight.cells))[0])
        bad = [line for compared in against for line in compared.regressions]
        text = "\n".join(
            [
                *(f"{line.verdict}: {line.cell_name}{where(line)}" for line in bad),
                *(f"slow drift: {series.cell_name}" for series in drifts),
                *(f"suspected: {line.cell_name}{where(line)}" for line in suspects),
                *(f"different software: {name}" for name in compared.differences),
                power,
            ]
        )
        suspected = tuple(line.second.cell_id for line in suspects if line.second)
        name = "regression" if bad or drifts else "suspected" if suspected else "ok"
        return Outcome(name, run_id, text, suspected, tuple(against))

    def cells(self, run_ids: Sequence[str]) -> list[MeasuredCell]:
        """Returns the cells of these runs, which are read only once."""
        for run_id in run_ids:
            if run_id not in self._measured:
                self._measured[run_id] = measured(self.store.load([run_id], steps=False))
        return [cell for run_id in run_ids for cell in self._measured[run_id]]

    def runs(self) -> list[str]:
        """Returns the newest runs of the matrix since the last acknowledged change."""
        rows = [
            row for row in self.store.newest_rows() if matrix_name(row["matrix"]) == self.matrix
        ]
        ids = [str(row["run_id"]) for row in reversed(rows)]
        accepted = [event["run"] for event in self.events() if event["event"] == "accepted"]
        if accepted and accepted[-1] in ids:
            ids = ids[ids.index(accepted[-1]) :]
        return ids[-TREND_NIGHTS:]

    def drifts(self, false_alarm_rate: float) -> list[Series]:
        every = histories(self.cells(self.runs()), "throughput", false_alarm_rate)
        return [series for series in every if series.worse]

    def power(self) -> str:
        """Returns the slowdown that nights will find, as a sentence, or why that is unknown."""
        unknown = "nothing recorded here tells how small a slowdown nights will find"
        if not (ids := self.runs()):
            return unknown
        plan, noise = kept_plan(self.store, ids[-1]), recorded_noise(self.cells(ids))
        timed = [cell for cell in plan.cells if cell.id not in plan.not_compared]
        if noise is None or not timed:
            return unknown
        return power_sentence(noise, min(map(plan.trials_of, timed)), len(timed))


def tell(site: Nightly, matrix: str, done: Outcome, details: str) -> Iterator[str]:
    """Writes metrics and sends notifications; yields why something could not be done."""
    if site.textfile:
        text = METRICS.format(matrix=matrix, now=int(time.time())) + "".join(
            f'parallelism_bench_night_outcome{{matrix="{matrix}",outcome="{name}"}}'
            f" {int(name == done.name)}\n"
            for name in OUTCOMES
        )
        write_atomically(Path(site.textfile) / f"parallelism_bench_night_{matrix}.prom", text)
    if done.name in FINE and not site.notify.always:
        return
    night = f"night {done.run_id} of {matrix}" if done.run_id else f"a night of {matrix}"
    subject = f"parallelism-bench: {done.name} in {night}"
    commands = [["mail", "-s", subject, site.notify.mail]] if site.notify.mail else []
    if site.notify.command:
        commands.append([*shlex.split(site.notify.command), done.name])
    for command in commands:
        try:
            subprocess.run(command, input=details, text=True, timeout=60, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            yield f"could not notify with {command[0]}: {error}"
    if site.notify.webhook:
        body = json.dumps({"text": f"{subject}\n{details}"}).encode()
        try:
            request = urllib.request.Request(
                site.notify.webhook, body, {"Content-Type": "application/json"}
            )
            urllib.request.urlopen(request, timeout=30).close()
        except (OSError, ValueError) as error:
            yield f"could not call the webhook: {error}"
