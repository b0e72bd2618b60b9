"""transformers' Trainer with DDP, DeepSpeed and FSDP2, and why each precaution is needed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from harness.cell.errors import Refused, Unavailable
from harness.seam.registry import validate
from harness.strategies.trainer import TransformersTrainer
from harness.workloads import make_workload
from tests.ranks.conftest import RunCells, cell, ended

pytestmark = pytest.mark.skipif(
    not (find_spec("accelerate") and find_spec("deepspeed")),
    reason="pip install accelerate; make setup builds DeepSpeed",
)
ENGINES = ("ddp", "zero2", "zero3", "fsdp2")


def engines(*names: str, **axes: Any) -> list[Any]:
    return [cell("trainer", options={"engine": name}, **axes) for name in names]


def test_every_engine_trains_the_same(run_cells: RunCells) -> None:
    """Matrix full covers Llama models."""
    trials = run_cells(*engines(*ENGINES, workload="gpt2-nano", micro_batches=2)).trials
    assert list(trials["parity_verdict"]) == ["exact"] * 4, list(trials["reason"])
    assert trials["parity_max_loss_deviation"].max() < 1e-6


def test_states_and_bytes_sent(run_cells: RunCells) -> None:
    """Engines are checked on four ranks; matrix full checks the formula on two."""
    axes = {"devices": 4, "workload": "llama-micro", "timed_steps": 1, "parity_steps": 4}
    wraps = []
    for _, row in run_cells(*engines(*ENGINES, **axes)).trials.iterrows():
        assert row["parity_verdict"] == "exact", row["reason"]
        for kind in ("parameter", "gradient", "optimizer", "library"):
            expected, found = row[f"formula_{kind}_bytes"], max(row[f"{kind}_bytes"])
            assert found == pytest.approx(expected, rel=0.01, abs=4096), (row["cell_name"], kind)
        if row["wraps_ddp"] == "transformers Trainer":
            wraps.append(row["label"])
            ring = 2 * 3 / 4 * 4 * row["trained_parameters"]
            assert list(row["sent_bytes_per_step"]) == pytest.approx([ring] * 4, rel=0.05)
    assert len(wraps) == 1


def test_other_axes(run_cells: RunCells) -> None:
    """One rank, SGD, other models, and bf16 by DeepSpeed's and FSDP2's own policies train the same.

    Matrix full covers autocast under DDP.
    """
    exact = [
        cell("trainer", devices=1),
        cell("trainer", optimizer="sgd", micro_batches=4),
        *engines("fsdp2", workload="bert-micro"),
        cell("trainer", workload="llama-nano+lora"),
        cell("trainer", workload="resnet-micro", micro_batches=2),
    ]
    near = engines("zero2", "fsdp2", precision="bf16")
    trials = run_cells(*exact, *near).trials.set_index("cell_id")
    assert [trials.loc[c.id, "parity_verdict"] for c in exact] == ["exact"] * 5, list(
        trials["reason"]
    )
    assert [trials.loc[c.id, "parity_verdict"] for c in near] == [
        "exact",
        "within tolerance",
    ], list(trials["reason"])


@pytest.mark.parametrize(
    ("trap", "engine", "status", "reason"),
    [
        ("none", "ddp", "ok", ""),
        ("clipping", "ddp", "diverged", "loss is off"),
        ("falling_rate", "ddp", "diverged", "loss is off"),
        ("shuffling", "ddp", "failed", "another data order"),
        (
            "unused_parameters",
            "ddp",
            "failed",
            "DDP's find_unused_parameters is True, the plain script's is False",
        ),
        ("no_cpu", "ddp", "failed", "Accelerate sees only 1"),
        ("own_optimizer", "ddp", "diverged", "off by"),
        ("own_optimizer_without_exemption", "ddp", "ok", ""),
        ("shifted_twice", "ddp", "diverged", "loss is off"),
        ("none", "zero2", "ok", ""),
        ("deepspeed_clipping", "zero2", "diverged", "loss is off"),
        ("no_cpu", "zero2", "failed", "Accelerate sees only 1"),
        ("fsdp_on_cpu", "fsdp2", "failed", "would train with DistributedType.MULTI_CPU"),
    ],
)
def test_what_goes_wrong_without_a_precaution(
    run_cells: RunCells, trap: str, engine: str, status: str, reason: str
) -> None:
    """Trainer shuffles, clips and decays the learning rate unless told otherwise.

    Its own optimizer is exact, except that it exempts some parameters from weight decay.
    """
    ended(
        run_cells(cell("trainer_traps", options={"trap": trap, "engine": engine})).trials.iloc[0],
        status,
        reason,
    )


def test_which_labels_it_counts(run_cells: RunCells) -> None:
    """For a GPT-2 Trainer also counts the first unshifted label, which nothing predicts. For a
    Llama it does not."""
    options = [
        ("gpt2-nano", "all_labels"),
        ("gpt2-nano", "first_label_masked"),
        ("llama-nano", "all_labels"),
        ("bert-micro", "count_is_ignored"),
    ]
    cells = [
        cell("trainer_traps", workload=workload, options={"trap": trap})
        for workload, trap in options
    ]
    trials = run_cells(*cells).trials.set_index("cell_id")
    assert [trials.loc[c.id, "parity_verdict"] for c in cells] == [
        "diverged",
        "exact",
        "exact",
        "diverged",
    ]
    assert trials.loc[cells[0].id, "parity_max_loss_deviation"] == pytest.approx(1 / 33, rel=0.1)
    assert trials.loc[cells[3].id, "losses"][0] == pytest.approx(
        2 * trials.loc[cells[3].id, "reference_losses"][0]
    )


@pytest.mark.parametrize(
    ("trap", "reason"),
    [
        ("raises", "rank 1: ValueError: the planted mistake"),
        ("ends", "RuntimeError: the training loop ended"),
    ],
)
def test_a_loop_that_goes_wrong_ends_the_trial(run_cells: RunCells, trap: str, reason: str) -> None:
    trial = run_cells(cell("trainer_traps", options={"trap": trap})).trials.iloc[0]
    assert trial["status"] == "failed"
    assert reason in trial["reason"]
    assert trap != "raises" or "on_step_end" in trial["log_tail"], "the traceback shows where"


def test_what_it_refuses() -> None:
    with pytest.raises(Unavailable, match="fp16"):
        validate(cell("trainer", precision="fp16"), make_workload("llama-nano"))
    with pytest.raises(Refused, match="image models"):
        validate(
            cell("trainer", workload="resnet-micro", options={"engine": "fsdp2"}),
            make_workload("resnet-micro"),
        )
    with pytest.raises(Refused, match="unshifted labels"):
        validate(cell("trainer", workload="llama-nano+prompt"), make_workload("llama-nano+prompt"))


def test_stand_ins_and_who_wraps_ddp() -> None:
    plain, sharded = cell("trainer"), cell("trainer", options={"engine": "fsdp2"})
    assert TransformersTrainer().stand_in(plain) is None
    assert "over gloo" in str(TransformersTrainer(engine="fsdp2").stand_in(sharded))
    assert TransformersTrainer().ddp_equivalent_of(plain) == "transformers Trainer"
    assert TransformersTrainer(engine="fsdp2").ddp_equivalent_of(sharded) is None
