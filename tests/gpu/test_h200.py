"""Records of a real H200, as the suite reads them back: nothing about them is made up."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pandas as pd
import pytest

from harness.cell.cell import Cell
from harness.host.gpu_models import gpu_model
from harness.host.gpu_state import GpuRecord
from harness.record.store import Store
from harness.record.trial import SpeedMeasurement
from harness.seam.peak_memory import peak_bytes
from harness.seam.registry import make_strategy
from harness.workloads import make_workload
from harness.workloads.counts import model_facts
from tests.conftest import ROOT

H200 = ROOT / "results" / "reference" / "h200-141gb"


@functools.cache
def trials() -> pd.DataFrame:
    table = Store(H200).load(steps=False).trials
    return table[table["status"] == "ok"]


def read(row: pd.Series) -> GpuRecord:
    return GpuRecord.read(row["gpu_before"], row["gpu_after"], row["gpu_use"])


def test_every_strategy_trained_as_its_reference() -> None:
    """Exactly in fp32, within rounding in bf16: the limits were found on CPUs."""
    found = trials()
    assert len(found) >= 30
    assert set(found["parity_verdict"]) == {"exact", "within tolerance"}
    exact = found[found["precision"] == "fp32"]
    assert set(exact["parity_verdict"]) == {"exact"}
    assert exact["parity_max_loss_deviation"].max() < 1e-6
    assert {"accelerate", "collectives", "data_parallel", "fsdp1", "fsdp2", "horovod"} <= set(
        exact["strategy"]
    )


def test_a_forked_rank_reads_its_gpu_from_nvml() -> None:
    """Energy, clocks, throttling and its own process's memory, next to torch's."""
    for row in trials().to_dict("records"):
        record = read(pd.Series(row))
        assert record.unanswered == []
        (use,) = record.use
        (state,) = use.states
        assert use.throttled_seconds is not None
        assert state.sm_mhz is not None
        assert state.sm_max_mhz == 1980
        assert state.power_limit_watts == state.default_power_limit_watts == 700
        assert use.process_bytes == row["nvml_memory_bytes_by_rank"][0]
        assert use.process_bytes is not None
        assert state.processes
        assert use.process_bytes - use.context_bytes == row["reserved_memory_bytes_by_rank"][0]
        assert row["energy_joules_per_sample"] > 0


def test_only_trials_next_to_others_are_called_shared() -> None:
    """Run `times` had the GPU to itself; the others ran side by side."""
    causes = {True: set[str](), False: set[str]()}
    for row in trials().to_dict("records"):
        record = read(pd.Series(row))
        alone = row["run_id"].startswith("times")
        causes[alone] |= {found.cause for found in record.findings()}
    assert causes == {True: set(), False: {"shared"}}


def test_mfu_is_of_the_data_sheet_and_utilisation_of_the_measured_rate() -> None:
    model = gpu_model("NVIDIA H200")
    assert model is not None
    speeds = {}
    for run in Store(H200).load(steps=False).runs.to_dict("records"):
        measured = SpeedMeasurement.read(run["device_speed"])
        assert measured is not None
        assert measured.speed is not None
        speeds[run["run_id"]] = measured.speed.matmul_flops_per_second
    for row in trials().to_dict("records"):
        peak = model.peak_flops_per_second(row["precision"])
        assert peak is not None
        rate = row["flops_per_step"] / row["step_seconds_p50"]
        measured_rate = speeds[row["run_id"]][row["precision"]]
        assert 0.3 < measured_rate / peak < 1
        assert row["mfu"] == pytest.approx(rate / peak, rel=0.01)
        assert row["matmul_utilization"] == pytest.approx(rate / measured_rate, rel=0.01)


def language_trials() -> Iterator[tuple[Cell, pd.Series]]:
    """Yields trials of uncompiled language models with their cells, as today's code reads them."""
    for _, row in trials().iterrows():
        cell = Cell.model_validate_json(row["cell"])
        if cell.compile == "none" and make_workload(cell.workload).kind != "image":
            yield cell, row


def test_states_are_on_the_gpu_and_as_large_as_the_formulas_say() -> None:
    """In host memory are at most AdamW's step counters, except with offload."""
    for cell, row in language_trials():
        offloads = bool(cell.options.get("cpu_offload"))
        (host,) = row["host_state_bytes"]
        assert (host > 2**20) == offloads, cell.name
        strategy = make_strategy(cell)
        facts = model_facts(make_workload(cell.workload), cell.sequence_length)
        formula = strategy.states(cell, strategy.layout(cell.devices), facts)
        if formula is not None and not offloads:
            held = (row["parameter_bytes"][0], row["optimizer_bytes"][0])
            assert held == (formula.parameters, formula.optimizer), cell.name


def test_predicted_peaks_are_those_of_the_gpu() -> None:
    """FSDP2's own mixed precision is predicted as if it kept what autocast keeps."""
    for cell, row in language_trials():
        peak = peak_bytes(cell)
        within = 0.2 if cell.options.get("mixed_precision") else 0.03
        assert peak == pytest.approx(row["peak_memory_bytes"], rel=within), cell.name


def test_batches_are_there_before_the_step_asks_for_them() -> None:
    for _, row in language_trials():
        assert row["data_seconds_p50"] < 0.02 * row["step_seconds_p50"]
