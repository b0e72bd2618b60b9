"""Timing and its arithmetic, without a clock, on numbers worked out by hand."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as some

from harness.analysis.cell_result import disturbances
from harness.analysis.consistency import mean_losses
from harness.analysis.stats import (
    mean_of_cycles,
    over_cycles,
    percentile,
    slowest,
    trend,
)
from harness.analysis.summary import mfu
from harness.cell.cell import Cell
from harness.measure.clock import bubble_fraction, busy_fraction, timed_step
from harness.measure.peak_memory import imbalance
from harness.measure.resource_use import (
    FRESH_SECONDS,
    WINDOW_SECONDS,
    CpuTime,
    Energy,
    Idle,
    RankGpus,
    cpu_seconds,
    foreign_load,
    idle_share,
    package_joules,
)
from harness.record.run_record import RankStep
from harness.run.metrics import timed_seconds
from harness.workloads.counts import ModelFacts
from tests.unit.recording import answer, figures


class Clock:
    """Returns the given readings one after the other."""

    def __init__(self, *readings: float) -> None:
        self.readings = list(readings)

    def __call__(self) -> float:
        return self.readings.pop(0)


def test_turns_of_a_trial_match_those_worked_out_by_hand() -> None:
    """Steps 1 and 2 form a turn, 4 and 5 another; step 3 settles.

    With a cycle of two, each turn has one mean. The first turn begins at 7 s.
    """
    told = answer(0, [1.0, 3.0, 50.0, 2.0, 2.0], time_slices=((1, 7.0), (3, 9.5)))
    assert told.trained
    steps = list(told.trained.steps)
    steps[3] = replace(steps[3], phase="settling")
    told = replace(told, trained=replace(told.trained, steps=tuple(steps)))
    for cycle in (1, 2):
        row = figures(CELL, [told], FACTS, None, cycle)
        assert row.turn_began == (7.0, 9.5)
        assert row.turn_samples_per_second == (CELL.global_batch / 2.0, CELL.global_batch / 2.0)
    assert figures(CELL, [answer(0, [1.0])], FACTS, None).turn_began == ()


def test_a_step_is_timed_between_two_synchronisations() -> None:
    events: list[str] = []
    clock = Clock(10.0, 10.25, 12.0)
    result, data_seconds, step_seconds = timed_step(
        fetch=lambda: events.append("fetch") or "batch",
        step=lambda batch: events.append(f"step {batch}") or "loss",
        synchronize=lambda: events.append("synchronize"),
        now=lambda: events.append("now") or clock(),
    )
    assert result == "loss"
    assert (data_seconds, step_seconds) == (0.25, 2.0)
    assert events == ["synchronize", "now", "fetch", "now", "step batch", "synchronize", "now"]


CELL = Cell(strategy="ddp", devices=2, global_batch=8, sequence_length=64)
FACTS = ModelFacts(("w",), 5, flops_per_sample=1000, sizes=(5,))


def test_throughput_is_the_global_batch_over_the_time_of_all_ranks_together() -> None:
    """Steps take 1, 3, 4 s on rank 0 and 2, 1, 5 s on rank 1. The slowest rank ends them after 2, 4
    and 8 s, so the trial's steps take 2, 2 and 4 s. The median is 2 s: 8 / 2 = 4."""
    row = figures(
        CELL, [answer(0, [1.0, 3.0, 4.0]), answer(1, [2.0, 1.0, 5.0])], FACTS, peak_flops=None
    )
    assert row.step_seconds_p50 == 2.0
    assert row.samples_per_second == 4.0, (
        "the global batch, which is the sum over ranks, not their mean"
    )
    assert row.tokens_per_second == 256.0
    assert row.step_seconds_mean == pytest.approx(8 / 3)
    assert row.step_seconds_p95 == pytest.approx(3.8)
    assert row.data_seconds_p50 == pytest.approx(0.3)
    assert row.first_step_seconds == 9.0
    assert row.setup_seconds == 2.0


def test_waiting_for_a_rank_that_began_later_counts_once() -> None:
    """Two ranks synchronise in the middle of each step. Rank 1 is 1 s late at first and never
    again; the ranks' maximum would make every step 1 s too long."""
    first, second = (
        [
            RankStep(step=i, phase="timed", data_seconds=0.0, step_seconds=seconds)
            for i, seconds in enumerate(rank)
        ]
        for rank in ((2, 3, 1, 3), (3, 1, 3, 1))
    )
    assert timed_seconds([first, second]) == [3, 2, 2, 2]
    paused = [replace(step, left_over_seconds=0.0) for step in first]
    assert timed_seconds([paused, second]) == [3, 3, 3, 3], "after a pause they begin together"
    settling = [replace(first[0], phase="settling"), *first[1:]]
    other = [replace(second[0], phase="settling"), *second[1:]]
    assert timed_seconds([settling, other]) == [3, 1, 3], "a stretch begins with its first step"


@given(count=some.integers(1, 40), seconds=some.floats(1e-4, 1e3))
def test_throughput_does_not_depend_on_the_number_of_steps(count: int, seconds: float) -> None:
    row = figures(CELL, [answer(0, [seconds] * count), answer(1, [seconds] * count)], FACTS, None)
    assert row.samples_per_second == pytest.approx(8 / seconds)


def test_peaks_and_imbalance_are_those_of_the_ranks() -> None:
    row = figures(CELL, [answer(0, [1.0]), answer(1, [1.0])], FACTS, None)
    assert row.peak_memory_bytes == 200
    assert row.memory_imbalance == pytest.approx(200 / 150)
    unknown = figures(
        CELL, [answer(0, [1.0], peak_memory_bytes=None), answer(1, [1.0])], FACTS, None
    )
    assert unknown.peak_memory_bytes is None
    server = answer(
        2, [1.0], peak_memory_bytes=10**6, setup_peak_memory_bytes=10**6, memory_method="another"
    )
    ranks = [answer(rank, [1.0], setup_peak_memory_bytes=50) for rank in range(2)]
    row = figures(CELL, [*ranks, server], FACTS, None)
    assert row.peak_memory_bytes_by_rank == (100, 200)
    assert row.setup_peak_memory_bytes == 50
    process = answer(0, [1.0], peak_memory_bytes=300, peak_by_device=(300, 100))
    row = figures(CELL, [process], FACTS, None)
    assert row.peak_memory_bytes_by_rank == (300, 100), "one process, as of DataParallel"
    assert (row.peak_memory_bytes, row.memory_imbalance) == (300, pytest.approx(1.5))
    assert imbalance([]) is None


def test_losses_are_averaged_over_the_ranks_that_have_one() -> None:
    both = mean_losses([[1.0, 3.0], [2.0, 5.0]])
    assert both == [1.5, 4.0]
    assert mean_losses([[None, None], [2.0, 5.0]]) == [2.0, 5.0]


def test_mfu_is_a_share_of_the_peak_and_null_without_one() -> None:
    """8 samples x 1000 FLOPs in 2 s on 2 devices of 4000 FLOP/s: 4000 of 8000."""
    assert mfu(8000, 2.0, 2, 4000) == 0.5
    assert mfu(8000, 2.0, 2, None) is None


@given(some.lists(some.floats(-1e6, 1e6), min_size=1, max_size=50), some.floats(0, 1))
def test_percentile_is_numpys(values: list[float], share: float) -> None:
    import numpy as np

    assert percentile(values, share) == pytest.approx(
        float(np.quantile(values, share)), rel=1e-9, abs=1e-6
    )


def test_whole_cycles_hold_the_steps_that_communicate() -> None:
    """Every fourth step takes 5 s, the others 1 s: 2 s on average from any first step.

    The median step takes 1 s.
    """
    steps = [3, 4, 5, 6, 7, 8, 9, 11, 12, 13]
    values = [5.0 if step % 4 == 3 else 1.0 for step in steps]
    assert over_cycles(values, steps, 4) == [2.0] * 4, "10 is missing, so no cycle spans it"
    assert over_cycles(values, steps, 1) == values
    assert over_cycles([1.0, 2.0, 6.0], [3, 4, 6], 3) == [3.0]


def test_throughput_of_local_steps_is_that_of_whole_cycles() -> None:
    """Steps of 1, 1, 1 and 5 s repeat: 8 samples take 2 s on average."""
    row = figures(CELL, [answer(0, [1.0, 1.0, 1.0, 5.0] * 2)], FACTS, None, cycle=4)
    assert (row.step_seconds_p50, row.samples_per_second) == (1.0, 4.0)


def test_each_step_takes_as_long_as_its_slowest_rank() -> None:
    assert slowest([[1, 5, 3], [2, 4, 3]]) == [2, 5, 3]
    with pytest.raises(ValueError, match="zip"):
        slowest([[1.0], [1.0, 2.0]])


def test_a_trend_is_seen_and_noise_is_not() -> None:
    falling = [2.0 - 0.1 * i for i in range(10)]
    assert trend(falling) == pytest.approx(-0.9 / 1.55)
    assert trend([1.0, 1.1, 0.9, 1.05, 0.95, 1.0, 1.1, 0.9, 1.0, 1.05]) == 0.0
    assert trend([1.0] * 10) == 0.0
    assert trend([3.0, 2.0, 1.0]) is None, "too few steps to tell"


def test_busy_share_and_bubble() -> None:
    """Two calls of 1 s each in a step of 4 s: busy 0.5. Two ranks at 0.5 and 0.9: bubble 0.3."""

    class Stage:
        def forward(self) -> None: ...

    stage = Stage()
    clock = Clock(0.0, 1.0, 2.0, 2.5, 3.5, 4.0)
    share = busy_fraction(
        lambda: (stage.forward(), stage.forward(), None)[2],
        [(stage, "forward")],
        lambda: None,
        1,
        clock,
    )
    assert share == 0.5
    assert "forward" not in vars(stage), "the method is restored"
    assert bubble_fraction([0.5, 0.9]) == pytest.approx(0.3)


@pytest.mark.parametrize("generations", [1, 2])
def test_a_childs_work_counts_for_its_rank(
    generations: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.compile's workers kept a core busy on a GPU host, so trials counted as disturbed.

    psutil finds children by reading all processes: 60 ms per rank on a node with 3,000.
    """
    monkeypatch.delattr(psutil.Process, "children")
    begun = CpuTime.now()
    busy = "import time\nwhile time.process_time() < 0.4: pass\nprint(flush=True)\ninput()"
    command = [sys.executable, "-c", busy]
    if generations == 2:
        starts = f"import subprocess; subprocess.run({command!r}, check=False)"
        command = [sys.executable, "-c", starts]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()  # it has worked and is still alive
        load = CpuTime().plus_since(begun)
        child.kill()
    assert load.rank_seconds >= 0.35


def test_foreign_load_is_what_the_cores_did_beyond_the_ranks() -> None:
    """In 2 s all cores were busy for 3.5 s and both ranks for 1.5 s: 0.25 cores did other work."""
    row = figures(CELL, [answer(0, [1.0]), answer(1, [1.0])], FACTS, None)
    assert row.foreign_load_cores == 0.25
    unknown = CpuTime(seconds=2.0, rank_seconds=1.5, busy=None)
    row = figures(CELL, [answer(0, [1.0], cpu_time=unknown), answer(1, [1.0])], FACTS, None)
    assert row.foreign_load_cores is None
    assert foreign_load([CpuTime(2.0, 2.5, 2.4)]) == 0.0, (
        "ticks are coarser than the ranks' own clocks"
    )
    busy = [(0.3, 1.0, 1.0), (0.2, 1.0, 0.5), (0.2, 0.9, 0.9), (None, None, None)]
    assert [disturbances(*shares) for shares in busy] == [("busy",), ("busy",), (), ()]


def test_an_idle_measurement_is_reused_briefly() -> None:
    looks, clock = iter([0.9, 0.8, 0.7]), [0.0]
    idle = Idle(lambda: next(looks), lambda: clock[0])
    assert idle.before() == 0.9
    clock[0] = 5.0
    assert idle.after() == 0.8
    clock[0] += 0.9 * FRESH_SECONDS
    assert idle.before() == 0.8
    clock[0] += FRESH_SECONDS
    assert idle.before() == 0.7


def test_idle_share_by_hand() -> None:
    readings = iter([(10.0, 50.0), (10.03, 50.07)])
    slept: list[float] = []
    assert idle_share(slept.append, lambda: next(readings)) == pytest.approx(0.7)
    assert slept == [WINDOW_SECONDS]
    assert idle_share(slept.append, lambda: None) is None


def test_cpu_seconds_count_stolen_time_as_busy_and_waiting_for_a_disk_as_idle(
    tmp_path: Path,
) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 0 50 1000 30 5 5 40 0 0\ncpu0 1 2\n")
    assert cpu_seconds(stat) == (2.0, 10.3)
    assert cpu_seconds(tmp_path / "none") is None


def test_energy_is_per_sample_of_all_ranks_and_counters_start_again(tmp_path: Path) -> None:
    row = figures(CELL, [answer(0, [1.0]), answer(1, [1.0])], FACTS, None)
    assert row.energy_joules_per_sample == 8.0 / 8
    row = figures(CELL, [answer(0, [1.0], joules_per_step=None), answer(1, [1.0])], FACTS, None)
    assert row.energy_joules_per_sample is None
    nodes = [answer(rank, [1.0]).on_node(rank, "one machine", 0.0) for rank in range(2)]
    assert figures(CELL, nodes, FACTS, None).energy_joules_per_sample == 4.0 / 8
    on_gpus = CELL.model_copy(update={"device": "cuda"})
    assert figures(on_gpus, nodes, FACTS, None).energy_joules_per_sample == 8.0 / 8
    readings = iter(
        [{"a": (90.0, 100.0), "b": (5.0, 100.0)}, {"a": (10.0, 100.0), "b": (7.0, 100.0)}, None]
    )
    assert Energy.of(RankGpus([]), first_of_node=True).read is package_joules
    assert Energy.of(RankGpus([]), first_of_node=False).read() == {}
    energy = Energy(lambda: next(readings))
    energy.stop()
    energy.start()
    energy.stop()
    assert energy.joules == 22.0
    energy.start()
    assert energy.joules is None
    assert package_joules(tmp_path) is None


def test_only_cpu_packages_count_as_their_energy(tmp_path: Path) -> None:
    """The domain psys is the whole platform, with the packages."""
    for number, name in enumerate(("package-0", "package-1", "psys")):
        domain = tmp_path / f"intel-rapl:{number}"
        domain.mkdir()
        (domain / "name").write_text(f"{name}\n")
        (domain / "energy_uj").write_text("2000000\n")
        (domain / "max_energy_range_uj").write_text("4000000\n")
    packages = dict.fromkeys(("intel-rapl:0", "intel-rapl:1"), (2.0, 4.0))
    assert package_joules(tmp_path) == packages


def test_the_mean_of_cycles_does_not_depend_on_where_the_steps_end() -> None:
    """Every fourth step takes 2 s longer: 1.5 s on average, however often it occurs."""
    assert mean_of_cycles([1, 1, 1, 3] * 2, range(8, 16), 4) == 1.5
    assert mean_of_cycles([1, 1, 1, 3] * 2 + [1, 1], range(8, 18), 4) == 1.5
    assert mean_of_cycles([3, 1, 1, 1, 3, 1, 1, 1, 3], range(11, 20), 4) == 1.5
    assert mean_of_cycles([1, 2, 6], [0, 1, 2], 1) == 3
