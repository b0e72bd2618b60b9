"""Cells of TRIED_MATRICES train in real ranks, with smaller models, and match the reference.

Cells that another file tests more closely are left to it.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from _pytest.mark import ParameterSet

from bench.api import TRIED_MATRICES
from bench.expand import expand
from bench.matrix import Host, read_matrix
from harness.cell.cell import Cell
from harness.cell.training import CAPPED_ABOVE
from harness.launch.launcher import Launcher
from harness.record.plan import Plan
from harness.record.store import Results, Store
from harness.run.references import declared
from harness.run.runner import ProgressListener, Runner
from harness.seam.registry import make_strategy
from harness.workloads import make_workload
from tests.ranks.conftest import RunCells, cell
from tests.waiting import LONG

SMALL = {
    "llama-mini": "llama-nano",
    "llama-micro": "llama-nano",
    "gpt2-mini": "gpt2-nano",
    "mixtral-micro": "mixtral-nano",
}
# These have two stages on each rank, or buckets smaller than the model.
MICRO = {
    ("schedule", "interleaved_1f1b"),
    ("schedule", "interleaved_zero_bubble"),
    ("schedule", "zbv"),
    ("schedule", "dualpipev"),
    ("schedule", "looped_bfs"),
    ("bucket_cap_mb", 1),
}


def elsewhere(one: Cell) -> bool:
    """Returns whether another file tests this cell.

    Ranks of mpirun are in test_horovod.py, and launchers that start new interpreters in
    test_listening.py. States on disk and wider layers are in test_deepspeed.py, other engines of
    libraries in test_settings.py, and fp16 messages in test_sent_bytes.py.

    Eight ranks are slow: they train with one data axis here and with the others in test_recipe.py.
    """
    anew = one.launcher == "spawn" or one.options.get("config_file")
    eight = one.devices == 8 and one.options.get("data_axis") != "zero1"
    mpi = one.options.get("controller") == "mpi"
    wide = one.workload == "llama-512x2"
    library = {"engine", "reduce_fp16", "broadcast_fp16"} & set(one.options)
    return mpi or wide or bool(anew) or eight or bool(library)


def cells_of_matrices() -> list[Cell]:
    host = Host("cpu", 2, 2**34)
    expanded = [c for name in TRIED_MATRICES for c in expand(read_matrix(name), host).cells]
    # Pure fp16 with AdamW diverges within the matrix's 13 steps; other cells need at most 6.
    short = {
        "sequence_length": 32,
        "timed_steps": 3,
        "parity_steps": 6,
        "warmup_steps": 3,
        "time_limit_seconds": LONG,
    }
    # Steps of more ranks than cores are slow.
    shorter = {**short, "parity_steps": 3, "warmup_steps": 1}
    found: dict[str, Cell] = {}
    for one in expanded:
        if elsewhere(one):
            continue
        base, plus, suffixes = one.workload.partition("+")
        micro = base.replace("mini", "micro")
        small = micro if MICRO & set(one.options.items()) else SMALL.get(base, base)
        changes = (
            {**(shorter if one.devices > 2 else short), "workload": small + plus + suffixes}
            if one.expect == "ok"
            else {}
        )
        changed = Cell(**(one.model_dump() | changes))
        found.setdefault(changed.id, changed)
    return list(found.values())


def settings(one: Cell) -> tuple[bool, int]:
    """Returns whether the cell's ranks exchange data, and how many of its settings are not the
    plainest."""
    axes = (one.micro_batches > 1, one.precision != "fp32", one.recompute != "none")
    more = (one.optimizer != "adamw", one.regime != "strong", one.workload != "llama-nano")
    return 1 < one.devices <= 4, len(one.options) + sum(axes) + sum(more)


def parameters() -> list[ParameterSet]:
    """Returns each cell with its name. The plainest of each strategy is marked quick, and all but
    the least plain one are left to thorough tests."""
    cells = cells_of_matrices()
    plainest: dict[str, Cell] = {}
    least_plain: dict[str, Cell] = {}
    for one in sorted((one for one in cells if one.expect == "ok"), key=settings):
        least_plain[one.strategy] = one
    for one in sorted(cells, key=lambda one: (not settings(one)[0], settings(one)[1])):
        plainest.setdefault(one.strategy, one)
    quick = {one.id for one in plainest.values()}
    least = least_plain.values()
    chosen = {
        one.id for one in cells if one in least or (one.expect == "diverged" and not one.options)
    }
    return [
        pytest.param(
            one,
            id=one.name.replace(" ", "-"),
            marks=[
                *[pytest.mark.quick] * (one.id in quick),
                *[pytest.mark.thorough] * (one.id not in chosen),
            ],
        )
        for one in cells
    ]


ALSO_RECORDED = {
    "ddp_elastic": {"restarts": 1},
    "data_parallel": {
        "stand_in": "CPU threads instead of GPUs, the same five steps",
        "processes": 1,
    },
}
"""Expected columns of a strategy's cells on two devices."""


@pytest.mark.parametrize("one", parameters())
def test_trains_the_same_as_the_reference(run_cells: RunCells, one: Cell) -> None:
    trial = run_cells(one, timed_seconds=0.01).trials.iloc[0]
    if one.expect == "diverged":
        assert (trial["status"], trial["expected"]) == ("diverged", True)
        return
    verified = trial["parity_verdict"] != "unknown"
    assert trial["status"] == "ok", trial["log_tail"]
    assert (trial["reason"] == "") == verified, trial["reason"]
    # A wide declared tolerance cannot rule out ranks that exchange nothing.
    unverifiable = {"unknown"} if declared(one).update > CAPPED_ABOVE else set[str]()
    assert trial["parity_verdict"] in {"exact", "within tolerance", *unverifiable}
    assert trial["expected"] == (trial["parity_verdict"] == "unknown")  # so a run's exit code is 0
    if trial["parity_loss_tolerance"] == 1e-6:
        assert trial["parity_verdict"] == "exact"
    if not verified:
        assert pd.isna(trial["rewinds"])  # nothing to compare its replays with
    elif (why_not := make_strategy(one).rewind_skipped_reason(one)) == "":
        assert trial["rewinds"] >= 1, trial["rewind_skipped_reason"]
    else:
        assert (trial["rewinds"], trial["rewind_skipped_reason"]) == (0, why_not)
    states_follow_the_formula(trial, within=0.01)
    if one.devices == 2:
        for column, expected in ALSO_RECORDED.get(one.strategy, {}).items():
            assert trial[column] == expected
        if one.strategy == "vertical":  # stages wait about half of the time or more
            assert 0.4 <= trial["bubble_fraction"] <= 0.95
        if one.strategy == "ddp":
            assert pd.isna(trial["bubble_fraction"])


def states_follow_the_formula(trial: pd.Series, within: float = 0.05) -> None:
    """Checks each kind of state that the fullest rank keeps between steps against the formula.

    `within` is the relative tolerance. Kinds without a formula are skipped.
    """
    kinds = ("parameter", "gradient", "optimizer", "library")
    ranks = list(zip(*(trial[f"{kind}_bytes"] for kind in kinds), strict=True))
    fullest = dict(zip(kinds, max(ranks, key=sum), strict=True))
    for kind in kinds:
        formula = trial[f"formula_{kind}_bytes"]
        if formula == formula:
            slack = within * formula + 0.1 * within * sum(
                trial[f"formula_{k}_bytes"] for k in ("parameter", "optimizer")
            )
            assert abs(fullest[kind] - formula) <= slack, (
                f"{kind}: {list(trial[f'{kind}_bytes'])} against {formula}"
            )


def test_a_users_own_model_and_text(run_cells: RunCells, tmp_path: Path) -> None:
    """A saved model trains on a text file, by DDP and in a pipeline; new weights get a new
    reference."""
    text = tmp_path / "book.txt"
    text.write_bytes(bytes(range(32, 127)) * 50)
    for seed in (5, 6):
        make_workload("gpt2-nano").build(seed).save_pretrained(tmp_path / "model")
        axes = {"workload": f"hf:{tmp_path / 'model'}", "data": f"text:{text}"}
        split = cell("pipeline", micro_batches=2, options={"schedule": "gpipe"}, **axes)
        cells = [cell("ddp", **axes), *([split] if seed == 5 else [])]
        trials = run_cells(*cells).trials
        assert list(trials["parity_verdict"]) == ["exact"] * len(cells), list(trials["reason"])


def test_more_ranks_than_cores_are_labelled(run_cells: RunCells) -> None:
    trials = run_cells(cell("ddp", devices=4)).trials.iloc[0]
    assert trials["status"] == "ok"
    assert trials["oversubscribed"]


@pytest.fixture(scope="module")
def recorded(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Returns trials of three cells that keep different states, for the next tests."""
    half = {"precision": "bf16", "options": {"opt_level": "O3"}}
    store = Store(tmp_path_factory.mktemp("recorded"))
    plan = Plan.new("test", [cell("ddp"), cell("fsdp2"), cell("amp", **half)], 1, [])
    runner = Runner(store, plan, launcher=lambda packages: launcher)
    runner.begin()
    assert runner.run(ProgressListener())
    return store.load([plan.run_id])


def test_what_is_held_is_recorded(recorded: Results) -> None:
    """Between steps, fully sharded ranks hold half of the parameters each, and DDP's ranks all."""
    trials = recorded.trials.set_index("strategy")
    whole = int(trials.loc["ddp", "parameters"])
    assert list(trials.loc["ddp", "held_parameters"]) == [whole, whole]
    assert sum(trials.loc["fsdp2", "held_parameters"]) == whole


def test_dtypes_are_recorded(recorded: Results) -> None:
    trials = recorded.trials.set_index("strategy")
    assert list(trials.loc["ddp", "parameter_dtypes"]) == ["float32"]
    for kind in ("parameter_dtypes", "gradient_dtypes", "optimizer_state_dtypes"):
        assert list(trials.loc["amp", kind]) == ["bfloat16"]


def test_the_warm_up_is_marked_and_left_out(recorded: Results) -> None:
    row = recorded.trials.set_index("strategy").loc["ddp"]
    steps = recorded.steps[recorded.steps["cell_id"] == row["cell_id"]]
    assert steps.groupby(["rank", "phase"]).size().to_dict() == {
        (r, p): n for r in (0, 1) for p, n in (("warmup", 3), ("timed", 5))
    }
    timed = steps[steps["phase"] == "timed"]
    ended = timed.pivot(index="step", columns="rank", values="step_seconds").cumsum().max(axis=1)
    typical = ended.diff().fillna(ended.iloc[0]).median()
    assert row["step_seconds_p50"] == pytest.approx(typical)
    assert row["samples_per_second"] == pytest.approx(8 / typical)


def test_a_segment_shorter_than_the_run_is_checked_in_the_middle(run_cells: RunCells) -> None:
    results = run_cells(cell("ddp", parity_steps=4))
    assert results.trials.iloc[0]["parity_verdict"] == "exact"
    assert len(results.trials.iloc[0]["reference_losses"]) == 4
    assert set(results.steps[results.steps["phase"] == "settling"]["step"]) == {4}
