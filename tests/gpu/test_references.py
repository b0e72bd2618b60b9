"""Reference runs on GPUs fit device and disk, and depend on the GPU; their noise is measured."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import harness.run.runner as runner_module
from bench.cli.run import run
from harness.cell.cell import Cell
from harness.cell.durable import write_cached
from harness.cell.errors import UsageError
from harness.cell.training import EXACT
from harness.launch.outcome import Outcome
from harness.parity.comparison import SGD_ERROR, deviations_from
from harness.parity.reference import Deviations, Reference
from harness.record.plan import Plan
from harness.record.store import Store, TrialKey
from harness.run.prepared import PreparedTrial
from harness.run.references import ReferenceRuns, verified
from harness.run.runner import ProgressListener, Runner
from harness.seam.job import TrainState
from harness.workloads import make_workload
from harness.workloads.training_data import prepare_data
from tests.gpu import fake_nvml
from tests.gpu.fake_nvml import h100_node, install
from tests.unit.recording import answer

ON_GPU = Cell(
    strategy="ddp",
    devices=8,
    workload="llama-nano",
    device="cuda",
    regime="weak",
    global_batch=256,
    sequence_length=128,
)
NORM = "model.norm.weight"
SMALL = ON_GPU.model_copy(update={"global_batch": 32})  # a batch whose noise is measured


class Launches:
    """Records the cells it should launch, and leaves the files of a reference run."""

    def __init__(self, losses: list[float], update: float = 1e-6) -> None:
        self.cells: list[Cell] = []
        self.losses, self.update = losses, update

    def run(self, cell: Cell, data: Any, processes: int, **more: Any) -> Outcome:
        self.cells.append(cell)
        if folder := more.get("reference_output"):
            Path(folder).mkdir(parents=True)
            facts = {"losses": [2.0, 1.0], "update_norms": {}, "roundings": {}}
            write_cached(Path(folder, "reference.json"), json.dumps(facts))
        deviations = Deviations({NORM: self.update})
        seconds = [1.0] * (len(self.losses) - 1)
        rank = answer(0, seconds, list(self.losses), deviations=deviations)
        return Outcome("ok", "", time.time(), 1.0, answers=(rank,))

    def ignore_pid(self, pid: int) -> None: ...


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("PARALLELISM_BENCH_CACHE", str(tmp_path))
    prepare_data.cache_clear()
    yield tmp_path / "references"
    prepare_data.cache_clear()


def references(folder: Path, cells: list[Cell], launches: Launches) -> dict[str, Reference]:
    runner = Runner(Store(folder / "results"), Plan.new("m", cells, 1, ()))
    quiet = ProgressListener().preparing
    return runner._references.of(launches, cells, quiet)  # type: ignore[arg-type]


def test_a_reference_accumulates_gradients_so_that_it_fits_one_gpu(
    cache: Path, tmp_path: Path
) -> None:
    """In one piece, the batch of eight devices would take 235 GiB with llama-1b."""
    launches = Launches([2.0, 1.0])
    references(tmp_path, [ON_GPU], launches)
    (first,) = launches.cells  # so large a batch is not rerun for its noise
    found = (first.strategy, first.devices, first.precision, first.global_batch)
    assert found == ("single", 1, "fp32", 256)
    assert first.global_batch // first.micro_batches * first.sequence_length <= 2048


@pytest.mark.parametrize(
    ("strategy", "device", "parts"),
    [
        ("ddp", "cuda", [8]),
        ("sync_batch_norm", "cuda", [1]),
        ("ddp", "cpu", [8]),
        ("sync_batch_norm", "cpu", [1, 1]),
    ],
)
def test_a_reference_normalises_over_the_ranks_batches(
    cache: Path, tmp_path: Path, strategy: str, device: str, parts: list[int]
) -> None:
    """Batch norm's statistics over other parts of the batch would change the training.

    Batch norm over all ranks has noise on a CPU: ranks add up parts of the batch, and dividing by
    the standard deviation amplifies rounding.
    """
    launches = Launches([2.0, 1.0])
    axes = {"workload": "resnet-micro", "data": "images", "strategy": strategy, "device": device}
    size = ON_GPU if device == "cuda" else SMALL
    (reference,) = references(tmp_path, [size.model_copy(update=axes)], launches).values()
    assert [cell.micro_batches for cell in launches.cells] == parts
    assert (reference.noise is not None) == (len(parts) == 2)


def test_on_a_cpu_its_losses_go_on_after_the_segment(cache: Path, tmp_path: Path) -> None:
    """It takes its batch whole and runs once, also for a trial that takes a few more steps."""
    launches = Launches([2.0, 1.0, 0.5])
    on_cpu = ON_GPU.model_copy(update={"device": "cpu", "parity_steps": 10})
    (reference,) = references(tmp_path, [on_cpu], launches).values()
    (first,) = launches.cells
    assert first.micro_batches == 1
    assert first.total_steps == 14, "a quarter more than the segment's 11 and one timed step"
    assert reference.facts["losses"] == [2.0, 1.0]
    assert reference.all_losses == [2.0, 1.0, 0.5]
    assert reference.drift is None, "not known yet"


def test_the_drift_of_rounding_is_measured_only_if_a_trial_needs_it(
    cache: Path, tmp_path: Path
) -> None:
    on_cpu = Cell(strategy="ddp", workload="llama-nano", warmup_steps=1, parity_steps=2)
    launches = Launches([2.0, 1.0, 0.5])
    (reference,) = references(tmp_path, [on_cpu], launches).values()
    prepared = PreparedTrial(on_cpu, TrialKey(on_cpu.id, 0), 0, reference)
    runs = ReferenceRuns()
    model = make_workload("llama-nano").build(0, torch.device("cpu"))
    same = dict.fromkeys(dict(model.named_parameters()), 0.0)

    def verdict(last_loss: float) -> str:
        rank = answer(0, [1.0, 1.0], [2.0, 1.0, last_loss], deviations=Deviations(same))
        trial = Outcome("ok", "", time.time(), 1.0, answers=(rank,))
        verification = runs.verify(launches, prepared, trial)  # type: ignore[arg-type]
        assert verification.verdict is not None
        return verification.verdict.verdict

    assert verdict(0.5 * (1 + 1e-6)) == "exact"
    assert len(launches.cells) == 1, "a deviation within any drift"
    launches.losses = [2.0, 1.0, 0.5 * (1 + 1e-6)]
    assert verdict(0.5 * (1 + 1e-5)) == "exact", "30 times the drift is allowed"
    _, again = launches.cells
    assert (again.micro_batches, again.total_steps) == (2, 3)
    assert reference.drift == pytest.approx([0.0, 0.0, 1e-6])
    assert verdict(0.5 * (1 + 1e-4)) == "diverged"
    assert len(launches.cells) == 2, "kept with the reference"


def test_the_noise_of_a_reference_is_measured_once_and_kept(cache: Path, tmp_path: Path) -> None:
    """The effect of rounding alone is measured before a strategy is judged."""
    launches = Launches([2.0, 1.0002], update=3e-3)
    (reference,) = references(tmp_path, [SMALL], launches).values()
    one, other = launches.cells
    assert other.micro_batches == 2 * one.micro_batches
    assert reference.noise is not None
    assert reference.noise.loss == pytest.approx(2e-4)
    assert reference.noise.update == pytest.approx(3e-3)
    references(tmp_path, [SMALL], launches)
    assert len(launches.cells) == 2, "kept with the reference"


def test_a_noise_run_that_does_not_stay_finite_gives_no_noise(cache: Path, tmp_path: Path) -> None:
    (reference,) = references(tmp_path, [SMALL], Launches([2.0, math.nan])).values()
    assert reference.noise is None


@pytest.mark.parametrize(
    ("device", "update", "verdict"),
    [("cuda", 1.5e-3, "exact"), ("cuda", 2.5e-3, "diverged"), ("cpu", 1e-3, "diverged")],
)
def test_the_noise_of_one_gpus_batch_widens_the_limit_of_eight(
    cache: Path, tmp_path: Path, device: str, update: float, verdict: str
) -> None:
    """Another split of the batch moves the reference by 4e-4 of its updates; GPUs may deviate five
    times as much."""
    axes = {"device": device, "warmup_steps": 1, "parity_steps": 2}
    eight = ON_GPU.model_copy(update=axes)
    one = eight.model_copy(update={"devices": 1, "global_batch": 32})
    launches = Launches([2.0, 1.0], update=4e-4)
    kept_runs = references(tmp_path, [one, eight], launches)
    reference = kept_runs[runner_module.reference_key(eight)]
    prepared = PreparedTrial(eight, TrialKey(eight.id, 0), 0, reference)
    model = make_workload("llama-nano").build(0, torch.device("cpu"))
    moved = dict.fromkeys(dict(model.named_parameters()), 0.0) | {NORM: update}
    ranks = tuple(answer(i, [1.0], [2.0, 1.0], deviations=Deviations(moved)) for i in range(8))
    trial = Outcome("ok", "", time.time(), 1.0, answers=ranks)
    found = verified(prepared, trial).verdict
    assert found is not None
    assert found.verdict == verdict
    assert found.update_tolerance == pytest.approx(2e-3 if device == "cuda" else EXACT.update)


def test_a_reference_depends_on_the_kind_of_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's random numbers, and so the weights, depend on the number of multiprocessors.

    A CPU's reference is the same next to any GPU.
    """

    def key_on(name: str, cores: int, cell: Cell) -> str:
        host = h100_node()
        for gpu in host.gpus:
            gpu.name = name
        answers = {"nvmlDeviceGetNumGpuCores": lambda gpu: cores}
        monkeypatch.setattr(fake_nvml, "ANSWERS", fake_nvml.ANSWERS | answers)
        install(monkeypatch, host)
        return str(runner_module.reference_key(cell))

    h100 = "NVIDIA H100 80GB HBM3"
    kinds = [(h100, 16896), (h100, 14592), ("NVIDIA A100-SXM4-80GB", 6912)]
    assert key_on(*kinds[0], ON_GPU) == key_on(*kinds[0], ON_GPU)
    assert len({key_on(*kind, ON_GPU) for kind in kinds}) == 3
    on_cpu = ON_GPU.model_copy(update={"device": "cpu"})
    assert len({key_on(*kind, on_cpu) for kind in kinds}) == 1


def test_untrained_tensors_are_checked_but_not_stored(tmp_path: Path) -> None:
    """Next to an adapter of 1 MiB, llama-1b's untrained weights would take 4 GiB."""
    workload = make_workload("llama-nano+lora")
    model, reference = workload.build(0), Reference(str(tmp_path))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.01
    reference.save(workload, TrainState(model, ()), workload.build(0), [1.0], [], {})
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    with safe_open(tmp_path / "final.safetensors", framework="pt") as final:
        assert set(final.keys()) == {f"parameters/{name}" for name in trained}
    found = deviations_from(reference, TrainState(model, ()), workload, 1)
    assert set(found.updates.values()) == {0.0}
    name, frozen = next((name, p) for name, p in model.named_parameters() if not p.requires_grad)
    frozen.data[0] += 1e-7
    found = deviations_from(reference, TrainState(model, ()), workload, 1)
    assert found.updates[name] == math.inf, "a frozen tensor that has moved is found"


def test_an_error_in_the_size_of_an_update_is_no_missing_decay(tmp_path: Path) -> None:
    """The update is half of the final weights, and 0.3% too large; or the weights do not decay."""
    workload, reference = make_workload("llama-nano"), Reference(str(tmp_path))
    initial, model = workload.build(0), workload.build(0)
    before = dict(initial.named_parameters())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 2.0
    reference.save(workload, TrainState(model, ()), initial, [1.0], [], {})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter += 0.003 * (parameter - before[name])

    def largest(decay: float, update_error: float) -> float:
        state = TrainState(model, ())
        deviations = deviations_from(
            reference, state, workload, 1, decay=decay, update_error=update_error
        )
        return max(deviations.directions.values())

    assert largest(0.006, 0.0) > 7
    assert largest(0.006, SGD_ERROR) == 0.0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 1.006
    assert largest(0.006, SGD_ERROR) > 7


def kept(home: Path, name: str, size: int, age_seconds: float) -> Path:
    folder = home / name
    folder.mkdir(parents=True)
    (folder / "final.safetensors").write_bytes(b"0" * size)
    write_cached(folder / "reference.json", json.dumps({"losses": [2.0, 1.0]}))
    before = time.time() - age_seconds
    os.utime(folder / "reference.json", (before, before))
    return folder


def test_the_least_recently_used_are_cleared_beyond_the_limit(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """References that the run needs are kept, however long unused."""
    monkeypatch.setenv("PARALLELISM_BENCH_REFERENCES_GIB", str(2.5e6 / 2**30))
    oldest, older, recent = (
        kept(cache, name, 10**6, age) for name, age in (("a", 9e5), ("b", 8e5), ("c", 60))
    )
    needed = kept(cache, runner_module.reference_key(ON_GPU), 10**6, 9.9e5)
    references(tmp_path, [ON_GPU], Launches([2.0, 1.0]))
    exist = [folder.exists() for folder in (oldest, older, recent, needed)]
    assert exist == [False, False, True, True]
    monkeypatch.setenv("PARALLELISM_BENCH_REFERENCES_GIB", "lots")
    with pytest.raises(UsageError, match="lots"):
        references(tmp_path, [ON_GPU], Launches([2.0, 1.0]))


def test_another_run_writes_and_clears_while_room_is_made(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that another run renames or deletes after the listing are no error."""
    monkeypatch.setenv("PARALLELISM_BENCH_REFERENCES_GIB", "0")
    written, cleared = (kept(cache, name, 1000, 9e5) for name in ("written", "cleared"))
    (written / "final.another-host.1.tmp").touch()
    (cleared / "final.another-host.2.tmp").touch()
    listed = Path.iterdir

    def another_run_goes_on(folder: Path) -> Iterator[Path]:
        for file in sorted(listed(folder)):
            if file.name == "final.another-host.1.tmp":
                file.rename(file.with_name("final.safetensors"))
            if file.name == "final.another-host.2.tmp":
                shutil.rmtree(cleared)
            yield file

    monkeypatch.setattr(Path, "iterdir", another_run_goes_on)
    references(tmp_path, [ON_GPU], Launches([2.0, 1.0]))
    assert not written.exists()


def test_too_little_disk_leaves_no_run_behind(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is checked before the run's row is written, or an empty run would be listed. One
    sentence says how much is needed and where."""
    monkeypatch.setattr("harness.parity.reference_runs.kept_bytes", lambda _: 2**60)
    with pytest.raises(UsageError, match=r" GiB .*references"):
        run(matrix="smoke", results=tmp_path / "results", report=False)
    assert Store(tmp_path / "results").run_ids() == []
