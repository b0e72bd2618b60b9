"""bench doctor: what this host has, and what each strategy lacks here."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer


def doctor(json_output: Annotated[bool, typer.Option("--json", help="For machines.")] = False) -> None:
    """Shows devices, libraries, compiled ops, links, and what each strategy lacks here with the command that provides it.

    Example: [bold]python -m bench doctor[/bold]
    """
    found: dict[str, Any] = {
        "devices": _devices(),
        "libraries": _libraries(),
        "compiled_ops": _compiled_ops(),
        "links": _links(),
        "strategies": _strategies(),
    }
    if json_output:
        print(json.dumps(found, indent=2))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    out = Console(highlight=False)
    for part, rows in found.items():
        table = Table(title=part.replace("_", " "), title_justify="left", show_header=False)
        for name, said in rows.items():
            table.add_row(escape(name), escape(str(said)))
        out.print(table)


def _devices() -> dict[str, str]:
    import psutil

    from harness.environment import cpu_model, device_type, gpus
    from harness.launch import allowed_cores

    rows = {
        "CPU": f"{cpu_model() or 'unknown'}, {len(allowed_cores())} cores for this process",
        "memory": f"{psutil.virtual_memory().total / 2**30:.1f} GiB",
    }
    for index, (name, memory) in enumerate(gpus()):
        rows[f"GPU {index}"] = f"{name}, {memory / 2**30:.1f} GiB"
    rows["used by cells"] = device_type()
    return rows


def _libraries() -> dict[str, str]:
    from harness.environment import LIBRARIES, version_of

    names = ("torch", *LIBRARIES)
    return {name: version_of(name) or "not installed" for name in names}


def _compiled_ops() -> dict[str, str]:
    from importlib.util import find_spec

    import torch

    from harness.strategy import strategies

    built = torch.distributed
    installed = [cls for cls in strategies().values() if all(map(find_spec, cls.requires))]
    return {
        "gloo": "in torch" if built.is_gloo_available() else "missing: torch was built without it",
        "nccl": "in torch" if built.is_nccl_available() else "missing: needs a CUDA build of torch",
        "mpi": "in torch" if built.is_mpi_available() else "not in this torch",
        **{part: said for cls in installed for part, said in cls.compiled().items()},
    }


def _links() -> dict[str, str]:
    import psutil

    addresses = psutil.net_if_addrs()
    rows = {}
    for name, stats in psutil.net_if_stats().items():
        if not stats.isup:
            continue
        ip = next((a.address for a in addresses.get(name, []) if a.family.name == "AF_INET"), "no IPv4 address")
        rows[name] = f"{ip}, " + (f"{stats.speed} Mbit/s by its driver" if stats.speed else "speed unknown") + f", mtu {stats.mtu}"
    return rows


def _strategies() -> dict[str, str]:
    """`ready`, or the reason of the first thing that is missing with the command that provides it."""
    from harness.cell import Cell
    from harness.environment import device_type
    from harness.errors import Mistake, Refused, Unavailable
    from harness.strategy import admit, strategies
    from harness.workloads import make_workload

    rows = {}
    for name, cls in strategies().items():
        said = "ready"
        for devices in (2, 1, 4, 8):
            for workload, precision in (("llama-mini", "fp32"), ("llama-mini", "bf16"), ("resnet-micro", "fp32")):
                axes: dict[str, Any] = {"strategy": name, "workload": workload, "precision": precision, "devices": devices}
                cell = Cell(**axes, device=device_type(), warmup_steps=3)  # type: ignore[arg-type]
                try:
                    admit(cell, make_workload(workload))
                    stand_in = cls().stand_in(cell)
                    said = f"ready; stand-in: {stand_in}" if stand_in else "ready"
                    break
                except Unavailable as no:
                    said = f"unavailable: {no}"
                except (Refused, Mistake) as no:
                    said = f"refused: {no}"
            if said.startswith("ready"):
                break
        rows[name] = said
    return rows
