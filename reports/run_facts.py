from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from harness.record.hardware_facts import SpeedMeasurement
from harness.record.run_record import RunRecord
from harness.spec.text import plural
from reports.text import number

GIB = 2**30


def plan_of(run: RunRecord) -> dict[str, Any]:
    plan = _json(run.plan)
    return plan if isinstance(plan, dict) else {}


def _json(text: str | None) -> Any:
    try:
        return json.loads(text or "")
    except (TypeError, ValueError):
        return None


def hardware(run: RunRecord) -> str:
    """Returns `2 x NVIDIA H100 (80 GiB each)` or `2 CPU cores of Intel Xeon, no GPU`."""
    if not run.gpus:
        model = "" if run.cpu_model is None else f" of {run.cpu_model}"
        gpus = "GPUs not used" if run.gpus_unused else "no GPU"
        return f"{plural(run.cpu_cores, 'CPU core')}{model}, {gpus}"
    each = ""
    if run.gpu_memory_bytes is not None:
        each = f" ({number(run.gpu_memory_bytes / GIB)} GiB each)"
    counts = Counter(run.gpus)
    return " and ".join(f"{count} x {name}" for name, count in counts.items()) + each


def _gpus(run: RunRecord) -> list[tuple[str, str]]:
    versions = {
        "driver": run.driver_version,
        "which supports CUDA up to": run.driver_cuda_version,
        "torch's CUDA": run.torch_cuda_version,
        "NCCL": run.nccl_version,
        "cuDNN": run.cudnn_version,
    }
    words = ", ".join(f"{name} {value}" for name, value in versions.items() if value is not None)
    facts = _json(run.gpu_facts)
    settings = Counter(map(_setting, facts if isinstance(facts, list) else []))
    each = "; ".join(
        f"{plural(count, 'GPU')}: {setting}" for setting, count in settings.items() if setting
    )
    return [
        ("GPUs not used", run.gpus_unused or ""),
        ("GPU software", words),
        ("GPU settings", each),
        ("GPU speed, measured", _speed(run.device_speed)),
        ("GPU connections", _connections(_json(run.gpu_topology))),
    ]


def _speed(column: str | None) -> str:
    measured = SpeedMeasurement.read(column)
    if measured is None:
        return ""
    if (speed := measured.speed) is None:
        return f"unknown: {measured.reason}"
    products = ", ".join(
        f"{name} {number(rate / 1e12)}" for name, rate in speed.matmul_flops_per_second.items()
    )
    words = f"matrix products {products} TFLOP/s; copies {_gigabytes(speed.copy_bytes_per_second)}"
    for way, rates in (
        ("from the host", speed.host_to_device_bytes_per_second),
        ("to the host", speed.device_to_host_bytes_per_second),
    ):
        words += "".join(f", {kind} {way} {_gigabytes(rate)}" for kind, rate in rates.items())
    return f"{words}; a launch {number(speed.launch_seconds * 1e6)} µs"


def _gigabytes(rate: float) -> str:
    return f"{number(rate / 1e9)} GB/s"


def _setting(facts: Mapping[str, float | bool | None]) -> str:
    limit, default = facts.get("power_limit_watts"), facts.get("default_power_limit_watts")
    lowered = "" if default in (None, limit) else f" (default {number(default)} W)"
    switches = {"error correction": facts.get("ecc"), "persistence mode": facts.get("persistence")}
    parts = [] if limit is None else [f"power limit {number(limit)} W{lowered}"]
    parts += [f"{name} {'on' if on else 'off'}" for name, on in switches.items() if on is not None]
    parts += ["MIG slice"] if facts.get("mig") else []
    return ", ".join(parts)


def _connections(pairs: object) -> str:
    if not isinstance(pairs, list):
        return ""
    kinds = Counter(row[other] for place, row in enumerate(pairs) for other in range(place))
    return "; ".join(f"{plural(count, 'pair')} by {kind}" for kind, count in kinds.items())


def environment(run: RunRecord) -> list[tuple[str, str]]:
    libraries = _json(run.libraries)
    libraries = libraries if isinstance(libraries, dict) else {}
    plan = plan_of(run)
    in_slices = "all at once, interleaved by a few steps" if plan.get("interleaved") else ""
    rows = [
        ("Run", run.run_id),
        ("Started", f"{run.started_at:%Y-%m-%d %H:%M:%S} UTC"),
        ("Matrix", run.matrix),
        ("Planned trials of each cell", plan.get("trials")),
        ("Trials of a round", in_slices),
        ("Seed of the order", plan.get("order_seed")),
        ("Hardware", hardware(run)),
        *_gpus(run),
        ("Memory for the run", f"{number(run.memory_bytes / GIB)} GiB"),
        ("Host", run.host),
        ("Operating system", run.operating_system),
        ("Python", run.python_version),
        ("PyTorch", run.torch_version),
        ("Libraries", ", ".join(f"{name} {version}" for name, version in libraries.items())),
        ("Suite", f"{run.suite_version}, commit {run.git_commit or 'unknown'}"),
        ("Schema of the record", f"version {run.schema_version}"),
    ]
    return [(name, str(value)) for name, value in rows if value not in (None, "")]
