"""Training scripts as they are, measured in real ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest

from harness.analysis.scripts import script_sentences
from harness.analysis.summary import cell_results
from harness.cell.cell import SCRIPT, Cell
from harness.seam.registry import with_defaults
from tests.pages import ROOT
from tests.ranks.conftest import RunCells, ended

FOLDER = ROOT / "tests" / "scripts"
STEPS = {"warmup_steps": 3, "parity_steps": 3, "timed_steps": 5}


def script(name: str, arguments: str = "", **axes: Any) -> Cell:
    options = {"arguments": arguments} if arguments else {}
    fields = {"options": options, "workload": SCRIPT, "devices": 2, "global_batch": 1, **STEPS}
    return with_defaults(Cell(strategy=str(FOLDER / name), **fields | axes))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("mingpt_ddp.py", "--layers 4"),
        ("accelerate_text.py", "--gradient_accumulation_steps 2"),
        ("trainer_clm.py", "--per_device_train_batch_size 4"),
    ],
)
def test_two_settings_of_a_script_are_compared(
    run_cells: RunCells, name: str, arguments: str
) -> None:
    found = run_cells(script(name), script(name, arguments), trials=2).trials
    for trial in found.to_dict("records"):
        ended(trial, "ok", "nobody checked")
        assert trial["parity_verdict"] == "not checked"
        assert trial["expected"]
        assert trial["steps_taken"] == 8
        assert trial["peak_memory_bytes"] > 0
        assert 0 < trial["samples_per_second"] < 1e5
        assert min(trial["sent_bytes_per_step"]) > 1e4, "ranks exchange gradients"
        assert len(trial["losses"]) == 8
        assert all(map(math.isfinite, trial["losses"]))
        assert trial["parameters"] is None or math.isnan(trial["parameters"])
    first, second, compared, unchecked = script_sentences(cell_results(found))
    assert all(f"scripts/{name}" in sentence for sentence in (first, second, compared))
    assert "steps/s, 95%: " in first
    assert arguments in first + second
    assert "times the steps/s" in compared
    assert "nobody checked" in unchecked


def test_steps_of_the_first_optimizer_count(run_cells: RunCells) -> None:
    (trial,) = run_cells(script("gan.py", global_batch=64, sequence_length=2)).trials.to_dict(
        "records"
    )
    ended(trial, "ok", "")
    assert trial["steps_taken"] == 8
    assert 1.5 * math.log(2) < trial["losses"][0] < 4 * math.log(2), "of real and made samples"
    assert trial["tokens_per_second"] == pytest.approx(2 * trial["samples_per_second"])
    parameters = 8 * 64 + 64 + 64 * 2 + 2 + 2 * 64 + 64 + 64 + 1
    assert list(trial["held_parameters"]) == [parameters, parameters]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (
            "--fail-at 5",
            "gan.py failed after 5 steps of an optimizer: ValueError: the data has ended",
        ),
        ("--steps 4", "gan.py ended after 4 steps of an optimizer: let it train longer"),
        ("--stpes 4", "gan.py exited with 2 before its first step of an optimizer"),
    ],
)
def test_a_script_that_ends_early_says_how(
    run_cells: RunCells, arguments: str, reason: str
) -> None:
    (trial,) = run_cells(script("gan.py", arguments)).trials.to_dict("records")
    ended(trial, "failed", reason)
