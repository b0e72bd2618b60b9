from __future__ import annotations

import dataclasses
import json
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harness.analysis.cell_result import NOT_CHECKED, CellResult
from harness.analysis.summary import in_recorded_order
from harness.cell.cell import Cell
from harness.cell.errors import UsageError, plural
from harness.record.files import FIRST_WITH_CELL_IDS
from harness.record.plan import matrix_name
from harness.record.run_record import RunRecord
from harness.record.store import Results, Store
from harness.record.trial import TrialRecord

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

_SAME_MEMORY = 0.02
"""Relative tolerance for memory, as operating systems reserve different amounts."""


@dataclass(frozen=True)
class Hardware:
    """Properties that must match for times to be comparable."""

    host: str
    cpu_model: str | None
    cpu_cores: int
    memory_bytes: int
    gpus: tuple[str, ...]
    gpu_memory_bytes: float | None
    power_limits: tuple[str, ...] | None = None
    ecc: tuple[str, ...] | None = None

    @classmethod
    def of(cls, run: RunRecord) -> Hardware:
        limits, ecc = _settings(run.gpu_facts)
        return cls(
            run.host,
            run.cpu_model,
            run.cpu_cores,
            run.memory_bytes,
            run.gpus,
            run.gpu_memory_bytes,
            limits,
            ecc,
        )

    def difference(self, other: Hardware, device: str) -> str:
        """Returns why times are not comparable; empty if they are. GPUs matter only to GPU
        cells."""
        if self.cpu_model is None and other.cpu_model is None and self.host != other.host:
            return "different hosts with unknown CPU models"
        if self.cpu_model != other.cpu_model:
            return (
                f"different CPU: {self.cpu_model or 'unknown'}, then {other.cpu_model or 'unknown'}"
            )
        if self.cpu_cores != other.cpu_cores:
            return f"different number of CPU cores: {self.cpu_cores}, then {other.cpu_cores}"
        if _apart(self.memory_bytes, other.memory_bytes):
            return (
                f"different memory: {self.memory_bytes / 2**30:.1f} GiB, then"
                f" {other.memory_bytes / 2**30:.1f} GiB"
            )
        if device == "cpu":
            return ""
        if self.gpus != other.gpus:
            return f"different GPUs: {_gpu_words(self.gpus)}, then {_gpu_words(other.gpus)}"
        if _apart(self.gpu_memory_bytes or 0, other.gpu_memory_bytes or 0):
            return (
                f"different GPU memory: {(self.gpu_memory_bytes or 0) / 2**30:.1f} GiB, then"
                f" {(other.gpu_memory_bytes or 0) / 2**30:.1f} GiB"
            )
        if (
            None not in (self.power_limits, other.power_limits)
            and self.power_limits != other.power_limits
        ):
            return (
                f"different GPU power limit: {_gpu_words(self.power_limits)}, then"
                f" {_gpu_words(other.power_limits)}"
            )
        if None not in (self.ecc, other.ecc) and self.ecc != other.ecc:
            return (
                f"different error correction of GPU memory: {_gpu_words(self.ecc)}, then"
                f" {_gpu_words(other.ecc)}"
            )
        return ""


def _settings(facts: str | None) -> tuple[tuple[str, ...] | None, tuple[str, ...] | None]:
    gpus = json.loads(facts) if facts else []
    limits = [gpu["power_limit_watts"] for gpu in gpus]
    ecc = [gpu["ecc"] for gpu in gpus]
    return (
        tuple(f"{watts:.0f} W" for watts in limits) if gpus and None not in limits else None,
        tuple("on" if on else "off" for on in ecc) if gpus and None not in ecc else None,
    )


def _apart(size: float, other: float) -> bool:
    return abs(size - other) > _SAME_MEMORY * max(size, other)


def _gpu_words(gpus: Sequence[str] | None) -> str:
    return ", ".join(f"{count} x {name}" for name, count in Counter(gpus or ()).items()) or "none"


@dataclass(frozen=True)
class MeasuredCell:
    result: CellResult
    started_at: datetime
    hardware: Hardware

    @property
    def cell_id(self) -> str:
        return self.result.cell_id

    @property
    def run_id(self) -> str:
        return self.result.run_id

    @property
    def cell_name(self) -> str:
        return self.result.cell.name

    @property
    def label(self) -> str:
        return self.result.cell.label

    @property
    def cell(self) -> Cell:
        return self.result.cell

    @property
    def ok(self) -> bool:
        """Whether its figures may be compared; what a script trained may differ."""
        return self.result.outcome in ("ok", NOT_CHECKED)

    @property
    def speed(self) -> float | None:
        """Samples per second, geometric mean over trials; None if not comparable."""
        return self.result.speed.samples_per_second if self.ok else None

    @property
    def peak(self) -> float | None:
        """Peak bytes of the fullest rank, median over trials."""
        peaks = self.result.memory.peak_by_round.values()
        return statistics.median(peaks) if peaks else None

    def comparable(self, other: MeasuredCell) -> bool:
        return not self.hardware.difference(other.hardware, self.result.cell.device)


def measured(results: Results) -> list[MeasuredCell]:
    """Returns all cells of all runs except searches, oldest run first."""
    runs = {run.run_id: run for run in RunRecord.from_frame(results.runs) if not is_search(run)}
    trials = results.trials[results.trials["run_id"].isin(list(runs))]
    cells = in_recorded_order(TrialRecord.from_frame(trials))
    cells.sort(key=lambda cell: (runs[cell.run_id].started_at, cell.run_id))
    hardware = {run_id: Hardware.of(run) for run_id, run in runs.items()}
    return [
        MeasuredCell(
            _with_id(cell, runs[cell.run_id]), runs[cell.run_id].started_at, hardware[cell.run_id]
        )
        for cell in cells
    ]


def _with_id(cell: CellResult, run: RunRecord) -> CellResult:
    """Returns the cell with the id that newer runs have for its settings."""
    if run.schema_version >= FIRST_WITH_CELL_IDS:
        return cell
    return dataclasses.replace(cell, cell_id=cell.cell.id)


def spread_between_runs(cell: CellResult, baseline: CellResult, results: Results) -> str:
    """Returns the range of a cell's gain in the runs that measured it and the baseline, as a
    sentence; empty for fewer than two runs."""
    wanted = {cell.cell_id, baseline.cell_id}
    trials = results.trials.groupby("run_id").filter(lambda run: wanted <= set(run["cell_id"]))
    runs = results.runs[results.runs["run_id"].isin(trials["run_id"])]
    by_run: dict[str, dict[str, MeasuredCell]] = {}
    for found in measured(dataclasses.replace(results, runs=runs, trials=trials)):
        if found.cell_id in wanted and found.speed:
            by_run.setdefault(found.run_id, {})[found.cell_id] = found
    pairs = [(of[cell.cell_id], of[baseline.cell_id]) for of in by_run.values() if len(of) == 2]
    if len(pairs) < 2:
        return ""
    gains = [(first.speed or 0.0) / (second.speed or 1.0) - 1 for first, second in pairs]
    low, high = (f"{100 * gain:.1f}".replace("-", "−") for gain in (min(gains), max(gains)))
    processors = {(first.hardware.cpu_model, first.hardware.gpus) for first, _ in pairs}
    return (
        f"in {plural(len(pairs), 'run')} on {plural(len(processors), 'processor')},"
        f" {cell.cell.label} was {low} to {high}% faster than {baseline.cell.label}"
    )


def is_search(run: RunRecord) -> bool:
    return "search" in json.loads(run.plan)


@dataclass(frozen=True)
class RunSelection:
    """One side of a comparison: a run, or the newest runs of a folder."""

    name: str
    cells: tuple[MeasuredCell, ...]
    software: Mapping[str, tuple[str, ...]]


def select(name: str, results: Results) -> RunSelection:
    newest: list[MeasuredCell] = []
    for cell in reversed(measured(results)):
        if not any(cell.cell_id == new.cell_id and cell.comparable(new) for new in newest):
            newest.append(cell)
    used = {cell.run_id for cell in newest}
    software = [_software(run) for run in RunRecord.from_frame(results.runs) if run.run_id in used]
    names = dict.fromkeys(name for versions in software for name in versions)
    versions = {
        name: tuple(dict.fromkeys(versions.get(name, "none") for versions in software))
        for name in names
    }
    return RunSelection(name, tuple(reversed(newest)), versions)


def _software(run: RunRecord) -> dict[str, str]:
    commit = run.git_commit
    gpu_software = {
        "GPU driver": run.driver_version,
        "CUDA of torch": run.torch_cuda_version,
        "NCCL": run.nccl_version,
        "cuDNN": run.cudnn_version,
    }
    return {
        "torch": run.torch_version,
        "Python": run.python_version,
        **json.loads(run.libraries),
        "operating system": run.operating_system,
        **{name: version for name, version in gpu_software.items() if version},
        "commit of the suite": (
            commit[:12] + ("+" if commit.endswith("+") else "") if commit else "unknown"
        ),
    }


def find_run(store: Store, word: str) -> str:
    """Returns a run's id, given an id, unique prefix, `latest`, or `latest~N`, the N-th run before
    the latest one of its matrix. Raises UsageError."""
    run_ids = store.run_ids()
    if not run_ids:
        store.load()  # raises NoRuns
    if word == "latest" or word.startswith("latest~"):
        return _latest(store, word)
    if word in run_ids:
        return word
    matching = [run_id for run_id in run_ids if word and run_id.startswith(word)]
    if len(matching) > 1:
        raise UsageError(f"run {word!r} is ambiguous: it is a prefix of {', '.join(matching[-5:])}")
    if not matching:
        raise UsageError(
            f"no run {word!r} in {str(store.folder)!r}; the newest runs are:"
            f" {', '.join(run_ids[-5:])}"
        )
    return matching[0]


def _latest(store: Store, word: str) -> str:
    back = word.removeprefix("latest").removeprefix("~") or "0"
    passed, matrix = 0, ""
    for row in store.newest_rows():
        name = matrix_name(row["matrix"])
        if "search" in json.loads(row["plan"]) or (passed and name != matrix):
            continue
        if back == str(passed):
            return str(row["run_id"])
        passed, matrix = passed + 1, name
    raise UsageError(
        f"no run {word!r}: {str(store.folder)!r} has {plural(passed, 'run')} of matrix {matrix!r};"
        " latest is the newest run, latest~1 the one before of the same matrix"
    )


def two_sides(first: str, second: str, results: Path) -> tuple[RunSelection, RunSelection]:
    """Resolves both sides of a comparison; a folder excludes the other side's run. Raises
    UsageError."""
    a, b = (_resolve(word, results) for word in (first, second))
    if a.folder == b.folder and a.run_id == b.run_id:
        raise UsageError(
            f"{first!r} and {second!r} are the same {'run' if a.run_id else 'folder'}; a"
            " comparison needs two"
        )
    sides = a.selection(first, b), b.selection(second, a)
    for side in sides:
        if not side.cells:
            raise UsageError(f"{side.name} has no recorded trials to compare")
    return sides


@dataclass(frozen=True)
class _Meant:
    folder: Path
    run_id: str | None
    results: Results

    def selection(self, word: str, other: _Meant) -> RunSelection:
        results = self.results
        if self.run_id is None and self.folder == other.folder:
            runs, trials = (
                frame[frame["run_id"] != other.run_id] for frame in (results.runs, results.trials)
            )
            results = dataclasses.replace(results, runs=runs, trials=trials)
        return select(self.run_id or f"folder {word}", results)


def _resolve(word: str, results: Path) -> _Meant:
    store = Store(results)
    if Path(word).is_dir() and word not in store.run_ids():
        return _Meant(Path(word).resolve(), None, Store(word).load(steps=False))
    run_id = find_run(store, word)
    return _Meant(results.resolve(), run_id, store.load([run_id], steps=False))
