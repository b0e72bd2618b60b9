"""Accelerate with DDP, DeepSpeed and FSDP2, and why the strategy needs each precaution."""

from __future__ import annotations

import os
from typing import Any

import psutil
import pytest

from harness.cell.errors import Refused, Unavailable
from harness.seam.registry import validate
from harness.strategies.accelerate import Accelerate
from harness.workloads import make_workload
from tests.ranks.conftest import RunCells, cell, ended

pytest.importorskip("accelerate", reason="pip install accelerate")


def engines(*names: str, **axes: Any) -> list[Any]:
    return [cell("accelerate", options={"engine": name}, **axes) for name in names]


def test_every_engine_trains_the_same(run_cells: RunCells) -> None:
    """GPT-2 ties its embeddings, and FSDP2 must keep them tied. Matrix full covers Llama models."""
    trials = run_cells(
        *engines("ddp", "zero2", "zero3", "fsdp2", workload="gpt2-nano", micro_batches=2)
    ).trials
    assert list(trials["parity_verdict"]) == ["exact"] * 4, list(trials["reason"])
    assert trials["parity_max_loss_deviation"].max() < 1e-6


def test_engines_use_their_own_mixed_precision(run_cells: RunCells) -> None:
    """Matrix full covers bf16 by autocast under DDP."""
    trials = run_cells(*engines("zero2", "fsdp2", precision="bf16")).trials
    assert list(trials["parity_verdict"]) == ["exact"] * 2, list(trials["reason"])


def test_four_ranks_train_the_same_and_keep_what_the_formula_says(run_cells: RunCells) -> None:
    """Cells of matrix full check the formula on two ranks."""
    few = {"timed_steps": 1, "parity_steps": 4}
    cells = engines("zero2", "zero3", "fsdp2", devices=4, **few)
    for _, row in run_cells(*cells).trials.iterrows():
        assert row["parity_verdict"] == "exact", row["reason"]
        for kind in ("parameter", "gradient", "optimizer", "library"):
            expected, found = row[f"formula_{kind}_bytes"], max(row[f"{kind}_bytes"])
            assert found == pytest.approx(expected, rel=0.05, abs=4096), (row["cell_name"], kind)


@pytest.mark.parametrize("trap", ["no_variables", "no_cpu"])
def test_ranks_that_do_not_see_each_other(run_cells: RunCells, trap: str) -> None:
    """Without torchrun's variables or `cpu=True`, each rank silently trains alone; the strategy
    reports it."""
    traps = [
        cell("accelerate_traps", options={"trap": trap, "verified": verified})
        for verified in (True, False)
    ]
    told, silent = (
        row
        for _, row in run_cells(*traps).trials.sort_values("options", ascending=False).iterrows()
    )
    assert told["status"] == "failed"
    assert "Accelerate sees only 1 of 2 processes" in told["reason"]
    assert silent["status"] == "diverged"


@pytest.mark.skipif(
    (psutil.cpu_count(logical=False) or 1) < 2 or "OMP_NUM_THREADS" in os.environ,
    reason="needs two cores, and OMP_NUM_THREADS unset",
)
def test_it_takes_all_cores(run_cells: RunCells) -> None:
    trial = run_cells(cell("accelerate_traps", devices=1, options={"trap": "threads"})).trials.iloc[
        0
    ]
    assert trial["status"] == "failed"
    assert "threads per rank instead of 1" in trial["reason"]


def test_on_cpus_it_takes_fsdp_for_ddp(run_cells: RunCells) -> None:
    axes = {"engine": "fsdp2", "trap": "fsdp_on_cpu"}
    traps = [
        cell("accelerate_traps", options={**axes, "verified": verified})
        for verified in (True, False)
    ]
    told, silent = (
        row
        for _, row in run_cells(*traps).trials.sort_values("options", ascending=False).iterrows()
    )
    assert told["status"] == "failed"
    assert "would train with DistributedType.MULTI_CPU" in told["reason"]
    assert silent["status"] == "ok"
    assert list(silent["held_parameters"]) == [silent["parameters"]] * 2, "not sharded: it was DDP"


def test_on_cpus_it_takes_fp16_for_fp32(run_cells: RunCells) -> None:
    axes = {"precision": "fp16"}
    half = run_cells(
        cell("accelerate_traps", options={"trap": "fp16_on_cpu", "verified": False}, **axes)
    ).trials.iloc[0]
    full = run_cells(cell("accelerate")).trials.iloc[0]
    assert list(half["losses"]) == pytest.approx(list(full["losses"]), rel=1e-6), "fp32, silently"
    with pytest.raises(Unavailable, match="fp16"):
        validate(cell("accelerate", **axes), make_workload("llama-nano"))


@pytest.mark.parametrize(
    ("trap", "engine", "status", "reason"),
    [
        ("clipping", "zero2", "diverged", "loss is off"),
        ("batch_sizes", "zero2", "failed", "batch"),
        ("unnamed_backend", "zero2", "failed", "sees only 1 of 2 processes"),
        ("inner_optimizer", "ddp", "diverged", "loss is off"),
        ("none", "zero2", "ok", ""),
    ],
)
def test_what_goes_wrong_without_a_precaution(
    run_cells: RunCells, trap: str, engine: str, status: str, reason: str
) -> None:
    """DeepSpeed clips at 1.0 and counts only one process on CPUs. An optimizer without its wrapper
    steps after every micro-batch."""
    options = {"trap": trap, "engine": engine, "verified": trap != "batch_sizes"}
    ended(
        run_cells(cell("accelerate_traps", options=options, micro_batches=2)).trials.iloc[0],
        status,
        reason,
    )


def test_what_it_refuses() -> None:
    with pytest.raises(Refused, match="image models"):
        validate(
            cell("accelerate", workload="resnet-micro", options={"engine": "fsdp2"}),
            make_workload("resnet-micro"),
        )
    with pytest.raises(Refused, match="launcher"):
        validate(
            cell("accelerate", launcher="spawn", options={"config_file": True}),
            make_workload("llama-nano"),
        )


def test_stand_ins_and_who_wraps_ddp() -> None:
    plain, sharded = cell("accelerate"), cell("accelerate", options={"engine": "fsdp2"})
    assert Accelerate().stand_in(plain) is None
    assert "over gloo" in str(Accelerate(engine="fsdp2").stand_in(sharded))
    assert Accelerate(config_file=True).ddp_equivalent_of(plain) == "Accelerate (config.yaml)"
    assert Accelerate(engine="fsdp2").ddp_equivalent_of(sharded) is None
