"""What did not work, where it ran, and how it was measured, as text."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.record.status import NO_RESULT
from reports.groups import Row
from reports.table import STATUS
from reports.text import DASH, deviation, missing, number, plural

if TYPE_CHECKING:
    import pandas as pd

    from harness.spec.cell import Cell

GIB = 2**30


@dataclass(frozen=True)
class Failure:
    """A cell that has no place in the ranking, with its reason and the end of its log."""

    row: Row
    what: str
    trials: str
    log: str
    stacks: str


def failures(cells: Sequence[Row], trials: pd.DataFrame) -> list[Failure]:
    """Everything launched that failed, diverged or was cut off; what the matrix expects comes
    last."""
    found = []
    for row in cells:
        if row["status"] not in NO_RESULT:
            continue
        own = trials[trials["cell_id"] == row["cell_id"]]
        bad = own[own["status"] == row["status"]].sort_values(["trial", "attempt"])
        log, stacks = (str(bad[name].iloc[-1] or "") for name in ("log_tail", "stacks"))
        told = f"{len(bad)} of {plural(len(own), 'trial')}"
        found.append(Failure(row, STATUS[row["status"]], told, log, stacks))
    return sorted(found, key=lambda f: (f.row["expected"], NO_RESULT.index(f.row["status"])))


def unreached(run: Row, cells: Sequence[Row]) -> list[Cell]:
    """Planned cells that have no record yet."""
    from harness.spec.cell import Cell

    recorded = {row["cell_id"] for row in cells}
    found = []
    for planned in _plan(run).get("cells", []):
        try:
            cell = Cell(**planned)
        except (TypeError, ValueError):
            continue  # of a version whose cells had other fields
        if cell.id not in recorded:
            found.append(cell)
    return found


def _plan(run: Row) -> dict[str, Any]:
    plan = _json(run["plan"])
    return plan if isinstance(plan, dict) else {}


def _json(text: Any) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError):
        return None


def hardware(run: Row) -> str:
    """`2 x NVIDIA H100 (80 GiB each)` or `2 cores of Intel Xeon, no GPU`."""
    gpus = [str(name) for name in (run["gpus"] if run["gpus"] is not None else [])]
    if not gpus:
        model = "" if missing(run["cpu_model"]) else f" of {run['cpu_model']}"
        return f"{plural(_whole(run['cpu_cores']), 'CPU core')}{model}, no GPU"
    each = (
        ""
        if missing(run["gpu_memory_bytes"])
        else f" ({number(run['gpu_memory_bytes'] / GIB)} GiB each)"
    )
    return " and ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)) + each


def _whole(value: Any) -> int:
    return 0 if missing(value) else int(value)


def _gpus(run: Row) -> list[tuple[str, str]]:
    """What is known of the GPUs' driver, settings and connections; of a run without GPUs
    nothing."""
    versions = {
        "driver": run.get("driver_version"),
        "which runs CUDA up to": run.get("driver_cuda_version"),
        "torch's CUDA": run.get("torch_cuda_version"),
        "NCCL": run.get("nccl_version"),
        "cuDNN": run.get("cudnn_version"),
    }
    words = ", ".join(f"{name} {value}" for name, value in versions.items() if not missing(value))
    facts = _json(run.get("gpu_facts"))
    settings = Counter(map(_setting, facts if isinstance(facts, list) else []))
    each = "; ".join(
        f"{plural(count, 'GPU')}: {setting}" for setting, count in settings.items() if setting
    )
    unused = run.get("gpus_unused")
    return [
        ("GPUs not used", "" if missing(unused) else str(unused)),
        ("GPU software", words),
        ("GPU settings", each),
        ("GPU connections", _connections(_json(run.get("gpu_topology")))),
    ]


def _setting(facts: Row) -> str:
    """Of one GPU: power limit, error correction, persistence, place."""
    limit, default = facts.get("power_limit_watts"), facts.get("default_power_limit_watts")
    lowered = "" if default in (None, limit) else f" (default {number(default)} W)"
    switches = {"error correction": facts.get("ecc"), "persistence mode": facts.get("persistence")}
    parts = [] if limit is None else [f"power limit {number(limit)} W{lowered}"]
    parts += [f"{name} {'on' if on else 'off'}" for name, on in switches.items() if on is not None]
    parts += ["MIG slice"] if facts.get("mig") else []
    return ", ".join(parts)


def _connections(pairs: Any) -> str:
    """How many pairs of GPUs are connected how."""
    if not isinstance(pairs, list):
        return ""
    kinds = Counter(row[other] for place, row in enumerate(pairs) for other in range(place))
    return "; ".join(f"{plural(count, 'pair')} by {kind}" for kind, count in kinds.items())


def environment(run: Row) -> list[tuple[str, str]]:
    """Name and value of everything that is known of where it ran."""
    libraries = _json(run["libraries"])
    libraries = libraries if isinstance(libraries, dict) else {}
    memory = DASH if missing(run["memory_bytes"]) else f"{number(run['memory_bytes'] / GIB)} GiB"
    plan = _plan(run)
    rows = [
        ("Run", run["run_id"]),
        (
            "Started",
            (
                f"{run['started_at']:%Y-%m-%d %H:%M:%S} UTC"
                if not missing_time(run["started_at"])
                else DASH
            ),
        ),
        ("Matrix", run["matrix"]),
        ("Trials of each cell", plan.get("trials")),
        (
            "Launches of a round",
            "by turns of a few steps, all at once" if plan.get("by_turns") else "",
        ),
        ("Seed of the order", plan.get("order_seed")),
        ("Hardware", hardware(run)),
        *_gpus(run),
        ("Memory of the host", memory),
        ("Host", run["host"]),
        ("Operating system", run["operating_system"]),
        ("Python", run["python_version"]),
        ("PyTorch", run["torch_version"]),
        ("Libraries", ", ".join(f"{name} {version}" for name, version in libraries.items())),
        (
            "Suite",
            (
                f"{run['suite_version']}, commit"
                f" {'unknown' if missing(run['git_commit']) else run['git_commit']}"
            ),
        ),
        ("Schema of the record", f"version {run['schema_version']}"),
    ]
    return [(name, str(value)) for name, value in rows if value not in (None, "")]


def missing_time(value: Any) -> bool:
    """Whether a timestamp is null."""
    return value is None or value != value


@dataclass(frozen=True)
class Tolerance:
    """Cells that were held to the same tolerance, for the same reason."""

    loss: str
    update: str
    reason: str
    labels: tuple[str, ...]


def tolerances(cells: Sequence[Row]) -> list[Tolerance]:
    """What was allowed, the tightest first.

    The reason is known of cells that used more than the tightest.
    """
    grouped: dict[tuple[float, float], list[Row]] = {}
    for row in cells:
        if not missing(row.get("parity_loss_tolerance")):
            grouped.setdefault(
                (row["parity_loss_tolerance"], row["parity_update_tolerance"]), []
            ).append(row)
    found = []
    for (loss, update), rows in sorted(grouped.items()):
        reasons = [
            row["parity_reason"]
            for row in rows
            if row["parity_verdict"] == "within tolerance" and row["parity_reason"]
        ]
        names = tuple(dict.fromkeys(f"{row['label']} {row['precision']}" for row in rows))
        found.append(
            Tolerance(deviation(loss), deviation(update), "; ".join(dict.fromkeys(reasons)), names)
        )
    return found


def measured(cells: Sequence[Row]) -> list[tuple[str, str]]:
    """Name of a method and the method in words."""
    from harness.analysis.flops import FORMULA
    from harness.analysis.stats import INTERVAL_METHOD, within_rounds

    memory = list(
        dict.fromkeys(
            str(row["memory_method"]) for row in cells if not missing(row["memory_method"])
        )
    )
    throughput = (
        "global batch (samples, or tokens) over the step time; the step time is the slowest rank's"
        " at each step, between two device synchronisations, getting the batch included; warm-up"
        " steps are left out"
    )
    states = (
        "distinct storages of parameters, gradients, optimizer state and the library's own copies"
        " and buffers that a rank keeps after a step, looked at outside the timed ones; shown is"
        " the fullest rank, in the trial where it keeps most"
    )
    sent = (
        "payload that a rank sent over TCP in a timed step, control messages included; shown is the"
        " rank that sends most, the median of the trials"
    )
    efficiency = (
        "throughput over (devices x throughput on one device): 100 % is ideal. Weak scaling"
        " compares with one device at the batch that each device has"
    )
    method = within_rounds(any(row.get("turns") for row in cells))
    rows = [
        ("Throughput", throughput),
        ("Interval", INTERVAL_METHOD),
        (
            "Told apart",
            f"two neighbours in a ranking are marked ≈ where no difference is seen: {method}",
        ),
        ("Memory", "; ".join(memory) + ". Each device has its own peak; shown is the largest"),
        (
            "States between steps",
            states if any(not missing(row.get("state_bytes")) for row in cells) else "",
        ),
        (
            "Bytes sent",
            sent if any(not missing(row.get("sent_bytes_per_step")) for row in cells) else "",
        ),
        ("Scaling efficiency", efficiency),
        ("FLOPs and MFU", FORMULA),
    ]
    return [(name, text) for name, text in rows if text and (name != "Memory" or memory)]
