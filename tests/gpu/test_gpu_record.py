"""What a trial records about its GPUs, and how reports show it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.analysis.cell_result import CAUSES
from harness.analysis.compare import compare_sides
from harness.analysis.selection import select
from harness.cell.cell import Cell
from harness.host.gpu_state import GIB, GpuLook, GpuProcess, GpuState, GpuUse, as_json
from harness.launch.outcome import Outcome
from harness.record.plan import Plan
from harness.record.store import Results, Store, TrialKey
from harness.record.trial import TrialRecord
from harness.run.runner import Runner
from harness.worker.rank_answer import RankAnswer
from reports.runs import markdown
from tests.gpu.fake_nvml import FakeNvml, h100_node, install
from tests.unit.html_page import page_of
from tests.unit.made_results import stored, trial_rows
from tests.unit.recording import answer, figures, left_out_fields
from tests.unit.test_measure import FACTS

QUIET = GpuState(
    index=0,
    uuid="GPU-a0",
    sm_mhz=1980,
    sm_max_mhz=1980,
    reasons=("idle",),
    temperature_celsius=41,
    power_limit_watts=700.0,
    default_power_limit_watts=700.0,
    processes=(),
)
SLOW = ("thermal slowdown by the driver",)
HOT = replace(QUIET, sm_mhz=1200, reasons=SLOW, temperature_celsius=88)
SHARED = replace(QUIET, processes=(GpuProcess(4711, 2 * GIB),))
CELL = Cell(strategy="ddp", devices=2, device="cuda", global_batch=8, sequence_length=64)
NOISY_RUN = {
    "gpus": 2 * ["NVIDIA H100 80GB HBM3"],
    "gpu_memory_bytes": 80 * GIB,
    "driver_version": "580.95.05",
    "gpu_facts": json.dumps([{"ecc": True, "persistence": False, "power_limit_watts": 600.0}]),
    "gpu_topology": json.dumps([["self", "18 x NVLink 4.0"], ["18 x NVLink 4.0", "self"]]),
}


def use(throttled: float, **more: Any) -> GpuUse:
    """Returns a rank's GPU use, held back by heat for `throttled` seconds."""
    return GpuUse(("GPU-a0",), 20.0, {"temperature": throttled}, (QUIET,), **more)


def test_memory_of_each_rank_is_recorded_by_kind() -> None:
    """Kinds: torch's allocator, NVML's figure for the process, CUDA context, host memory. A
    parameter server in host memory has no GPU."""
    ranks = [
        answer(
            rank,
            [1.0],
            reserved_memory_bytes=8 * GIB,
            host_peak_bytes=3 * GIB + rank,
            gpu_use=use(0.0, process_bytes=10 * GIB + rank, context_bytes=GIB),
        )
        for rank in range(2)
    ]
    server = answer(2, [1.0], gpu_use=None, host_peak_bytes=None)
    row = figures(CELL, [*ranks, server], FACTS, None)
    assert row.nvml_memory_bytes_by_rank == (10 * GIB, 10 * GIB + 1)
    assert row.context_memory_bytes_by_rank == (GIB, GIB)
    assert row.host_peak_memory_bytes_by_rank == (3 * GIB, 3 * GIB + 1)
    unknown = figures(CELL, [ranks[0], answer(1, [1.0], gpu_use=use(0.0))], FACTS, None)
    assert unknown.nvml_memory_bytes_by_rank == unknown.context_memory_bytes_by_rank == ()
    cpu = figures(CELL.model_copy(update={"device": "cpu"}), [server, server], FACTS, None)
    assert cpu.gpu_use is None


class HeatingLauncher:
    """Launcher that leaves GPU 1 hot and another process on GPU 0."""

    def __init__(self, host: FakeNvml) -> None:
        self.host = host

    def run(self, *_: Any, **more: Any) -> Outcome:
        self.host.gpus[1].reasons, self.host.gpus[1].celsius = 0x40, 91
        self.host.gpus[0].processes = [(4711, 2 * GIB), (815, GIB)]
        return Outcome("failed", "a rank was lost", 1.0, 2.0, answers=(RankAnswer(0, pid=815),))


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_trial_of_a_gpu_cell_is_looked_at_before_and_after(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    device: str,
) -> None:
    """Only the cell's GPUs are read; its own rank, if still alive, is not another process."""
    host = install(monkeypatch, h100_node())
    cell = Cell(strategy="ddp", devices=2, device=device)
    runner = Runner(Store(tmp_path), Plan("run-1", "test", (cell,), 1), _gpus=GpuLook())
    runner.begin()
    launcher: Any = HeatingLauncher(host)
    row = runner.run_trial(launcher, cell, TrialKey(cell.id, 0), 0, None, lambda *_: None)
    before, after = (json.loads(text or "[]") for text in (row.gpu_before, row.gpu_after))
    if device == "cpu":
        assert (before, after, row.gpu_before) == ([], [], None)
        return
    assert [state["index"] for state in before] == [state["index"] for state in after] == [0, 1]
    assert [state["processes"] for state in before] == [[], []]
    assert after[0]["processes"] == [{"pid": 4711, "memory_bytes": 2 * GIB}]
    assert (after[1]["reasons"], after[1]["temperature_celsius"]) == (
        ["thermal slowdown by hardware"],
        91,
    )


def noisy(folder: Path, *, disturbed: bool = True) -> Results:
    """Stores a run of two cells: ddp has a hot and a shared trial; fsdp2 is undisturbed."""
    first = CELL.model_copy(update={"strategy": "fsdp2"})
    rows = trial_rows(CELL, [900.0, 905.0, 910.0]) + trial_rows(first, [800.0, 802.0, 804.0])
    for row in rows:
        row |= {"gpu_before": as_json([QUIET]), "gpu_after": as_json([QUIET])}
    if disturbed:
        hot = GpuUse(("GPU-a0",), 20.0, {"temperature": 4.0}, (HOT,))
        rows[0]["gpu_use"] = as_json([hot])
        rows[1]["gpu_before"] = as_json([SHARED])
    return stored(folder, rows, **NOISY_RUN)


THROTTLED = "heat, hardware or a lowered power limit held its GPUs back in 1"
WHO = f"{CAUSES['shared']} 1"


def test_the_report_marks_throttled_and_shared_trials_and_says_why(tmp_path: Path) -> None:
    text = page_of(noisy(tmp_path / "noisy"), tmp_path).text
    assert "ddp ¶" in text.replace("ddp¶", "ddp ¶")
    assert "fsdp2¶" not in text.replace("fsdp2 ¶", "fsdp2¶")
    assert f"¶ disturbed {WHO} of 3 trials; {THROTTLED} of 3 trials" in text
    assert "thermal slowdown by the driver at 88 °C" in text
    assert "GPU 0 just before: another process with 2.0 GiB" in text
    for fact in ("driver 580.95.05", "persistence mode off", "1 pair by 18 x NVLink 4.0"):
        assert fact in text
    quiet = page_of(noisy(tmp_path / "quiet", disturbed=False), tmp_path)
    assert "¶" not in quiet.text


def test_another_driver_is_other_software(tmp_path: Path) -> None:
    runs = {"A": {}, "B": {"driver_version": "590.10"}}
    for name, changes in runs.items():
        stored(tmp_path / name, trial_rows(CELL, [900.0, 905.0]), **NOISY_RUN | changes)
    compared = compare_sides(*(select(name, Store(tmp_path / name).load()) for name in runs))
    assert compared.differences == ("GPU driver 580.95.05 → 590.10",)


def test_a_comparison_names_them(tmp_path: Path) -> None:
    sides = [select(name, noisy(tmp_path / name, disturbed=name == "B")) for name in "AB"]
    (line,) = [one for one in compare_sides(*sides).lines if one.disturbed]
    heat = "rank 0: held back by heat for 4.0 of 20.0 timed seconds"
    clocks = "GPU 0 in the timed steps: thermal slowdown by the driver at 88 °C"
    shared = "GPU 0 just before: another process with 2.0 GiB"
    assert line.disturbed == [f"B, trial 0: {heat}, {clocks}", f"B, trial 1: {shared}"]
    assert "thermal slowdown" in markdown(compare_sides(*sides))


def test_lists_by_rank_are_never_null() -> None:
    """Trials that never ran have empty lists, so that readers need not check for null."""
    row = left_out_fields("r", CELL, "refused", "no")
    lists = [column.name for column in TrialRecord.columns() if column.is_list]
    assert [name for name in lists if row[name] != ()] == []
