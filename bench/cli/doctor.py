"""bench doctor: what this host has, and what each strategy lacks here."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bench.cli.gpu_check import CheckDevice, CheckOptions
from bench.cli.options import JsonObject

if TYPE_CHECKING:
    from rich.console import Console

    from bench.checks.trouble import Trouble
    from harness.measure.comm_benchmark import LinkFit


def doctor(
    links: Annotated[
        bool,
        typer.Option(
            "--links", help="Measure latency and bandwidth of messages between two ranks."
        ),
    ] = False,
    gpu_check: Annotated[
        bool,
        typer.Option(
            "--gpu-check",
            help="Check the suite on this host's GPUs in a few minutes (see docs/gpu.md).",
        ),
    ] = False,
    out_folder: Annotated[
        Path,
        typer.Option("--out", help="With --gpu-check: folder to write to."),
    ] = Path("gpu-check"),
    resume: Annotated[
        bool,
        typer.Option("--resume", help="With --gpu-check: go on with the check in that folder."),
    ] = False,
    budget_minutes: Annotated[
        float,
        typer.Option("--minutes", min=0, help="With --gpu-check: minutes for this call."),
    ] = 10.0,
    again: Annotated[
        list[str] | None,
        typer.Option(
            "--again", help="With --resume: repeat this step of the check; may be repeated."
        ),
    ] = None,
    device: Annotated[
        CheckDevice,
        typer.Option("--device", help="With --gpu-check: cpu rehearses it without a GPU."),
    ] = "cuda",
    steps: Annotated[
        Path | None, typer.Option("--steps", hidden=True, help="Another plan of the check.")
    ] = None,
    json_output: JsonObject = False,
) -> None:
    """Shows devices, libraries, compiled ops, links, what each strategy lacks here, and what would
    skew results.

    Example: [bold]python -m bench doctor --links[/bold]
    """
    if gpu_check:
        from bench.cli.gpu_check import gpu_check as check

        check(
            CheckOptions(out_folder, resume, 60 * budget_minutes, device, tuple(again or ()), steps)
        )
        return
    from bench.cli import terminal

    out = terminal.console(quiet=json_output)
    terminal.say_unused_gpus(out)
    parts: dict[str, dict[str, str]] = {
        "devices": _devices(),
        "libraries": _libraries(),
        "compiled_ops": _compiled_ops(),
        "links": _links(),
        "strategies": _strategies(),
    }
    from bench.checks import troubles
    from harness.measure.comm_benchmark import METHOD

    troubled = troubles()
    measured, failed = _measured_links() if links else ([], {})
    if json_output:
        shown: dict[str, object] = {**parts}
        if links:
            shown["measured_links"] = [link.as_json() for link in measured]
            shown |= {"links_method": METHOD, "links_failed": failed}
        shown["troubles"] = [dataclasses.asdict(trouble) for trouble in troubled]
        print(json.dumps(shown, indent=2))
        if failed:
            raise typer.Exit(1)
        return
    from rich.markup import escape
    from rich.table import Table

    for part, rows in parts.items():
        table = Table(title=part.replace("_", " "), title_justify="left", show_header=False)
        for name, text in rows.items():
            table.add_row(escape(name), escape(text))
        out.print(table)
    show_troubles(out, troubled)
    for backend in dict.fromkeys(link.backend for link in measured):
        _show_links(out, backend, [link for link in measured if link.backend == backend])
    for backend, reason in failed.items():
        out.print(f"[red]links over {backend} could not be measured[/red]: {escape(reason)}")
    if failed:
        raise typer.Exit(1)


def show_troubles(out: Console, troubles: Sequence[Trouble]) -> None:
    from rich.markup import escape

    if not troubles:
        out.print("nothing was found that would falsify a measurement here")
        return
    out.print("[bold]what would falsify a measurement here[/bold]")
    for trouble in troubles:
        out.print(
            f"[yellow]{escape(trouble.subject)}[/yellow]: {escape(trouble.what)};"
            f" {escape(trouble.why)}"
        )
        out.print(f"    mend: {escape(trouble.mend)}")


def _measured_links() -> tuple[list[LinkFit], dict[str, str]]:
    """Measures gloo between two cores, and NCCL between two GPUs; returns the fits, and a reason
    per failed backend."""
    from harness.host.environment import device_type, gpus
    from harness.measure.comm_benchmark import RANKS, measure_links

    fits, failed = [], {}
    for backend in (
        ("gloo", "nccl") if device_type() == "cuda" and len(gpus()) >= RANKS else ("gloo",)
    ):
        try:
            fits += measure_links(backend)
        except RuntimeError as error:
            failed[backend] = str(error)
    return fits, failed


def _show_links(out: Console, backend: str, links: list[LinkFit]) -> None:
    from rich.table import Table

    from harness.measure.comm_benchmark import METHOD
    from reports.text import size

    table = Table(title=f"messages over {backend}, microseconds", title_justify="left")
    table.add_column("bytes of a message")
    for link in links:
        table.add_column(link.operation.replace("_", " "), justify="right")
    for place, message in enumerate(links[0].sizes):
        table.add_row(size(message), *(f"{link.seconds[place] * 1e6:,.0f}" for link in links))
    table.add_section()
    table.add_row("fitted latency", *(f"{link.fit.latency_seconds * 1e6:,.1f}" for link in links))
    table.add_row(
        "fitted bandwidth", *(_rate(link.fit.bandwidth_bytes_per_second) for link in links)
    )
    table.add_row(
        "fit off by up to", *(f"{link.fit.largest_deviation * 100:.0f} %" for link in links)
    )
    out.print(table)
    out.print(METHOD)


def _rate(bandwidth: float | None) -> str:
    return "unknown" if bandwidth is None else f"{bandwidth / 1e9:.2f} GB/s"


def _devices() -> dict[str, str]:
    from harness.host.cores import allowed_cores
    from harness.host.environment import cpu_model, device_type, gpus, unused_gpus
    from harness.host.memory import available_memory_bytes, memory_bytes

    rows = {
        "CPU": f"{cpu_model() or 'unknown'}, {len(allowed_cores())} cores for this process",
        "memory": (
            f"{memory_bytes() / 2**30:.1f} GiB for this process,"
            f" {available_memory_bytes() / 2**30:.1f} GiB of it available"
        ),
    }
    for index, (name, memory) in enumerate(gpus()):
        rows[f"GPU {index}"] = f"{name}, {memory / 2**30:.1f} GiB"
    rows["used by cells"] = device_type()
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

    from harness.strategy.registry import strategies

    built = torch.distributed
    installed = [cls for cls in strategies().values() if all(map(find_spec, cls.requires))]
    return {
        "gloo": "in torch" if built.is_gloo_available() else "missing: torch was built without it",
        "nccl": "in torch" if built.is_nccl_available() else "missing: needs a CUDA build of torch",
        "mpi": "in torch" if built.is_mpi_available() else "not in this torch",
        **{
            part: state
            for cls in installed
            for part, state in cls.capabilities.compiled_parts().items()
        },
    }


def _links() -> dict[str, str]:
    import psutil

    from harness.links.emulated import lacking

    addresses = psutil.net_if_addrs()
    rows = {"emulated": lacking() or "ready (axis links of a matrix)"}
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
    """Returns `ready`, or the first missing requirement and the command that provides it, by
    strategy."""
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
