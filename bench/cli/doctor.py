from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from bench.cli.options import Json
from harness.cell.errors import plural

if TYPE_CHECKING:
    from rich.console import Console

    from bench.checks import Trouble
    from bench.probes import ProbeAnswer
    from harness.measure.hardware_benchmark import LinkSpeed

MeasureLinks: TypeAlias = Annotated[
    bool,
    typer.Option("--links", help="Measure latency and bandwidth between two ranks."),
]
Probes: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--probes",
        help="Try what ranks need of this host: a forked process, NVML in it, collectives, access"
        " between GPUs, rounding and float8 (half a minute).",
    ),
]


def doctor(links: MeasureLinks = False, probes: Probes = False, json_output: Json = False) -> None:
    """Check this host.

    Shows devices, libraries, compiled ops, links, what each strategy lacks here, and what would
    skew results. Exits with 1 if a probe fails or links cannot be measured.

    Example: [bold]python -m bench doctor --probes[/bold]
    """
    from bench.checks import troubles
    from bench.cli import terminal
    from harness.host.packages import TRAINING, require

    require(TRAINING)
    out = terminal.console(quiet=json_output)
    terminal.say_unused_gpus(out)
    parts = {
        "devices": _devices(),
        "libraries": _libraries(),
        "compiled_ops": _compiled_ops(),
        "links": _links(),
        "strategies": _strategies(),
    }
    measured, failed = _measured_links() if links else ([], {})
    parts["links"] |= {link.backend: _link(link) for link in measured}
    parts["links"] |= {name: f"could not be measured: {why}" for name, why in failed.items()}
    answers = _probed() if probes else []
    found = troubles()
    if json_output:
        document: dict[str, object] = {**parts}
        if measured:
            document["measured_links"] = [dataclasses.asdict(link) for link in measured]
        if answers:
            document["probes"] = [dataclasses.asdict(probe) for probe in answers]
        document["troubles"] = [dataclasses.asdict(trouble) for trouble in found]
        print(json.dumps(document, indent=2))
    else:
        if answers:
            parts["probes"] = {probe.name: f"{probe.state}: {probe.text}" for probe in answers}
        _show_parts(out, parts)
        show_troubles(out, found)
    if failed or any(probe.state == "fails" for probe in answers):
        raise typer.Exit(1)


def _probed() -> list[ProbeAnswer]:
    from bench.probes import probe
    from harness.host.environment import device_type

    return probe(device_type())


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


def _measured_links() -> tuple[list[LinkSpeed], dict[str, str]]:
    from harness.host.environment import device_type, gpus
    from harness.measure.hardware_benchmark import RANKS, measure_link

    measured, failed = [], {}
    on_gpus = device_type() == "cuda" and len(gpus()) >= RANKS
    for backend in ("gloo", "nccl") if on_gpus else ("gloo",):
        try:
            measured.append(measure_link(backend))
        except RuntimeError as error:
            failed[backend] = str(error)
    return measured, failed


def _link(link: LinkSpeed) -> str:
    return (
        f"all-reduce of two ranks: {link.latency_seconds * 1e6:,.0f} microseconds for 4 KiB,"
        f" {link.bytes_per_second / 1e9:.2f} GB/s for 64 MiB"
    )


def _devices() -> dict[str, str]:
    from harness.host.amd import rocm_version
    from harness.host.cores import allowed_cores, available_memory_bytes, memory_bytes
    from harness.host.environment import cpu_model, device_type, gpus, unused_gpus
    from harness.host.gpu_inventory import driver, gpu_topology

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
    installed, cuda = driver()
    if installed:
        newest = ".".join(map(str, cuda or ())) or "unknown"
        rows["driver"] = f"{installed}, CUDA up to {newest}"
    if between := {link for row in gpu_topology() for link in row} - {"self"}:
        rows["between GPUs"] = ", ".join(sorted(between))
    rows["used by cells"] = device_type()
    if version := rocm_version():
        rows["used by cells"] += f" (ROCm, HIP {version}, never run; torch calls it cuda)"
    if reason := unused_gpus():
        rows["GPUs not used"] = reason
    return rows


def _libraries() -> dict[str, str]:
    from harness.host.environment import LIBRARIES, version_of
    from harness.seam.registry import required_packages

    names = dict.fromkeys(("torch", *LIBRARIES, *required_packages()))
    return {name: version_of(name) or "not installed" for name in names}


def _compiled_ops() -> dict[str, str]:
    from importlib.util import find_spec

    import torch

    from harness.host.amd import rocm_version
    from harness.seam.registry import strategies

    built = torch.distributed
    nccl = "in torch" + (", as RCCL" if rocm_version() else "")
    if torch.backends.cuda.is_built():
        nccl += " " + ".".join(map(str, torch.cuda.nccl.version()))
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

    from harness.host.process import why_not_alone
    from harness.links.emulated import unsupported_reason

    addresses = psutil.net_if_addrs()
    rows = {
        "emulated": unsupported_reason() or "ready (axis links of a matrix)",
        "ranks on this host": why_not_alone() or "reached by no other user",
    }
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
    from harness.cell.cell import Cell
    from harness.cell.errors import Refused, Unavailable, UsageError
    from harness.host.environment import device_type
    from harness.seam.registry import strategies, validate
    from harness.workloads import make_workload

    rows = {}
    models = ("llama-mini", "mixtral-mini", "resnet-micro")
    tried = list(itertools.product((2, 1, 4, 8), models, ("fp32", "bf16"), (1, 2)))
    for name, cls in strategies().items():
        ready = unavailable = refused = ""
        for devices, workload, precision, micro_batches in tried:
            cell = Cell.model_validate(
                {
                    "strategy": name,
                    "workload": workload,
                    "precision": precision,
                    "micro_batches": micro_batches,
                    "devices": devices,
                    "device": device_type(),
                    "warmup_steps": 3,
                }
            )
            try:
                validate(cell, make_workload(workload))
                stand_in = cls().stand_in(cell)
                ready = f"ready; stand-in: {stand_in}" if stand_in else "ready"
                break
            except Unavailable as error:
                unavailable = unavailable or f"unavailable: {error}"
            except (Refused, UsageError) as error:
                refused = refused or f"refused: {error}"
        rows[name] = ready or unavailable or refused
    return rows
