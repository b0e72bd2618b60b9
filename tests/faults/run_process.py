"""A run in a separate process, to be disturbed in the middle of its trials."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from harness.record.store import Store, check_folder
from tests.faults.place import Place
from tests.waiting import LONG, until

MATRIX = """
trials: {trials}
timed_seconds: 0
defaults: {{workload: llama-nano, sequence_length: 32, batch: 8, devices: 2, warmup_steps: 1,
  timed_steps: 3}}
cells: [{cell}]
"""


class Run:
    """`bench run` of one cell, in a separate session."""

    trials = 3

    def __init__(
        self,
        place: Place,
        results: Path | None = None,
        cell: str = "{strategy: ddp}",
        before: Sequence[str] = (),
        enter: Callable[[], None] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`results`: replaces the campaign's folder. `before`: command that starts the run's.
        `enter`: called in the new process. `environment`: further variables."""
        self.place, self.before, self.enter = place, list(before), enter
        self.store = Store(results) if results else place.store
        self.environment = dict(environment or {})
        self.name = f"campaign-{place.chance.randrange(10**9)}"
        matrix = place.temporary.parent / f"{self.name}.yaml"
        matrix.write_text(MATRIX.format(trials=self.trials, cell=cell))
        self.words = ["--matrix", str(matrix), "--run", self.name]
        self.output = place.temporary.parent / f"{self.name}.output"
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        words = ["bench", "run", *self.words, "--results", str(self.store.folder)]
        with open(self.output, "wb") as output:
            return subprocess.Popen(
                [*self.before, sys.executable, "-m", *words, "--no-report"],
                stdout=subprocess.DEVNULL,
                stderr=output,
                env={**os.environ, "TMPDIR": str(self.place.temporary), **self.environment},
                start_new_session=True,
                preexec_fn=self.enter,
            )

    def recorded(self) -> int:
        return len(list((self.store.folder / "trials" / self.name).glob("*.parquet")))

    def until_in_the_middle(self) -> None:
        until(lambda: self.recorded() >= 1 or self.process.poll() is not None)
        time.sleep(self.place.chance.uniform(0.0, 0.6))

    def ended(self) -> list[tuple[str, str]]:
        """Waits for the process; returns status and reason of each trial."""
        self.process.wait(timeout=LONG)
        trials = self.store.load([self.name], steps=False).trials
        return [(str(row.status), str(row.reason)) for row in trials.itertuples()]

    def errors(self) -> str:
        return self.output.read_text("utf-8", "replace")

    def refused(self, reason: str) -> None:
        """Waits for the process, which must fail with this reason unless it finished its trials."""
        code, errors = self.process.wait(timeout=LONG), self.errors()
        assert "Traceback" not in errors, errors
        assert (code, self.recorded()) == (0, self.trials) or (code == 2 and reason in errors), (
            code,
            errors,
        )

    def finish(self, good: int = 0) -> None:
        """Resumes the run if necessary; asserts that every trial succeeded once. `good`: trials
        that must be recorded without a resume."""
        if self.process.poll() is None:
            self.process.wait(timeout=LONG)
        assert self.recorded() >= good, self.errors()
        # The last trial may have been interrupted.
        if self.recorded() < self.trials or {status for status, _ in self.ended()} != {"ok"}:
            self.process = self.start()
            code = self.process.wait(timeout=LONG)
            assert code == 0, (code, self.errors())
        trials = self.store.load([self.name], steps=False).trials
        ended_well = trials[trials["status"] == "ok"]
        assert sorted(ended_well["trial"]) == list(range(self.trials)), trials[
            ["trial", "status", "reason"]
        ]
        assert set(trials["status"]) <= {"ok", "interrupted", "failed"}
        mine = [
            problem for problem in check_folder(self.store).problems if self.name in str(problem)
        ]
        assert mine == []
