"""Facts of a run that its report shows: hardware, profiles, and the result of a search."""

from __future__ import annotations

import itertools
import json
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.analysis.cell_result import CellResult
from harness.analysis.maxsize import MaxsizeResult, limits, maxsize_results, order_notes
from harness.analysis.summary import GpuTime, gpu_time
from harness.cell.cell import Cell
from harness.cell.errors import plural
from harness.record.plan import BLOCKS, MATRIX, Growth, Plan
from harness.record.profile_record import COMPONENTS, SPLIT, ProfileRecord
from harness.record.run_record import RunRecord
from harness.record.trial import SpeedMeasurement, TrialRecord
from reports.text import number, size

if TYPE_CHECKING:
    from harness.record.store import Results

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
    per_node = ""
    if run.gpu_memory_bytes is not None:
        per_node = f" ({number(run.gpu_memory_bytes / GIB)} GiB each)"
    counts = Counter(run.gpus)
    return " and ".join(f"{count} x {name}" for name, count in counts.items()) + per_node


def _gpus(run: RunRecord) -> list[tuple[str, str]]:
    versions = {
        "driver": run.driver_version,
        "which supports CUDA up to": run.driver_cuda_version,
        "torch's CUDA": run.torch_cuda_version,
        "NCCL": run.nccl_version,
        "cuDNN": run.cudnn_version,
    }
    text = ", ".join(f"{name} {value}" for name, value in versions.items() if value is not None)
    facts = _json(run.gpu_facts)
    settings = Counter(map(_setting, facts if isinstance(facts, list) else []))
    gpu_settings = "; ".join(
        f"{plural(count, 'GPU')}: {setting}" for setting, count in settings.items() if setting
    )
    return [
        ("GPUs not used", run.gpus_unused or ""),
        ("GPU software", text),
        ("GPU settings", gpu_settings),
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
    text = f"matrix products {products} TFLOP/s; copies {_gigabytes(speed.copy_bytes_per_second)}"
    for way, rates in (
        ("from the host", speed.host_to_device_bytes_per_second),
        ("to the host", speed.device_to_host_bytes_per_second),
    ):
        text += "".join(f", {kind} {way} {_gigabytes(rate)}" for kind, rate in rates.items())
    return f"{text}; a launch {number(speed.launch_seconds * 1e6)} µs"


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
    kinds = Counter(row[other] for index, row in enumerate(pairs) for other in range(index))
    return "; ".join(f"{plural(count, 'pair')} by {kind}" for kind, count in kinds.items())


def environment(run: RunRecord) -> list[tuple[str, str]]:
    libraries = _json(run.libraries)
    libraries = libraries if isinstance(libraries, dict) else {}
    plan = plan_of(run)
    rows = [
        ("Run", run.run_id),
        ("Started", f"{run.started_at:%Y-%m-%d %H:%M:%S} UTC"),
        ("Matrix", run.matrix),
        ("Planned trials of each cell", plan.get("trials")),
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


@dataclass(frozen=True)
class StepProfile:
    result: CellResult
    parts: Mapping[str, float | None]
    """Seconds by part of the step, overlaps included; mean of the ranks."""
    plain_step: float
    """Unprofiled step of the slowest rank, in seconds."""
    profiled_step: float
    straggler: int | None
    logical_bytes: float | None
    """Bytes per step that a rank's collectives must send in theory; mean of the ranks."""
    off_theory: float | None
    """Those bytes over the strategy's formula, minus 1."""
    off_algorithm: float | None
    """Socket bytes over those of the backend's algorithm, minus 1."""
    peak: Mapping[str, int | None]
    """Bytes at the peak by kind and in total (`tracked`), of the fullest rank."""
    private: int | None
    """Peak bytes of the step, measured as in trials."""
    gpu: GpuTime | None


def profiled(cells: Iterable[CellResult], profiles: Iterable[ProfileRecord]) -> list[StepProfile]:
    newest = {profile.cell_id: profile for profile in profiles if profile.status == "ok"}
    return [_profiled(cell, newest[cell.cell_id]) for cell in cells if cell.cell_id in newest]


def _profiled(cell: CellResult, profile: ProfileRecord) -> StepProfile:
    logical, theory = _mean(profile.logical_bytes), profile.theory_bytes
    sent, algorithm = _mean(profile.sent_bytes), _mean(profile.algorithm_bytes)
    parts = (*COMPONENTS, "overlapped", "operators")
    return StepProfile(
        cell,
        parts={name: _mean(getattr(profile, f"{name}_seconds")) for name in parts},
        plain_step=profile.plain_step_seconds or 0.0,
        profiled_step=profile.profiled_step_seconds or 0.0,
        straggler=profile.straggler,
        logical_bytes=logical,
        off_theory=logical / theory - 1 if logical is not None and theory else None,
        off_algorithm=sent / algorithm - 1 if sent is not None and algorithm else None,
        peak={
            kind: max(getattr(profile, f"peak_{kind}_bytes"), default=None)
            for kind in (*SPLIT, "tracked")
        },
        private=max(profile.private_bytes, default=None),
        gpu=gpu_time(
            profile,
            cell.work.flops_per_step and cell.work.flops_per_step / cell.cell.devices,
            cell.work.matmul_flops_per_second,
        ),
    )


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


@dataclass(frozen=True)
class LargestModel:
    """A strategy's largest size and the cell that reached it."""

    result: MaxsizeResult
    cell_id: str
    devices: int

    @property
    def label(self) -> str:
        return self.result.label

    @property
    def state_bytes(self) -> int | None:
        return sum(self.result.kept_bytes.values()) or None


@dataclass(frozen=True)
class Largest:
    """Result of a search for the largest model or the longest sequence."""

    budget: str
    models: tuple[LargestModel, ...]
    order: tuple[str, ...]
    limits: tuple[tuple[str, str], ...]
    """Strategy, and what filled its memory or why it has no size."""
    growth: Growth = BLOCKS
    gains: tuple[str, ...] = ()
    """What the last strategy of each chain reaches over the first."""

    @property
    def winner(self) -> LargestModel | None:
        reached = [model for model in self.models if model.result.parameters]
        return max(reached, key=lambda model: model.result.parameters or 0, default=None)


def is_search(run: RunRecord) -> bool:
    return run.matrix == MATRIX


def verified(trial: TrialRecord) -> bool:
    return trial.trial == 1 or trial.status not in ("ok", "out_of_memory")


def largest(results: Results) -> Largest | None:
    """Returns a search's result; None for other runs."""
    try:
        plan = Plan.from_row(results.runs.iloc[0].to_dict())
        rows = maxsize_results(results) if plan.search else []
    except (KeyError, TypeError, ValueError):
        return None
    if not rows or plan.search is None:
        return None
    cells = {cell.label: cell for cell in plan.cells}
    reasons = [
        (row.label, f"{row.status}: {row.reason}" if row.reason else limits(row)) for row in rows
    ]
    order = plan.search["order"]
    chains = [sentence for chain in order if (sentence := order_sentence(rows, chain))]
    return Largest(
        size(plan.search["budget"]),
        tuple(_model(row, cells.get(row.label)) for row in rows),
        (*chains, *order_notes(rows, order)),
        tuple((label, text) for label, text in reasons if text),
        Growth.of(plan.search),
        tuple(gain for chain in order if (gain := gain_sentence(rows, chain))),
    )


def _model(row: MaxsizeResult, cell: Cell | None) -> LargestModel:
    if cell is None:
        return LargestModel(row, "", 0)
    size = {"sequence_length": row.parameters} if row.unit == "tokens" and row.parameters else {}
    reached = cell.model_copy(update={"workload": row.workload, **size})
    return LargestModel(row, reached.id if row.parameters else "", cell.devices)


def gain_sentence(rows: Sequence[MaxsizeResult], chain: Sequence[str]) -> str:
    """Compares the verified sizes of a chain's first and last strategy; empty unless both have
    one."""
    verified_rows = {row.label: row for row in rows if row.status in ("found", "all fit")}
    first, last = verified_rows.get(chain[0]), verified_rows.get(chain[-1])
    if not first or not last:
        return ""
    largest, least = last.parameters or 0, first.parameters or 1
    return (
        f"Within {size(last.budget)} per rank, {last.label} trains {last.amount(largest)} and"
        f" {first.label} {first.amount(least)}, a ratio of {number(largest / least)}."
    )


def order_sentence(rows: Sequence[MaxsizeResult], chain: Sequence[str]) -> str:
    """Returns `Measured order, as theory predicts: a 10.0M < b 20.0M`; empty if fewer than two
    sizes are known."""
    by_label = {row.label: row for row in rows if row.parameters}
    present = [by_label[label] for label in chain if label in by_label]
    if len(present) < 2:
        return ""
    as_predicted = all(
        (more.parameters or 0) > (less.parameters or 0)
        for less, more in itertools.pairwise(present)
    )
    measured = sorted(present, key=lambda row: row.parameters or 0)
    order = f"{measured[0].label} {measured[0].largest_model}"
    for less, more in itertools.pairwise(measured):
        sign = "<" if less.parameters != more.parameters else "="
        order += f" {sign} {more.label} {more.largest_model}"
    if as_predicted:
        return f"Measured order, as theory predicts: {order}"
    return f"Measured order: {order}; theory predicts {' < '.join(row.label for row in present)}"
