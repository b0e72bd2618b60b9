"""bench doctor --gpu-check: what the first minutes on a GPU showed, claim by claim, and a file with
all of it."""

from __future__ import annotations

import time
from pathlib import Path

import typer


def gpu_check(file: Path, resume: bool, budget_seconds: float, steps: Path | None) -> None:
    """Runs the steps and prints what each showed; exit code 1 where one refuted its claim. Raises
    UsageError without a GPU.

    `steps`: another list, which then also runs without a GPU.
    """
    from rich.markup import escape

    from bench import gpu_check as check
    from bench.cli import terminal
    from harness.host.environment import device_type, unused_gpus
    from harness.spec.errors import UsageError

    if steps is None and device_type() != "cuda":
        raise UsageError(f"--gpu-check needs a GPU: {unused_gpus() or 'NVML finds none here'}")
    if resume and not file.is_file():
        raise UsageError(f"--resume goes on with {str(file)!r}, which is not there")
    out, began = terminal.console(), time.monotonic()
    report = check.Report.read(file) if resume else check.Report()
    colours = {"confirmed": "green", "refuted": "red", "not checked": "yellow"}

    def show_outcome(outcome: check.Outcome) -> None:
        colour = colours[outcome.verdict]
        out.print(f"[{colour}]{outcome.verdict}[/{colour}] {escape(outcome.claim)}")
        out.print(f"    {escape(outcome.name)}, {outcome.seconds:.0f} s: {escape(outcome.reason)}")

    if report.host is None:
        out.print(
            "versions, topology, what would falsify a measurement, which imports initialise CUDA"
        )
        report.host = check.host_facts()
        report.write(file)
        for name in (name for name, does in report.host.initialises_cuda.items() if does):
            out.print(
                f"importing {escape(name)} initialises CUDA: it must not be imported before ranks"
                " are forked"
            )
    results = file.resolve().with_suffix(".results")
    seconds_left = budget_seconds - (time.monotonic() - began)
    check.run_steps(
        check.read_steps(steps or check.HOME), report, file, results, seconds_left, show_outcome
    )
    out.print(
        f"all of it is in {escape(str(file))}; records of the runs are in {escape(str(results))}"
    )
    if any(outcome.verdict == "refuted" for outcome in report.outcomes):
        raise typer.Exit(1)
