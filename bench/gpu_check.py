"""The first minutes on a GPU: steps in order of worth, each in a process of its own, and a file
that says what each of them showed."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict

from harness.host.cores import few_cores
from harness.host.gpu import visible_gpus
from harness.record.status import NOT_LAUNCHED

HOME = Path(__file__).with_name("gpu_check.yaml")
ROOT = Path(__file__).parents[1]
STOP_SECONDS = 20.0
"""How long a step that is past its limit may take to record the trial that it stopped."""
LEAST_SECONDS = 5.0
GOOD_PARITY = ("exact", "within tolerance")
TAIL = 20

CheckOutcome = Literal["confirmed", "refuted", "not checked"]


class Step(BaseModel):
    """One step, as the YAML file has it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    claim: str
    limit_seconds: float
    words: tuple[str, ...]
    status: str = "ok"
    cores_per_gpu: int | None = None
    """How many of the cores near each GPU the step may use; None: all."""


@dataclass(frozen=True)
class Outcome:
    """What a step showed of its claim."""

    name: str
    claim: str
    verdict: CheckOutcome
    reason: str
    seconds: float
    shown: dict[str, object] = field(default_factory=dict)
    """What the command printed for machines."""


@dataclass(frozen=True)
class HostFacts:
    """What the file says of the host, fit for JSON."""

    environment: dict[str, object] = field(default_factory=dict)
    gpus: list[dict[str, object]] = field(default_factory=list)
    topology: list[list[str]] = field(default_factory=list)
    """How GPU i reaches GPU j."""
    troubles: list[dict[str, object]] = field(default_factory=list)
    """What would falsify a measurement here."""
    initialises_cuda: dict[str, bool | None] = field(default_factory=dict)
    """Whether importing a package initialises CUDA; None: it cannot be imported."""


@dataclass
class Report:
    """The file that is sent back."""

    host: HostFacts | None = None
    outcomes: list[Outcome] = field(default_factory=list)

    @classmethod
    def read(cls, file: Path) -> Report:
        values = json.loads(file.read_text())
        outcomes = [Outcome(**outcome) for outcome in values["outcomes"]]
        return cls(HostFacts(**values["host"]) if values["host"] else None, outcomes)

    def write(self, file: Path) -> None:
        temporary = file.with_name(f"{file.name}.{os.getpid()}.tmp")
        temporary.write_text(json.dumps(asdict(self), indent=1, default=str))
        temporary.replace(file)

    @property
    def settled(self) -> set[str]:
        """Names of the steps that need not run again."""
        return {outcome.name for outcome in self.outcomes if outcome.verdict != "not checked"}


def read_steps(file: Path = HOME) -> list[Step]:
    return [Step(**step) for step in yaml.safe_load(file.read_text())]


def run_steps(
    steps: Sequence[Step],
    report: Report,
    file: Path,
    results: Path,
    budget_seconds: float,
    tell: Callable[[Outcome], None],
) -> None:
    """Runs what is not settled yet, and writes the file after each step.

    A step that fails ends none of the others.
    """
    end = time.monotonic() + budget_seconds
    for step in steps:
        if step.name in report.settled:
            continue
        seconds = min(step.limit_seconds, end - time.monotonic())
        if seconds < LEAST_SECONDS:
            outcome = _outcome(
                step, "not checked", "the time for all steps was spent; --resume goes on", 0.0
            )
        else:
            outcome = run_step(step, results, seconds)
        others = [other for other in report.outcomes if other.name != step.name]
        report.outcomes = [*others, outcome]
        report.write(file)
        tell(outcome)


def run_step(step: Step, results: Path, seconds: float) -> Outcome:
    """Runs one step; stops it after so many seconds."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as traces:
        words = [*step.words, "--json", "--results", str(results)]
        words += ["--out", traces] if step.words[0] == "profile" else ["--no-report"]
        cores = (
            None
            if step.cores_per_gpu is None
            else few_cores(step.cores_per_gpu, len(visible_gpus()))
        )
        code, out, error = command([sys.executable, "-m", "bench", *words], seconds, cores)
    passed = time.monotonic() - began
    shown = _last_object(out)
    if code is None:
        return _outcome(
            step, "not checked", f"it was not over after {seconds:.0f} s", passed, shown
        )
    if not shown:
        lines = error.strip().splitlines()[-TAIL:]
        return _outcome(
            step,
            "refuted",
            f"exit code {code}: {lines[-1] if lines else 'nothing was said'}",
            passed,
            {"log": lines},
        )
    return _outcome(step, *judge(step, shown), passed, shown)


@dataclass(frozen=True)
class ShownCell:
    """What a command's JSON says of one cell."""

    name: str
    status: str
    parity: str | None
    reason: str

    @classmethod
    def read(cls, cell: Mapping[str, object]) -> ShownCell:
        parity = cell.get("parity_verdict")
        return cls(
            str(cell.get("cell_name") or cell.get("label") or cell.get("cell_id")),
            str(cell.get("status")),
            None if parity is None else str(parity),
            str(cell.get("reason")),
        )


def judge(step: Step, shown: Mapping[str, object]) -> tuple[CheckOutcome, str]:
    """What a command's JSON says of the claim."""
    listed = shown.get("cells") or shown.get("strategies") or [shown]
    assert isinstance(listed, list)
    cells = [ShownCell.read(cell) for cell in listed]
    ran = [cell for cell in cells if cell.status not in NOT_LAUNCHED]
    if not ran:
        return "not checked", "; ".join(sorted({cell.reason for cell in cells})) or "no cell ran"
    wrong = [
        f"{cell.name}: {cell.status}, parity {cell.parity}, {cell.reason}"
        for cell in ran
        if not _as_claimed(step, cell)
    ]
    if wrong:
        return "refuted", "; ".join(wrong)
    return "confirmed", f"{len(ran)} of {len(cells)} cells: {step.status}"


def _as_claimed(step: Step, cell: ShownCell) -> bool:
    if step.words[0] == "maxsize":
        return cell.status in ("found", "all fit")
    return cell.status == step.status and (
        step.status != "ok" or cell.parity is None or cell.parity in GOOD_PARITY
    )


def _outcome(
    step: Step,
    verdict: CheckOutcome,
    reason: str,
    seconds: float,
    shown: dict[str, object] | None = None,
) -> Outcome:
    return Outcome(step.name, step.claim, verdict, reason, round(seconds, 1), shown or {})


def _last_object(text: str) -> dict[str, object]:
    """The JSON object that a command ends with; empty without one."""
    for line in reversed(text.strip().splitlines()):
        with contextlib.suppress(ValueError):
            value = json.loads(line)
            if isinstance(value, dict):
                return value
    return {}


def command(
    words: Sequence[str], seconds: float, cores: set[int] | None = None
) -> tuple[int | None, str, str]:
    """Exit code, output and errors of a command on these cores (None: all); None as the code where
    it had to be stopped."""
    process = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=ROOT,
        errors="replace",
        preexec_fn=None if cores is None else functools.partial(os.sched_setaffinity, 0, cores),
    )
    try:
        out, error = process.communicate(timeout=seconds)
        return process.returncode, out, error
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)  # the run records its current trial, then ends
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        return None, *_killed(process)
    except BaseException:
        _killed(process)
        raise


def _killed(process: subprocess.Popen[str]) -> tuple[str, str]:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.communicate()


def host_facts() -> HostFacts:
    """Versions, topology, what doctor finds, and which imports initialise CUDA."""
    from bench.checks import troubles
    from harness.host.environment import environment
    from harness.host.gpu_facts import gpu_facts, gpu_topology
    from harness.strategy.registry import required_packages

    return HostFacts(
        dict(environment(required_packages())),
        [asdict(gpu) for gpu in gpu_facts()],
        gpu_topology(),
        [asdict(trouble) for trouble in troubles()],
        imports_that_initialise(_imported()),
    )


def _imported() -> list[str]:
    """Packages that ranks import."""
    from harness.strategy.registry import strategies

    needed = {
        name for cls in strategies().values() for name in (*cls.requires, *cls.capabilities.preload)
    }
    return sorted(needed | {"transformers", "transformers.trainer", "peft", "bitsandbytes"})


def imports_that_initialise(names: Iterable[str]) -> dict[str, bool | None]:
    """Whether importing each of them initialises CUDA, each asked in a fresh process; None: it
    cannot be imported."""
    initialises: dict[str, bool | None] = {}
    for name in names:
        code = (
            f"import importlib, torch; importlib.import_module({name!r});"
            " print(torch.cuda.is_initialized())"
        )
        status, out, _ = command([sys.executable, "-c", code], 60.0)
        initialises[name] = out.strip().endswith("True") if status == 0 else None
    return initialises
