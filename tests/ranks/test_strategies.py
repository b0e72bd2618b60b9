"""Every cell of matrix `full` on this machine, with smaller models: real ranks, verified against
the reference."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from _pytest.mark import ParameterSet

from bench.expand import expand
from bench.host import Host
from bench.matrix import read_matrix
from harness.spec.cell import Cell
from harness.workloads import make_workload
from tests.ranks.conftest import RunCells, cell

if TYPE_CHECKING:
    import pandas as pd

SMALL = {"llama-mini": "llama-micro", "gpt2-mini": "gpt2-micro"}


def cells_of_full() -> list[Cell]:
    cells = expand(read_matrix("full"), Host("cpu", 2, 2**34)).cells
    # fp16's pure half with AdamW diverges over the 13 steps that the matrix gives it; the others
    # need no more than 6.
    short = {
        "sequence_length": 32,
        "timed_steps": 3,
        "parity_steps": 6,
        "warmup_steps": 3,
        "time_limit_seconds": 60.0,
    }
    # Steps of more ranks than cores, and of those that offload to a disk, are slow.
    shorter = {**short, "parity_steps": 3, "warmup_steps": 1}
    found: dict[str, Cell] = {}
    for one in cells:
        base, plus, suffixes = one.workload.partition("+")
        slow = one.devices > 2 or base == "llama-512x2"
        changes = (
            {**(shorter if slow else short), "workload": SMALL.get(base, base) + plus + suffixes}
            if one.expect == "ok"
            else {}
        )
        small = Cell(**(one.model_dump() | changes))
        found.setdefault(small.id, small)
    return list(found.values())


def parameters() -> list[ParameterSet]:
    """Each cell by its name; the first of each strategy is one of the quick ones."""
    seen: set[str] = set()
    parameters = []
    for one in cells_of_full():
        marks = [] if one.strategy in seen or one.expect != "ok" else [pytest.mark.quick]
        if marks:
            seen.add(one.strategy)
        parameters.append(pytest.param(one, id=one.name.replace(" ", "-"), marks=marks))
    return parameters


@pytest.mark.parametrize("one", parameters())
def test_trains_the_same_as_the_reference(run_cells: RunCells, one: Cell) -> None:
    trial = run_cells(one).trials.iloc[0]
    if one.expect == "diverged":
        assert (trial["status"], trial["expected"]) == ("diverged", True)
        return
    assert (trial["status"], trial["reason"]) == ("ok", ""), trial["log_tail"]
    assert trial["parity_verdict"] in ("exact", "within tolerance")
    if trial["parity_loss_tolerance"] == 1e-5:
        assert trial["parity_verdict"] == "exact"
    states_follow_the_formula(trial, within=0.01)


def states_follow_the_formula(trial: pd.Series, within: float = 0.05) -> None:
    """What the fullest rank keeps between steps, kind by kind, within 5 % of the formula (or
    `within`) where the strategy has one."""
    for kind in ("parameter", "gradient", "optimizer", "library"):
        formula = trial[f"formula_{kind}_bytes"]
        if formula == formula:
            slack = within * formula + 0.1 * within * sum(
                trial[f"formula_{k}_bytes"] for k in ("parameter", "optimizer")
            )
            assert abs(max(trial[f"{kind}_bytes"]) - formula) <= slack, (
                f"{kind}: {list(trial[f'{kind}_bytes'])} against {formula}"
            )


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("ddp", {}),
        ("zero_redundancy", {}),
        ("fsdp1", {}),
        ("fsdp2", {}),
        *(("deepspeed", {"stage": stage}) for stage in range(4)),
    ],
    ids=str,
)
def test_states_between_steps_follow_the_formula(
    run_cells: RunCells, strategy: str, options: dict[str, object]
) -> None:
    """On four ranks; on two every cell of matrix full is held to it, see above."""
    trial = run_cells(cell(strategy, 4, "llama-micro", options=options)).trials.iloc[0]
    assert trial["parity_verdict"] == "exact"
    assert trial["formula_parameter_bytes"] > 0
    states_follow_the_formula(trial)


def test_a_users_own_model_and_text(run_cells: RunCells, tmp_path: Path) -> None:
    """A saved model with its own weights, split into stages and over ranks, on a text file; new
    weights get a new reference."""
    text = tmp_path / "book.txt"
    text.write_bytes(bytes(range(32, 127)) * 50)
    for seed in (5, 6):
        make_workload("gpt2-nano").build(seed).save_pretrained(tmp_path / "model")
        axes = {"workload": f"hf:{tmp_path / 'model'}", "data": f"text:{text}"}
        pipeline = cell("pipeline", micro_batches=2, options={"schedule": "gpipe"}, **axes)
        trials = run_cells(cell("ddp", **axes), pipeline).trials
        assert list(trials["parity_verdict"]) == ["exact", "exact"], list(trials["reason"])


def test_restarts_and_stand_ins_are_recorded(run_cells: RunCells) -> None:
    trials = run_cells(cell("ddp_elastic"), cell("data_parallel")).trials.set_index("strategy")
    assert trials.loc["ddp_elastic", "restarts"] == 1
    assert trials.loc["ddp_elastic", "parity_verdict"] == "exact"
    assert (
        trials.loc["data_parallel", "stand_in"]
        == "CPU threads instead of GPUs, the same five steps"
    )
    assert trials.loc["data_parallel", "processes"] == 1


def test_more_ranks_than_cores_are_labelled(run_cells: RunCells) -> None:
    trials = run_cells(cell("ddp", devices=8)).trials.iloc[0]
    assert trials["status"] == "ok"
    assert trials["oversubscribed"]


def test_what_is_held_is_recorded(run_cells: RunCells) -> None:
    """Between steps fully sharded ranks hold half of the parameters each, DDP's all of them."""
    trials = run_cells(cell("ddp"), cell("fsdp2")).trials.set_index("strategy")
    whole = int(trials.loc["ddp", "parameters"])
    assert list(trials.loc["ddp", "held_parameters"]) == [whole, whole]
    assert sum(trials.loc["fsdp2", "held_parameters"]) == whole


def test_dtypes_are_recorded(run_cells: RunCells) -> None:
    half = {"precision": "bf16", "options": {"opt_level": "O3"}}
    trials = run_cells(cell("ddp"), cell("amp", **half)).trials.set_index("strategy")
    assert list(trials.loc["ddp", "parameter_dtypes"]) == ["float32"]
    for kind in ("parameter_dtypes", "gradient_dtypes", "optimizer_state_dtypes"):
        assert list(trials.loc["amp", kind]) == ["bfloat16"]


def test_a_pipelines_bubble_is_measured(run_cells: RunCells) -> None:
    """Two stages, one after the other, wait for at least half of the time between them."""
    trials = run_cells(
        cell("vertical", workload="llama-micro"), cell("ddp", workload="llama-micro")
    ).trials.set_index("strategy")
    assert 0.4 <= trials.loc["vertical", "bubble_fraction"] <= 0.95
    assert trials["bubble_fraction"].isna().to_dict()["ddp"]


def test_the_warm_up_is_marked_and_left_out(run_cells: RunCells) -> None:
    results = run_cells(cell("ddp"))
    steps = results.steps
    assert steps.groupby(["rank", "phase"]).size().to_dict() == {
        (r, p): n for r in (0, 1) for p, n in (("warmup", 3), ("timed", 5))
    }
    slowest = steps[steps["phase"] == "timed"].groupby("step")["step_seconds"].max()
    row = results.trials.iloc[0]
    assert row["step_seconds_p50"] == pytest.approx(slowest.median())
    assert row["samples_per_second"] == pytest.approx(8 / slowest.median())


def test_a_segment_shorter_than_the_run_is_checked_in_the_middle(run_cells: RunCells) -> None:
    results = run_cells(cell("ddp", parity_steps=4))
    assert results.trials.iloc[0]["parity_verdict"] == "exact"
    assert len(results.trials.iloc[0]["reference_losses"]) == 4
    assert set(results.steps[results.steps["phase"] == "settling"]["step"]) == {4}


@pytest.mark.parametrize("tie", ["kept", "broken"])
def test_tied_embeddings_must_stay_tied_across_stages(run_cells: RunCells, tie: str) -> None:
    """Without the exchange of their gradients the two copies train apart: `vertical` and `pipeline`
    would both diverge."""
    axes = {"workload": "gpt2-nano", "micro_batches": 2, "options": {"schedule": "gpipe"}}
    name = "pipeline" if tie == "kept" else "untied_pipeline"
    trial = run_cells(cell(name, **axes)).trials.iloc[0]
    assert trial["status"] == ("ok" if tie == "kept" else "diverged")
