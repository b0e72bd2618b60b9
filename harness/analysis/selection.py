"""What is compared: the runs or folders that are meant, what each says of its cells, and on which
hardware."""

from __future__ import annotations

import dataclasses
import functools
import json
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.analysis.disturbance import disturbances
from harness.analysis.stats import SliceRates
from harness.analysis.summary import (
    GPUS,
    LOAD,
    RANKED,
    ended,
    gpus_of,
    known,
    reason_of,
    turns_of,
    worst_of,
)
from harness.record.store import Results, Store
from harness.spec.errors import UsageError

if TYPE_CHECKING:
    from datetime import datetime

    import pandas as pd

_SAME_MEMORY = 0.02
"""Kernels of one machine differ in what they keep for themselves."""


@dataclass(frozen=True)
class Hardware:
    """What must be equal for times to be compared."""

    host: str
    cpu_model: str | None
    cpu_cores: int
    memory_bytes: int
    gpus: tuple[str, ...]
    gpu_memory_bytes: float | None
    power_limits: tuple[str, ...] | None = None
    """Of each GPU in words; None: unknown, as before schema version 7."""
    ecc: tuple[str, ...] | None = None
    """The same of error correction, which takes some of the memory's speed."""

    @classmethod
    def of(cls, run: Mapping[str, Any]) -> Hardware:
        """From a run's row."""
        gpus = () if run["gpus"] is None else tuple(run["gpus"])
        memory, cores = int(run["memory_bytes"]), int(run["cpu_cores"])
        limits, ecc = _settings(run.get("gpu_facts"))
        return cls(
            run["host"],
            _text(run["cpu_model"]),
            cores,
            memory,
            gpus,
            known(run["gpu_memory_bytes"]),
            limits,
            ecc,
        )

    def difference(self, other: Hardware, device: str) -> str:
        """Why times on the two say nothing of each other; empty where they are equal.

        GPUs matter to cells on GPUs only.
        """
        if self.cpu_model is None and other.cpu_model is None and self.host != other.host:
            return "other hosts, whose CPU models are unknown"
        if self.cpu_model != other.cpu_model:
            return f"other CPU: {self.cpu_model or 'unknown'}, then {other.cpu_model or 'unknown'}"
        if self.cpu_cores != other.cpu_cores:
            return f"other number of CPU cores: {self.cpu_cores}, then {other.cpu_cores}"
        if _apart(self.memory_bytes, other.memory_bytes):
            return (
                f"other memory: {self.memory_bytes / 2**30:.1f} GiB, then"
                f" {other.memory_bytes / 2**30:.1f} GiB"
            )
        if device == "cpu":
            return ""
        if self.gpus != other.gpus:
            return f"other GPUs: {_gpu_words(self.gpus)}, then {_gpu_words(other.gpus)}"
        if _apart(self.gpu_memory_bytes or 0, other.gpu_memory_bytes or 0):
            return (
                f"other GPU memory: {(self.gpu_memory_bytes or 0) / 2**30:.1f} GiB, then"
                f" {(other.gpu_memory_bytes or 0) / 2**30:.1f} GiB"
            )
        if (
            None not in (self.power_limits, other.power_limits)
            and self.power_limits != other.power_limits
        ):
            return (
                f"other GPU power limit: {_gpu_words(self.power_limits)}, then"
                f" {_gpu_words(other.power_limits)}"
            )
        if None not in (self.ecc, other.ecc) and self.ecc != other.ecc:
            return (
                f"other error correction of GPU memory: {_gpu_words(self.ecc)}, then"
                f" {_gpu_words(other.ecc)}"
            )
        return ""


def _settings(facts: Any) -> tuple[tuple[str, ...] | None, tuple[str, ...] | None]:
    """Power limit and error correction of each GPU in words, from a run's `gpu_facts`; None where
    one is unknown."""
    gpus = json.loads(facts) if isinstance(facts, str) else []
    limits = [one["power_limit_watts"] for one in gpus]
    ecc = [one["ecc"] for one in gpus]
    return (
        tuple(f"{watts:.0f} W" for watts in limits) if gpus and None not in limits else None,
        tuple("on" if on else "off" for on in ecc) if gpus and None not in ecc else None,
    )


def _apart(one: float, two: float) -> bool:
    return abs(one - two) > _SAME_MEMORY * max(one, two)


def _gpu_words(gpus: Sequence[str] | None) -> str:
    """Each kind once, with its number."""
    return ", ".join(f"{count} x {name}" for name, count in Counter(gpus or ()).items()) or "none"


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


@dataclass(frozen=True)
class Measured:
    """What one run says of one cell; only the last attempt of each trial counts."""

    run_id: str
    started_at: datetime
    hardware: Hardware
    cell_id: str
    """The one that it goes by, see `joined`."""
    cell_name: str
    label: str
    cell: str
    """JSON."""
    device: str
    state: str
    """`ok` (verified, may be compared by speed), `unverified`, or the status of the worst of its
    trials.

    Trials that the user stopped count only where there is no other.
    """
    reason: str
    trials: int
    """Recorded ones, without those that the user stopped."""
    speeds: Mapping[int, float] = field(default_factory=dict)
    """Samples per second by round."""
    peaks: Mapping[int, float] = field(default_factory=dict)
    """Peak memory of the fullest rank in bytes by round, where it is known."""
    turns: Mapping[int, SliceRates] = field(default_factory=dict)
    """Samples per second in each turn by round, of launches that trained by turns."""
    memory_method: str | None = None
    disturbed: tuple[str, ...] = ()
    """Trials that something disturbed, in words."""

    @property
    def ok(self) -> bool:
        return self.state == "ok"

    @property
    def speed(self) -> float | None:
        """Median over trials, samples per second."""
        return statistics.median(self.speeds.values()) if self.ok else None

    @property
    def peak(self) -> float | None:
        """Median over trials, bytes."""
        return statistics.median(self.peaks.values()) if self.peaks else None


def measured(results: Results) -> list[Measured]:
    """What each run says of each of its cells, oldest run first.

    Searches for the largest model are left out.
    """
    runs = {
        r["run_id"]: r
        for r in results.runs.to_dict("records")
        if "search" not in json.loads(r["plan"])
    }
    trials = results.trials[results.trials["run_id"].isin(list(runs))]
    last = trials.sort_values(["run_id", "attempt"], kind="stable").drop_duplicates(
        ["run_id", "cell_id", "trial"], keep="last"
    )
    found = []
    for (run_id, _), group in last.groupby(["run_id", "cell_id"], sort=False):
        found.append(_measured(runs[str(run_id)], group.sort_values("trial")))
    return joined(found)


def joined(cells: Sequence[Measured]) -> list[Measured]:
    """The same, where records with ids by the older rule go by the id of the first with a newer one
    that the older rule calls alike.

    So a history goes on over the change of rules, and a default that changes after it begins
    another.
    """
    first: dict[str, str] = {}
    for one in sorted(cells, key=lambda one: one.started_at):
        if one.cell_id != (older := _older_id(one.cell)):
            first.setdefault(older, one.cell_id)
    return [dataclasses.replace(one, cell_id=first.get(one.cell_id, one.cell_id)) for one in cells]


@functools.cache
def _older_id(cell: str) -> str:
    from harness.spec.cell import Cell

    return Cell(**json.loads(cell)).older_id


_TRIAL = (
    "trial",
    "status",
    "reason",
    "parity_verdict",
    "parity_reason",
    "samples_per_second",
    "peak_memory_bytes",
    "memory_method",
    "turn_began",
    "turn_samples_per_second",
)


def _measured(run: Mapping[Any, Any], group: pd.DataFrame) -> Measured:
    first = group.iloc[0]
    trials = ended(group[[*_TRIAL, *LOAD, *GPUS]].to_dict("records"))
    unverified = [t for t in trials if t["status"] == "ok" and t["parity_verdict"] not in RANKED]
    state, reason = worst_of(trials)["status"], reason_of(trials)
    if state == "ok" and unverified:
        state, reason = "unverified", _text(unverified[0]["parity_reason"]) or "parity unknown"
    good = [t for t in trials if t["status"] == "ok"]
    return Measured(
        run["run_id"],
        run["started_at"],
        Hardware.of(run),
        first["cell_id"],
        first["cell_name"],
        first["label"],
        first["cell"],
        first["device"],
        state,
        reason,
        len(trials),
        _by_round(good, "samples_per_second"),
        _by_round(good, "peak_memory_bytes"),
        turns_of(good),
        _text(good[0]["memory_method"]) if good else None,
        tuple(said for t in trials if (said := _foreign(t))),
    )


def _by_round(trials: Iterable[Mapping[Any, Any]], column: str) -> dict[int, float]:
    return {int(t["trial"]): value for t in trials if (value := known(t[column]))}


def _foreign(trial: Mapping[Any, Any]) -> str:
    """What disturbed it, in words; empty where nothing did, and where the file is of a version that
    did not look."""
    foreign, before, after = (known(trial[name]) for name in LOAD)
    gpus = gpus_of(trial)
    causes = disturbances(foreign, before, after, gpus)
    seen = [one.words for one in gpus.findings()]
    if "busy" in causes:
        seen += [] if foreign is None else [f"{foreign:.2f} cores used by others"]
        seen += [
            f"{share * 100:.0f} % idle {when}"
            for share, when in ((before, "before"), (after, "after"))
            if share is not None
        ]
    return f"trial {trial['trial']}: {', '.join(seen)}" if causes else ""


@dataclass(frozen=True)
class RunSelection:
    """One side of a comparison: a run, or the newest run of each cell and hardware of a folder."""

    name: str
    cells: tuple[Measured, ...]
    software: Mapping[str, tuple[str, ...]]
    """Versions by name; several where the runs differ."""


def side(name: str, results: Results) -> RunSelection:
    """A side from the frames of its runs."""
    newest: list[Measured] = []
    for one in reversed(measured(results)):
        if not any(
            one.cell_id == new.cell_id and not one.hardware.difference(new.hardware, one.device)
            for new in newest
        ):
            newest.append(one)
    used = {one.run_id for one in newest}
    runs = [row for row in results.runs.to_dict("records") if row["run_id"] in used]
    names = dict.fromkeys(key for run in runs for key in _software(run))
    versions = {
        key: tuple(dict.fromkeys(_software(run).get(key, "none") for run in runs)) for key in names
    }
    return RunSelection(name, tuple(reversed(newest)), versions)


_GPU_SOFTWARE = {
    "NVIDIA driver": "driver_version",
    "CUDA of torch": "torch_cuda_version",
    "NCCL": "nccl_version",
    "cuDNN": "cudnn_version",
}


def _software(run: Mapping[Any, Any]) -> dict[str, str]:
    commit = _text(run["git_commit"])
    return {
        "torch": run["torch_version"],
        "Python": run["python_version"],
        **json.loads(run["libraries"]),
        "operating system": run["operating_system"],
        **{
            name: version
            for name, column in _GPU_SOFTWARE.items()
            if (version := _text(run.get(column)))
        },
        "commit of the suite": (
            commit[:12] + ("+" if commit.endswith("+") else "") if commit else "unknown"
        ),
    }


def find_run(store: Store, word: str) -> str:
    """The run that is meant: its id, a prefix that only it has, `latest`, `latest~1` for the one
    before; raises UsageError."""
    known = store.run_ids()
    if not known:
        store.load()  # says so
    if word == "latest" or word.startswith("latest~"):
        back = word.removeprefix("latest").removeprefix("~") or "0"
        ordinary = [
            run_id for run_id in known if "search" not in json.loads(store.run_row(run_id)["plan"])
        ]
        if not back.isdigit() or int(back) >= len(ordinary):
            raise UsageError(
                f"no run {word!r}: {str(store.folder)!r} has {len(ordinary)} to compare, the newest"
                " is latest, then latest~1"
            )
        return str(ordinary[-1 - int(back)])
    found = (
        [word]
        if word in known
        else [run_id for run_id in known if word and run_id.startswith(word)]
    )
    if len(found) > 1:
        raise UsageError(f"run {word!r} is not clear: {', '.join(found[-5:])} begin with it")
    if not found:
        raise UsageError(
            f"no run {word!r} in {str(store.folder)!r}; its runs are: {', '.join(known[-5:])}"
        )
    return found[0]


def two_sides(first: str, second: str, results: Path) -> tuple[RunSelection, RunSelection]:
    """The runs or folders that are meant, A and B.

    A folder that holds the other side's run is taken without it. Raises UsageError.
    """
    (one, first_id, was), (two, second_id, now) = (
        _resolve(word, results) for word in (first, second)
    )
    if one == two:
        if first_id == second_id:
            raise UsageError(
                f"{first!r} and {second!r} are the same {'run' if first_id else 'folder'}; a"
                " comparison needs two"
            )
        was, now = (
            (was if first_id else _without(was, second_id)),
            (now if second_id else _without(now, first_id)),
        )
    sides = side(first_id or f"folder {first}", was), side(second_id or f"folder {second}", now)
    for found in sides:
        if not found.cells:
            raise UsageError(f"{found.name} has no recorded trial of a matrix to compare with")
    return sides


def _without(results: Results, run_id: str | None) -> Results:
    runs, trials = (frame[frame["run_id"] != run_id] for frame in (results.runs, results.trials))
    return dataclasses.replace(results, runs=runs, trials=trials)


def _resolve(word: str, results: Path) -> tuple[Path, str | None, Results]:
    """Folder, run (None: the whole folder) and frames of a word."""
    store = Store(results)
    if Path(word).is_dir() and word not in store.run_ids():
        return Path(word).resolve(), None, Store(word).load(steps=False)
    run_id = find_run(store, word)
    return results.resolve(), run_id, store.load([run_id], steps=False)
