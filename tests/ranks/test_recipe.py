"""Practical recipes are the same training in each library."""

from __future__ import annotations

from typing import Any

import pytest

from harness.cell.cell import Cell
from tests.ranks.conftest import RunCells, cell, representative
from tests.ranks.test_traps import DROPOUT, RECIPE

FEW: dict[str, Any] = {"timed_steps": 1, "parity_steps": 4}


def trained(strategy: str, **axes: Any) -> Cell:
    return cell(strategy, **{**RECIPE, **axes})


CELLS = [
    # Matrices decay and vectors do not. DeepSpeed links only the first group with its states.
    trained("deepspeed", workload="gpt2-nano", options={"stage": 3}),
    trained("fairscale_on_cpu", decay="all"),
    trained("pipeline", workload="gpt2-nano"),
    trained("tensor", workload="gpt2-nano"),
    trained("fsdp2", workload="mixtral-nano"),
]
MORE = [
    *(trained("deepspeed", workload="gpt2-nano", options={"stage": stage}) for stage in (1, 2)),
    trained("ring_on_cpu"),
    *(
        trained(name, workload=workload, seed=1)
        for name in ("ddp", "fsdp1", "fsdp2", "pipeline", "tensor")
        for workload in ("llama-nano", "gpt2-nano")
    ),
    *(
        trained("three_d", devices=8, workload="gpt2-nano", options={"data_axis": axis}, **FEW)
        for axis in ("fsdp2", "ddp")
    ),
]


@pytest.mark.parametrize("cells", representative([CELLS, MORE]), ids=["some", "more"])
def test_each_way_to_split_the_work_clips_to_the_same_norm(
    run_cells: RunCells, cells: list[Cell]
) -> None:
    pytest.importorskip("fairscale")
    pytest.importorskip("deepspeed")
    trials = run_cells(*cells).trials
    assert list(trials["status"]) == ["ok"] * len(trials), list(trials["reason"])
    assert set(trials["parity_verdict"]) == {"exact"}
    norms = trials["gradient_norms"].map(min)
    assert (norms > trials["clip_norm"]).all(), "every step must be clipped"
    assert trials["parity_max_norm_deviation"].max() <= 1e-5


@pytest.mark.thorough
def test_a_rewind_restores_the_schedule_masks_and_documents(run_cells: RunCells) -> None:
    long = {"parity_steps": 8, "timed_steps": 12}
    cells = [
        trained("ddp", micro_batches=1, **long),
        trained("accelerate", micro_batches=1, **long),
        cell("ddp", documents="packed", **DROPOUT, **long),
    ]
    trials = run_cells(*cells, trials=3, timed_seconds=0.1).trials
    assert set(trials["parity_verdict"]) == {"exact"}, list(trials["parity_reason"])
    assert (trials.groupby("cell_id")["rewinds"].max() >= 1).all()
