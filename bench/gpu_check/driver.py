from __future__ import annotations

import functools
import itertools
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from bench.gpu_check.limited_process import STOP_SECONDS, Limits, ProcessEnd, run_limited
from bench.gpu_check.out_folder import Folders
from bench.gpu_check.outcomes import (
    NO_TIME,
    Report,
    StepOutcome,
    Verdict,
    last_object,
    step_verdict,
)
from bench.gpu_check.steps import CheckPlan, Step
from harness.host.cores import allowed_cores
from harness.host.cuda import HIDE_GPUS

LEAST_SECONDS = 15.0
COLLECT_SECONDS = 30.0
"""Seconds between copies to the results folder."""
REHEARSAL_FACTOR = 3.0
"""Factor by which a CPU rehearsal extends time limits."""
TAIL = 20
CORES_PER_LANE = 2


@dataclass(frozen=True)
class Timing:
    budget_seconds: float
    stop_seconds: float = STOP_SECONDS
    least_seconds: float = LEAST_SECONDS


class CheckDriver:
    """Runs unfinished steps; writes the report before and after each."""

    def __init__(
        self,
        plan: CheckPlan,
        report: Report,
        folders: Folders,
        timing: Timing,
        say: Callable[[str], None],
        again: Collection[str] = (),
    ) -> None:
        """`again`: names of finished steps to repeat."""
        self.plan, self.report, self.folders, self.timing = plan, report, folders, timing
        self._say, self._again = say, frozenset(again)
        self._began = time.monotonic()
        self._end = self._began + timing.budget_seconds
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._late: set[str] = set()
        """Steps that used all of their time."""
        self.at_the_gate = False
        """Whether the gate step trained nothing."""
        self._section = {step.name: section for section, step in plan.steps()}
        self._cores = allowed_cores()
        self.report = replace(
            report, outcomes=tuple(o for o in report.outcomes if o.name not in self._again)
        )

    def say(self, text: str) -> None:
        self._say(f"[{time.monotonic() - self._began:6.1f}] {text}")

    def run(self) -> None:
        """Runs the check; writes everything even when stopped."""
        for name in ("logs", "traces"):
            (self.folders.work / name).mkdir(exist_ok=True)
        self.folders.write_report(self.report)
        late = [step for step in self.plan.probes if self._was_late(step)]
        with self._stopped_by_signals():
            self._probe([step for step in self.plan.probes if step not in late])
            if self._passes_the_gate():
                self._lanes(self.plan.lanes, self._end - self._alone_seconds())
                for step in self.plan.alone:
                    self._step(step)
                self._lanes(self.plan.lanes, self._end)
                self._lanes(self.plan.later, self._end)
                self._probe(late)
        self._collect()

    def _probe(self, steps: Sequence[Step]) -> None:
        with ThreadPoolExecutor(max(1, len(self._cores) // CORES_PER_LANE)) as pool:
            self._wait_for(pool, [functools.partial(self._step, step) for step in steps])

    @property
    def stopped(self) -> bool:
        return self._stop.is_set()

    def _passes_the_gate(self) -> bool:
        gate = self.plan.gate
        if gate is None or self.stopped:
            return True
        before = self.report.outcome(gate.name)
        if before and before.settled and not before.trained:  # something may have been fixed
            self._again |= {gate.name}
            self._keep(replace(before, exit_code=None))
        self._step(gate)
        outcome = self.report.outcome(gate.name)
        if self.stopped or (outcome and outcome.trained):
            return True
        if outcome and not outcome.settled and gate.name not in self._late:
            self.say(f"{gate.name}: {NO_TIME}")
            return False
        self.say(f"{gate.name}: nothing trained, so the check ends here to save GPU time")
        self.at_the_gate = True
        return False

    def _alone_seconds(self) -> float:
        return sum(self._limit(step) for step in self.plan.alone if not self._is_settled(step))

    def _limit(self, step: Step) -> float:
        return step.limit_seconds * (REHEARSAL_FACTOR if self.report.stand_in else 1.0)

    def _lanes(self, lanes: Sequence[Sequence[Step]], end: float) -> None:
        """Runs lanes until `end` (time.monotonic), in parallel unless there are several GPUs."""
        open_lanes = [[s for s in lane if self._is_open(s)] for lane in lanes]
        open_lanes = [sorted(lane, key=self._was_late) for lane in open_lanes if lane]
        if not open_lanes:
            return
        workers = 1 if self._gpus() > 1 else max(1, len(self._cores) // CORES_PER_LANE)
        workers = min(workers, len(open_lanes))
        share = len(self._cores) // workers
        queues = [interleaved(open_lanes[worker::workers]) for worker in range(workers)]

        def work(worker: int) -> None:
            cores = self._cores[worker * share : (worker + 1) * share]
            for step in queues[worker]:
                self._step(step, end, cores)

        with ThreadPoolExecutor(workers) as pool:
            self._wait_for(pool, [functools.partial(work, worker) for worker in range(workers)])

    def _gpus(self) -> int:
        from harness.host.gpu_inventory import visible_gpus

        return len(visible_gpus()) if self.report.device == "cuda" else 0

    def _wait_for(self, pool: ThreadPoolExecutor, tasks: Sequence[Callable[[], None]]) -> None:
        futures = [pool.submit(task) for task in tasks]
        collected = time.monotonic()
        while not all(future.done() for future in futures):
            time.sleep(0.1)  # this thread handles signals
            if time.monotonic() - collected > COLLECT_SECONDS:
                self._collect()
                collected = time.monotonic()
        for future in futures:
            future.result()

    def _is_settled(self, step: Step) -> bool:
        before = self.report.outcome(step.name)
        return before is not None and before.settled

    def _is_open(self, step: Step) -> bool:
        return not (self._is_settled(step) or step.name in self._late or self.stopped)

    def _was_late(self, step: Step) -> bool:
        before = self.report.outcome(step.name)
        return before is not None and before.seconds >= self._limit(step)

    def _step(self, step: Step, end: float | None = None, cores: Sequence[int] = ()) -> None:
        """Runs a step if time is left. `end`: deadline (time.monotonic); None: the call's."""
        if not self._is_open(step):
            return
        left = (self._end if end is None else end) - time.monotonic() - self.timing.stop_seconds
        limit = self._limit(step)
        seconds = min(limit, left)
        if seconds < min(self.timing.least_seconds, limit):
            if self.report.outcome(step.name) is None:
                self._keep(self._outcome(step, "not checked", NO_TIME))
            return
        self._keep(self._outcome(step, "not checked", "it was still running when this was written"))
        self.say(f"{step.name}: starts, {seconds:.0f} s at most")
        log = self.folders.log(step.name)
        limits = Limits(seconds, self.timing.stop_seconds, tuple(cores))
        ended = run_limited(self._command(step), log, limits, self._stop, self._variables())
        if ended.exit_code is None and seconds == limit:
            self._late.add(step.name)
        outcome = self._judged(step, ended, seconds, log)
        self._keep(outcome)
        self.say(f"{step.name}: {outcome.verdict} after {outcome.seconds:.0f} s: {outcome.reason}")
        self._collect()

    def _command(self, step: Step) -> list[str]:
        if step.probe:
            return ["bench.gpu_check.probes", step.probe, self.report.device]
        words = ["bench", *step.arguments, "--json", "--results", str(self.folders.results)]
        if step.arguments[0] == "profile":
            return [*words, "--out", str(self.folders.traces / step.name)]
        words.append("--no-report")
        return [*words, "--run", self._run_id(step)] if step.arguments[0] == "run" else words

    def _run_id(self, step: Step) -> str:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:6]
        repeated = f"-{int(time.time())}" if step.name in self._again else ""
        return f"{step.name}-{boot}{repeated}"

    def _variables(self) -> dict[str, str]:
        hidden = HIDE_GPUS if self.report.device == "cpu" else {}
        return {"PYTHONUNBUFFERED": "1", **hidden}

    def _judged(self, step: Step, ended: ProcessEnd, limit: float, log: Path) -> StepOutcome:
        shown = last_object(Path(f"{log}.out").read_text(errors="replace"))
        said = Path(f"{log}.err").read_text(errors="replace").strip().splitlines()[-TAIL:]
        verdict: Verdict
        if ended.exit_code is None:
            verdict = "not checked"
            late = f"it did not finish within {limit:.0f} s"
            reason = "the check was stopped" if self.stopped else late
        elif not shown:
            verdict = "refuted"
            reason = f"exit code {ended.exit_code}: {said[-1] if said else 'it printed nothing'}"
        else:
            verdict, reason = step_verdict(step, shown)
        return replace(
            self._outcome(step, verdict, reason),
            seconds=round(ended.seconds, 1),
            exit_code=ended.exit_code,
            log=tuple(said),
            shown=shown,
        )

    def _outcome(self, step: Step, verdict: Verdict, reason: str) -> StepOutcome:
        return StepOutcome(step.name, self._section[step.name], step.claim, verdict, reason)

    def _keep(self, outcome: StepOutcome) -> None:
        with self._lock:
            others = [other for other in self.report.outcomes if other.name != outcome.name]
            self.report = replace(self.report, outcomes=(*others, outcome))
            self.folders.write_report(self.report)

    def _collect(self) -> None:
        with self._lock:
            for name in self.folders.collect():
                self.say(f"{name} is too large to send, so it stays in {self.folders.work}")

    @contextmanager
    def _stopped_by_signals(self) -> Iterator[None]:
        """Makes SIGTERM and Ctrl-C stop running steps."""

        def stop(*_: object) -> None:
            self._stop.set()

        before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def interleaved(lanes: Sequence[Sequence[Step]]) -> list[Step]:
    """Returns all lanes' steps, alternating between lanes, most valuable first."""
    return [step for steps in itertools.zip_longest(*lanes) for step in steps if step]
