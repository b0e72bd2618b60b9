"""Published rows: each has a cell that the suite can train, and a rough prediction."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from bench import api
from bench.cli.reproduce import reproduce
from bench.published import (
    PublishedRow,
    differences,
    measured_figures,
    predicted_figures,
    published_rows,
    require_hardware,
)
from harness.analysis.summary import cell_results
from harness.cell.errors import UsageError
from harness.seam.registry import validate
from harness.workloads import make_workload
from tests.commands import ask, told
from tests.unit.made_results import MIB, left_out, stored, trial_rows

ROWS = published_rows()
NAMES = {"h100-80gb": "NVIDIA H100 80GB HBM3", "h200-141gb": "NVIDIA H200"}


@pytest.mark.parametrize("row", ROWS.rows, ids=lambda row: row.name)
def test_a_row_is_a_cell_that_trains_like_it(row: PublishedRow) -> None:
    cell = row.cell
    strategy, ranks = validate(cell, make_workload(cell.workload), here=False)
    assert ranks.devices == row.devices
    layout = row.layout
    assert (ranks.data, ranks.tensor) == (layout.get("data", 1), layout.get("tensor", 1))
    assert strategy.zero_stage == layout.get("zero", 0)
    samples = layout["micro_batch"] * layout.get("accumulation", 1) * layout.get("data", 1)
    assert samples == row.global_batch
    assert row.micro_batches == layout.get("accumulation", 1)


@pytest.mark.parametrize("row", ROWS.rows, ids=lambda row: row.name)
def test_a_row_is_predicted_roughly(row: PublishedRow) -> None:
    predicted = predicted_figures(row)
    assert (predicted is None) == bool(row.variant)
    if predicted is not None:
        assert predicted.tokens_per_second is not None
        assert 0.5 < predicted.tokens_per_second / row.tokens_per_second < 2


def test_a_row_without_its_hardware_is_refused() -> None:
    row = ROWS.row("kempner-8b-fsdp-2")
    require_hardware(row, [NAMES["h200-141gb"]] * 2)
    for here in ([], [NAMES["h200-141gb"]], [NAMES["h100-80gb"]] * 8):
        with pytest.raises(UsageError, match="kempner-8b-fsdp-2 needs 2 x h200-141gb"):
            require_hardware(row, here)


def test_measured_figures_are_of_each_device(tmp_path: Path) -> None:
    row = ROWS.row("kempner-8b-fsdp-2")
    trials = trial_rows(row.cell, [4.0, 4.0, 4.0], peak_mib=500)
    (cell,) = cell_results(stored(tmp_path, trials).trials)
    measured = measured_figures(row, cell)
    assert measured.tokens_per_second == pytest.approx(4.0 * row.sequence_length / 2)
    assert measured.memory_bytes == 502 * MIB


def test_the_command_lists_and_shows_without_the_hardware(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert [row["name"] for row in json.loads(told(reproduce, "--list", "--json"))] == [
        row.name for row in ROWS.rows
    ]
    for row in ROWS.rows[:3]:
        document = json.loads(told(reproduce, row.name, "--dry-run", "--json"))
        assert document["figures"]["published"]["tokens_per_second"] == row.tokens_per_second
        assert document["differences"] == differences(ROWS.sources[row.source], row)
        assert document["cell"]["strategy"] == row.strategy
        assert "measured" not in document["figures"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for words in (["torchtitan-8b-fsdp"], ["torchtitan"], []):
        with pytest.raises(UsageError):
            told(reproduce, *words)


def test_a_cell_that_cannot_be_ranked_gives_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = ROWS.row("kempner-8b-single").cell
    monkeypatch.setattr("bench.published.require_hardware", lambda row, names: None)
    for folder, rows, expected in (
        ("good", trial_rows(cell, [4.0, 4.0, 4.0]), (0, "exact")),
        ("bad", left_out(cell, "out_of_memory", "rank 0"), (1, "unknown: rank 0")),
    ):
        recorded = stored(tmp_path / folder, rows)
        monkeypatch.setattr(api, "run", lambda found=recorded, **options: found)
        code, shown = ask(reproduce, "kempner-8b-single", "--json")
        assert (code, json.loads(shown)["parity"]) == expected


def test_rates_of_rows_are_those_of_whole_runs() -> None:
    """KempnerForge reports the total rate of all GPUs."""
    whole = {1: 10_471, 2: 18_728, 4: 38_983}
    for devices, rate in whole.items():
        name = "kempner-8b-single" if devices == 1 else f"kempner-8b-fsdp-{devices}"
        assert math.isclose(ROWS.row(name).tokens_per_second * devices, rate)
