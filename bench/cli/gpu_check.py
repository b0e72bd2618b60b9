"""bench doctor --gpu-check: the first minutes on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import typer

CheckDevice = Literal["cuda", "cpu"]


@dataclass(frozen=True)
class CheckOptions:
    out: Path
    resume: bool = False
    budget_seconds: float = 600.0
    device: CheckDevice = "cuda"
    again: tuple[str, ...] = ()
    """Names of settled steps to repeat."""
    plan: Path | None = None
    """Plan to run; None: the suite's."""


def gpu_check(options: CheckOptions) -> None:
    """Runs the steps and prints what each showed.

    Exit code 1 if a claim was refuted or nothing trained, 130 if stopped. Raises UsageError without
    a GPU.
    """
    from rich.markup import escape

    from bench.cli import terminal
    from bench.gpu_check.driver import Driver, Timing
    from bench.gpu_check.out_folder import Folders
    from bench.gpu_check.plan import HOME, read_plan
    from bench.gpu_check.report import NO_TIME
    from harness.host.environment import device_type, unused_gpus
    from harness.spec.errors import UsageError

    plan = read_plan(options.plan or HOME)
    names = [step.name for _, step in plan.steps()]
    if unknown := [name for name in options.again if name not in names]:
        raise UsageError(f"--again {unknown[0]!r} is no step; the steps are: {', '.join(names)}")
    if options.device == "cuda" and device_type() != "cuda":
        raise UsageError(
            f"--gpu-check needs a GPU: {unused_gpus() or 'NVML finds none here'}; --device cpu"
            " rehearses the check without one"
        )
    folders = Folders.prepare(options.out)
    out = terminal.console()
    with folders.locked():
        start = folders.resume if options.resume else folders.start
        report = start(options.device)
        if report.stand_in:
            out.print(f"rehearsal: {report.stand_in}, so nothing is shown about GPUs")
        driver = Driver(
            plan,
            report,
            folders,
            Timing(options.budget_seconds),
            lambda text: out.print(escape(text)),
            options.again,
        )
        driver.run()
    colours = {"confirmed": "green", "refuted": "red", "not checked": "yellow"}
    outcomes = driver.report.outcomes
    for outcome in (outcome for outcome in outcomes if outcome.reason != NO_TIME):
        colour = colours[outcome.verdict]
        out.print(f"[{colour}]{outcome.verdict}[/{colour}] {escape(outcome.claim)}")
        out.print(f"    {escape(outcome.name)}, {outcome.seconds:.0f} s: {escape(outcome.reason)}")
    if waiting := [outcome.name for outcome in outcomes if outcome.reason == NO_TIME]:
        out.print(f"no time was left for: {', '.join(waiting)}")
    out.print(f"everything is in {escape(str(folders.out))}; --resume goes on with it")
    if driver.stopped:
        raise typer.Exit(130)
    if driver.at_the_gate or any(o.verdict == "refuted" for o in outcomes):
        raise typer.Exit(1)
