"""Answers in bf16 and fp16: permissible advice, further rounds, and the group that heads a run."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bench.cli.run_matrix import show_end
from bench.execution import Ended
from bench.planning import kept_or_new_plan
from bench.run_options import CommandOptions
from harness.analysis.answer import answer, nothing_to_choose, undecided
from harness.analysis.cell_result import CellResult
from harness.analysis.summary import cell_results
from harness.cell.cell import Cell
from harness.cell.training import EMULATED, EXACT, rounding_alone
from harness.parity.verdict import allowed_deviation
from harness.record.plan import Plan
from harness.record.store import Store
from harness.record.trial import TrialRecord
from harness.run.allocation import (
    launches_per_round,
    may_be_advised,
    planned_headline,
    worth_launching,
)
from harness.seam.optimizers import TOLERANCES
from harness.seam.registry import make_strategy
from harness.workloads import make_workload
from reports.groups import find_groups, headline
from reports.run_report import ran
from reports.site import entries, verdict_of
from tests.unit.made_results import (
    half_rows,
    stored,
    timed_and_checked,
    trial_rows,
)
from tests.unit.stored_trials import frame_of
from tests.unit.test_cli import here

ROOT = Path(__file__).parents[2]
HOSTS = ("8 x h100-80gb", "1 x h100-80gb", "8 x l4")


def in_precision(cells: list[CellResult], precision: str) -> list[CellResult]:
    """Returns the cells in this precision, fastest first."""
    return [cell for cell in cells if cell.cell.precision == precision]


@pytest.mark.parametrize(("precision", "device"), [("bf16", "cpu"), ("fp16", "cuda")])
def test_half_precision_gets_advice_a_baseline_and_further_rounds(
    precision: str, device: str
) -> None:
    run = timed_and_checked(2, precision, device)
    trials = frame_of(run.rows)
    cells = cell_results(trials)
    group = in_precision(cells, precision)
    found = answer(group)
    assert found is not None
    assert found.baseline is not None
    assert found.baseline.cell.strategy == "ddp"
    assert [(advice.role, advice.cell.cell.strategy) for advice in found.advice] == [
        ("Use", "fsdp1"),
        ("Faster at a price", "tensor"),
        ("Least memory", "fsdp2"),
    ]
    same = {cell.cell.strategy for cell in group if cell.parity.same_training}
    (racing,) = undecided(group)
    assert same == {cell.cell.strategy for cell in racing} == {"ddp", "fsdp1", "fsdp2"}
    heats = worth_launching(run.plan, TrialRecord.from_frame(trials))
    assert set().union(*heats) == {cell.cell_id for cell in racing}


@pytest.mark.parametrize(
    ("precision", "workload"), [("bf16", "llama-mini"), ("fp32", "llama-mini+bf16")]
)
def test_a_cell_is_judged_by_its_twin_in_fp32_where_the_run_has_one(
    precision: str, workload: str
) -> None:
    twins: dict[str, dict[str, Any]] = {
        "exact": {},
        "within tolerance": {"parity_verdict": "within tolerance", "parity_reason": "rounding"},
        "diverged": {"status": "diverged", "parity_verdict": "diverged"},
        "": {"status": "failed", "parity_verdict": None, "samples_per_second": None},
    }
    rows = []
    for number, changes in enumerate(twins.values(), 1):
        options = {"bucket_cap_mb": number}
        fields = {"precision": precision, "workload": workload}
        half = Cell(strategy="ddp", options=options, **fields)  # type: ignore[arg-type]
        rows += half_rows(half, [10.0, 10.1])
        twin = Cell(strategy="ddp", options=options, workload="llama-micro", micro_batches=2)
        rows += trial_rows(twin, [10.0], **changes)
        other = Cell(strategy="ddp", options=options, workload="resnet-micro")
        rows += trial_rows(other, [10.0], parity_verdict="within tolerance")
    group = [row for row in cell_results(frame_of(rows)) if row.cell.workload == workload]
    assert {cell.parity.fp32_twin: cell.parity.same_training for cell in group} == {
        "exact": True,
        "within tolerance": False,
        "diverged": False,
        "": True,
    }


@pytest.mark.parametrize(("limit", "alone"), [(0.02, True), (0.08, True), (0.35, False)])
def test_a_wide_limit_needs_an_exact_twin_in_fp32(limit: float, alone: bool) -> None:
    half = Cell(strategy="ddp", precision="bf16", workload="mixtral-micro")
    rows = half_rows(half, [10.0, 10.1], parity_update_tolerance=limit)
    twin = trial_rows(half.model_copy(update={"precision": "fp32"}), [10.0])
    for trials, same in ((rows, alone), ([*rows, *twin], True)):
        (cell,) = in_precision(cell_results(frame_of(trials)), "bf16")
        assert cell.parity.same_training == same
        if not same:
            assert "in fp32" in nothing_to_choose([cell])


@pytest.mark.parametrize(
    ("twins", "counts"),
    [
        ({"micro_batches": {1: "exact", 4: "diverged"}}, "exact"),
        ({"global_batch": {4: "within tolerance", 16: "diverged"}}, "diverged"),
    ],
    ids=["nearest", "worst of equally near"],
)
def test_one_of_several_twins_counts(twins: dict[str, dict[int, str]], counts: str) -> None:
    half = Cell(strategy="ddp", precision="bf16", workload="llama-mini")
    rows = half_rows(half, [10.0, 10.1])
    for axis, verdicts in twins.items():
        for value, verdict in verdicts.items():
            twin = half.model_copy(update={"precision": "fp32", axis: value})
            rows += trial_rows(twin, [10.0], parity_verdict=verdict)
    (cell,) = in_precision(cell_results(frame_of(rows)), "bf16")
    assert cell.parity.fp32_twin == counts


@pytest.mark.parametrize(
    ("verdict", "reason"),
    [("within tolerance", "gradients travel in fp16"), ("exact", EMULATED.reason)],
)
def test_rounding_and_emulation_in_fp32_are_another_training(verdict: str, reason: str) -> None:
    parity = {"parity_verdict": verdict, "parity_reason": reason}
    rows = trial_rows(Cell(strategy="ddp"), [10.0, 10.1], **parity)
    (cell,) = cell_results(frame_of(rows))
    assert not cell.parity.same_training


@functools.cache
def planned(host: str) -> Plan:
    options = CommandOptions(matrix="full", host=host)
    return kept_or_new_plan(Store(Path("nowhere")), options)[0]


@pytest.mark.thorough
def test_the_record_tells_what_a_strategy_adds_to_its_precision() -> None:
    """Rounding is the only reason if strategy, optimizer and a split BatchNorm add none."""
    seen = Counter[bool]()
    for cell in [*planned(HOSTS[0]).cells, *planned("").cells]:
        if cell.precision == "fp32":
            continue
        strategy, workload = make_strategy(cell), make_workload(cell.workload)
        allowed = allowed_deviation(cell, workload, strategy, strategy.layout(cell.devices))
        alone = rounding_alone(cell.precision, allowed.reason)
        if not workload.batch_norm:
            own = strategy.tolerance(cell, workload) != EXACT or cell.optimizer in TOLERANCES
            assert alone != own, cell.name
        seen[alone] += 1
    assert min(seen[True], seen[False]) > 5
    norm = Cell(strategy="sync_batch_norm", workload="resnet-micro", precision="bf16", devices=2)
    for strategy, expected in (("single", True), ("sync_batch_norm", True), ("ddp", False)):
        cell = norm.model_copy(
            update={"strategy": strategy, "devices": 1 if strategy == "single" else 2}
        )
        made, workload = make_strategy(cell), make_workload(cell.workload)
        allowed = allowed_deviation(cell, workload, made, made.layout(cell.devices))
        assert rounding_alone(cell.precision, allowed.reason) == expected


@pytest.mark.slow
@pytest.mark.parametrize("host", HOSTS)
def test_the_headline_of_full_on_gpus_is_what_is_timed(host: str) -> None:
    plan = planned(host)
    leading = planned_headline(plan)
    assert leading is not None
    cells, baseline = leading
    assert baseline is not None
    first = cells[0]
    assert (first.precision, first.device) == ("bf16", "cuda")
    usual = "single" if first.devices == 1 else "ddp"
    assert (baseline.strategy, baseline.options) == (usual, {})
    assert baseline.devices == first.devices == int(host[0])
    assert not plan.not_compared & {cell.id for cell in cells}
    assert len(cells) > sum(map(may_be_advised, cells)) > 10
    assert plan.launches_per_round[baseline.id] > 1
    launches = Counter(cell.id for cell, _ in plan.schedule())
    assert all(launches[cell.id] == plan.trials_of(cell) for cell in plan.cells)
    assert all(launches[cell_id] == 1 for cell_id in plan.not_compared)


def test_a_dry_run_names_the_headline_its_baseline_and_candidates() -> None:
    words = ("run", "--matrix", "full", "--dry-run", "--host", HOSTS[0])
    done = here(*words, "--json")
    assert done.returncode == 0
    plan = json.loads(done.stdout)
    found, expected = plan["headline"], planned_headline(planned(HOSTS[0]))
    assert expected is not None
    cells, baseline = expected
    assert baseline is not None
    candidates = [cell.id for cell in cells if may_be_advised(cell)]
    assert found["precision"] == "bf16"
    assert found["baseline_cell_id"] == baseline.id
    assert found["candidate_cell_ids"] == candidates
    assert found["cells"] == len(cells)


def test_a_planned_baseline_compiles_nothing() -> None:
    """A baseline chosen from measurements is not compiled either."""
    compiled = Cell(strategy="ddp", devices=1, compile="block")
    plain = Cell(strategy="ddp", devices=1)
    others = [
        Cell(strategy="ddp", devices=1, options={"bucket_cap_mb": mib}) for mib in range(1, 6)
    ]
    assert launches_per_round([compiled, *others, plain]) == {plain.id: 2}
    assert launches_per_round([compiled, *others]) == {}


@pytest.mark.parametrize("devices", [1, 8])
def test_a_run_on_gpus_is_headed_by_what_it_times(
    tmp_path: Path,
    devices: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    rows, plan = timed_and_checked(devices)
    results = stored(tmp_path / "results", rows, plan=plan.to_json())
    report = ran(results)
    leading = report.leading
    assert leading is not None
    assert (leading.rows[0].cell.precision, leading.devices) == ("bf16", devices)
    ended = Ended(plan, finished=True, wall_seconds=1.0, all_recorded=True)
    store = Store(tmp_path / "results")
    assert show_end(store, ended, None, CommandOptions(json_output=True)) == 0
    said = json.loads(capsys.readouterr().out)
    if devices == 1:
        assert said["answer"] == [], "on one device there is nothing to choose"
        return
    advised = said["answer"][0]
    assert (advised["role"], advised["cell_id"]) == ("Use", leading_cell(leading.rows, "fsdp1"))
    (concluded,) = store.load().conclusions["advised_cell_id"]
    assert concluded == advised["cell_id"]
    (entry,) = entries(store, tmp_path / "reports")
    advice, _ = verdict_of(entry.report)
    assert "fsdp1" in advice
    assert "tensor" not in advice
    page = (tmp_path / "reports" / "html" / f"{plan.run_id}.html").read_text()
    assert page.count("<li><b>Use</b>") == 1
    assert "llama-1536x16" in page.split("<li><b>Use</b>")[0].rsplit('class="lead"', 1)[1]


def leading_cell(rows: tuple[Any, ...], strategy: str) -> str:
    return next(cell.cell_id for cell in rows if cell.cell.strategy == strategy)


def test_without_a_plan_the_headline_is_the_largest_group() -> None:
    groups = find_groups(cell_results(frame_of(timed_and_checked(8).rows)))
    largest = headline(groups)
    assert largest is not None
    assert largest.rows[0].cell.precision == "fp32"


def test_cells_that_are_launched_once_buy_no_launches() -> None:
    rows, plan = timed_and_checked(8)
    trials = frame_of(rows)
    eager = dataclasses.replace(plan, time_budget_seconds=60.0)
    heats = worth_launching(eager, TrialRecord.from_frame(trials))
    assert heats
    assert not set().union(*heats) & plan.not_compared
