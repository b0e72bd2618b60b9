from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import typer

from bench.cli.options import Json, OutFolder, Resume
from harness.spec.text import plural

if TYPE_CHECKING:
    from rich.console import Console

    from bench.checks import Trouble
    from bench.gpu_check.outcomes import StepOutcome
    from harness.measure.hardware_benchmark import LinkFit

DEFAULT_MINUTES = 10.0

MeasureLinks: TypeAlias = Annotated[
    bool,
    typer.Option("--links", help="Measure latency and bandwidth of messages between two ranks."),
]
GpuCheck: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--gpu-check", help="Check the suite on this host's GPUs in a few minutes (docs/gpu.md)."
    ),
]
Minutes: TypeAlias = Annotated[
    float | None,
    typer.Option(
        "--minutes",
        min=0,
        help="With --gpu-check: minutes that this call may take, by default 10.",
    ),
]
Again: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--again", help="With --resume: repeat this step of the GPU check; may be repeated."
    ),
]
CheckDevice = Literal["cuda", "cpu"]
CheckedDevice: TypeAlias = Annotated[
    CheckDevice | None,
    typer.Option("--device", help="With --gpu-check: use cpu to rehearse the check without a GPU."),
]
Steps: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--steps",
        hidden=True,
        help="With --gpu-check: a plan file to use instead of the built-in one.",
    ),
]


@dataclass(frozen=True)
class CheckOptions:
    out: Path
    resume: bool = False
    budget_seconds: float = 60 * DEFAULT_MINUTES
    device: CheckDevice = "cuda"
    again: tuple[str, ...] = ()
    plan: Path | None = None
    json_output: bool = False


def doctor(
    links: MeasureLinks = False,
    gpu_check: GpuCheck = False,
    out: OutFolder = None,
    resume: Resume = False,
    minutes: Minutes = None,
    again: Again = None,
    device: CheckedDevice = None,
    steps: Steps = None,
    json_output: Json = False,
) -> None:
    """Check this host, or its GPUs.

    Shows devices, libraries, compiled ops, links, what each strategy lacks here, and what would
    skew results.

    Example: [bold]python -m bench doctor --links[/bold]
    """
    from harness.host.packages import TRAINING, require
    from harness.spec.errors import UsageError

    if gpu_check and links:
        raise UsageError("--gpu-check does not measure links: run doctor --links on its own")
    only_for_gpus = {
        "--out": out,
        "--resume": resume or None,
        "--minutes": minutes,
        "--again": again or None,
        "--device": device,
        "--steps": steps,
    }
    given = [name for name, value in only_for_gpus.items() if value is not None]
    if given and not gpu_check:
        raise UsageError(f"{', '.join(given)}: add --gpu-check, which these options belong to")
    require(TRAINING)
    if gpu_check:
        folder = out or Path("gpu-check")
        budget = 60 * (DEFAULT_MINUTES if minutes is None else minutes)
        repeated, used = tuple(again or ()), device or "cuda"
        check_gpu(CheckOptions(folder, resume, budget, used, repeated, steps, json_output))
    else:
        _check_host(links, json_output)


def _check_host(links: bool, json_output: bool) -> None:
    from bench.checks import troubles
    from bench.cli import terminal
    from harness.measure.hardware_benchmark import METHOD

    out = terminal.console(quiet=json_output)
    terminal.say_unused_gpus(out)
    parts = {
        "devices": _devices(),
        "libraries": _libraries(),
        "compiled_ops": _compiled_ops(),
        "links": _links(),
        "strategies": _strategies(),
    }
    found = troubles()
    measured, failed = _measured_links() if links else ([], {})
    if json_output:
        document: dict[str, object] = {**parts}
        if links:
            document["measured_links"] = [link.as_json() for link in measured]
            document |= {"links_method": METHOD, "links_failed": failed}
        document["troubles"] = [dataclasses.asdict(trouble) for trouble in found]
        print(json.dumps(document, indent=2))
    else:
        _show_parts(out, parts)
        show_troubles(out, found)
        _show_links(out, measured, failed)
    if failed:
        raise typer.Exit(1)


def _show_parts(out: Console, parts: dict[str, dict[str, str]]) -> None:
    from rich.markup import escape
    from rich.table import Table

    for part, rows in parts.items():
        table = Table(title=part.replace("_", " "), title_justify="left", show_header=False)
        for name, text in rows.items():
            table.add_row(escape(name), escape(text))
        out.print(table)


def show_troubles(out: Console, troubles: Sequence[Trouble]) -> None:
    from rich.markup import escape

    if not troubles:
        out.print("found nothing that would skew results here")
        return
    out.print("[bold]what would skew results here[/bold]")
    for trouble in troubles:
        out.print(
            f"[yellow]{escape(trouble.subject)}[/yellow]: {escape(trouble.what)};"
            f" {escape(trouble.why)}"
        )
        out.print(f"    fix: {escape(trouble.fix)}")


def _measured_links() -> tuple[list[LinkFit], dict[str, str]]:
    from harness.host.environment import device_type, gpus
    from harness.measure.hardware_benchmark import RANKS, measure_links

    fits, failed = [], {}
    for backend in (
        ("gloo", "nccl") if device_type() == "cuda" and len(gpus()) >= RANKS else ("gloo",)
    ):
        try:
            fits += measure_links(backend)
        except RuntimeError as error:
            failed[backend] = str(error)
    return fits, failed


def _show_links(out: Console, measured: Sequence[LinkFit], failed: dict[str, str]) -> None:
    from rich.markup import escape

    for backend in dict.fromkeys(link.backend for link in measured):
        _show_backend(out, backend, [link for link in measured if link.backend == backend])
    for backend, reason in failed.items():
        out.print(f"[red]links over {backend} could not be measured[/red]: {escape(reason)}")


def _show_backend(out: Console, backend: str, links: Sequence[LinkFit]) -> None:
    from bench.cli import terminal
    from harness.measure.hardware_benchmark import METHOD
    from reports.text import size

    operations = [link.operation.replace("_", " ") for link in links]
    title = f"messages over {backend}, microseconds"
    table = terminal.table(title, "bytes of a message", *operations)
    for place, message in enumerate(links[0].sizes):
        table.add_row(size(message), *(f"{link.seconds[place] * 1e6:,.0f}" for link in links))
    table.add_section()
    table.add_row("fitted latency", *(f"{link.fit.latency_seconds * 1e6:,.1f}" for link in links))
    table.add_row(
        "fitted bandwidth", *(_rate(link.fit.bandwidth_bytes_per_second) for link in links)
    )
    table.add_row(
        "largest error of the fit", *(f"{link.fit.largest_deviation * 100:.0f} %" for link in links)
    )
    out.print(table)
    out.print(METHOD)


def _rate(bandwidth: float | None) -> str:
    return "unknown" if bandwidth is None else f"{bandwidth / 1e9:.2f} GB/s"


def _devices() -> dict[str, str]:
    from harness.host.amd import rocm_version
    from harness.host.cores import allowed_cores
    from harness.host.environment import cpu_model, device_type, gpus, unused_gpus
    from harness.host.memory_limits import available_memory_bytes, memory_bytes

    rows = {
        "CPU": (
            f"{cpu_model() or 'unknown'}, {plural(len(allowed_cores()), 'core')} for this process"
        ),
        "memory": (
            f"{memory_bytes() / 2**30:.1f} GiB for this process,"
            f" {available_memory_bytes() / 2**30:.1f} GiB of it available"
        ),
    }
    for index, (name, memory) in enumerate(gpus()):
        rows[f"GPU {index}"] = f"{name}, {memory / 2**30:.1f} GiB"
    rows["used by cells"] = device_type()
    if version := rocm_version():
        rows["used by cells"] += f" (ROCm, HIP {version}; torch calls it cuda)"
    if reason := unused_gpus():
        rows["GPUs not used"] = reason
    return rows


def _libraries() -> dict[str, str]:
    from harness.host.environment import LIBRARIES, version_of
    from harness.strategy.registry import required_packages

    names = dict.fromkeys(("torch", *LIBRARIES, *required_packages()))
    return {name: version_of(name) or "not installed" for name in names}


def _compiled_ops() -> dict[str, str]:
    from importlib.util import find_spec

    import torch

    from harness.host.amd import rocm_version
    from harness.strategy.registry import strategies

    built = torch.distributed
    nccl = "in torch" + (", as RCCL" if rocm_version() else "")
    installed = [cls for cls in strategies().values() if all(map(find_spec, cls.requires))]
    return {
        "gloo": "in torch" if built.is_gloo_available() else "missing: torch was built without it",
        "nccl": nccl if built.is_nccl_available() else "missing: needs a CUDA build of torch",
        "mpi": "in torch" if built.is_mpi_available() else "not in this torch",
        **{
            part: state
            for cls in installed
            for part, state in cls.capabilities.compiled_parts().items()
        },
    }


def _links() -> dict[str, str]:
    import psutil

    from harness.links.emulated import unsupported_reason

    addresses = psutil.net_if_addrs()
    rows = {"emulated": unsupported_reason() or "ready (axis links of a matrix)"}
    for name, stats in psutil.net_if_stats().items():
        if not stats.isup:
            continue
        ip = next(
            (a.address for a in addresses.get(name, []) if a.family.name == "AF_INET"),
            "no IPv4 address",
        )
        rows[name] = (
            f"{ip}, "
            + (f"{stats.speed} Mbit/s by its driver" if stats.speed else "speed unknown")
            + f", mtu {stats.mtu}"
        )
    return rows


def _strategies() -> dict[str, str]:
    from harness.host.environment import device_type
    from harness.spec.cell import Cell
    from harness.spec.errors import Refused, Unavailable, UsageError
    from harness.strategy.registry import strategies, validate
    from harness.workloads import make_workload

    rows = {}
    for name, cls in strategies().items():
        state = "ready"
        for devices in (2, 1, 4, 8):
            for workload, precision in (
                ("llama-mini", "fp32"),
                ("llama-mini", "bf16"),
                ("resnet-micro", "fp32"),
            ):
                cell = Cell.model_validate(
                    {
                        "strategy": name,
                        "workload": workload,
                        "precision": precision,
                        "devices": devices,
                        "device": device_type(),
                        "warmup_steps": 3,
                    }
                )
                try:
                    validate(cell, make_workload(workload))
                    stand_in = cls().stand_in(cell)
                    state = f"ready; stand-in: {stand_in}" if stand_in else "ready"
                    break
                except Unavailable as error:
                    state = f"unavailable: {error}"
                except (Refused, UsageError) as error:
                    state = f"refused: {error}"
            if state.startswith("ready"):
                break
        rows[name] = state
    return rows


def check_gpu(options: CheckOptions) -> None:
    """Runs a GPU check and prints each outcome, or the report as JSON.

    Exits with 1 if a claim was refuted or nothing trained, 130 if stopped. Raises UsageError
    without a GPU.
    """
    from rich.markup import escape

    from bench.cli import terminal
    from bench.gpu_check.driver import CheckDriver, Timing
    from bench.gpu_check.out_folder import Folders
    from bench.gpu_check.steps import HOME, read_plan
    from harness.host.environment import device_type, unused_gpus
    from harness.spec.errors import UsageError

    plan = read_plan(options.plan or HOME)
    names = [step.name for _, step in plan.steps()]
    if unknown := [name for name in options.again if name not in names]:
        raise UsageError(
            f"--again {unknown[0]!r}: there is no such step; the steps are: {', '.join(names)}"
        )
    if options.device == "cuda" and device_type() != "cuda":
        raise UsageError(
            f"--gpu-check needs a GPU: {unused_gpus() or 'there is no GPU here'}; --device cpu"
            " rehearses the check without one"
        )
    folders = Folders.prepare(options.out)
    out = terminal.console(quiet=options.json_output)
    with folders.locked():
        start = folders.resume if options.resume else folders.start
        report = start(options.device)
        if report.stand_in:
            out.print(f"rehearsal: {report.stand_in}, so this proves nothing about GPUs")
        driver = CheckDriver(
            plan,
            report,
            folders,
            Timing(options.budget_seconds),
            lambda text: out.print(escape(text)),
            options.again,
        )
        driver.run()
    outcomes = driver.report.outcomes
    _show_outcomes(out, outcomes)
    out.print(f"everything is in {escape(str(folders.out))}; continue with --resume")
    if options.json_output:
        print(driver.report.to_json())
    if driver.stopped:
        raise typer.Exit(130)
    if driver.at_the_gate or any(o.verdict == "refuted" for o in outcomes):
        raise typer.Exit(1)


def _show_outcomes(out: Console, outcomes: Sequence[StepOutcome]) -> None:
    from rich.markup import escape

    from bench.gpu_check.outcomes import NO_TIME

    colours = {"confirmed": "green", "refuted": "red", "not checked": "yellow"}
    for outcome in (outcome for outcome in outcomes if outcome.reason != NO_TIME):
        colour = colours[outcome.verdict]
        out.print(f"[{colour}]{outcome.verdict}[/{colour}] {escape(outcome.claim)}")
        out.print(f"    {escape(outcome.name)}, {outcome.seconds:.0f} s: {escape(outcome.reason)}")
    if waiting := [outcome.name for outcome in outcomes if outcome.reason == NO_TIME]:
        out.print(f"no time left for: {', '.join(waiting)}")
