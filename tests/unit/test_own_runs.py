"""Predictions that are anchored with runs on a user's own GPUs."""

from __future__ import annotations

import json
import math
import random
import shutil
import statistics
from pathlib import Path

import pytest

from bench import api
from bench.cli.fits import fits
from bench.cli.plan import plan
from harness.cell.errors import UsageError
from harness.host.gpu_models import gpu_named
from harness.planner import own_runs
from harness.planner.cluster.anchor import BIAS, NOISE, USUAL_FACTOR, anchor_of
from harness.planner.cluster.calibration import load
from harness.planner.cluster.hardware import cluster_of
from harness.planner.own_runs import TABLE, fit_error, measured_trainings
from tests.commands import told

H200 = Path(__file__).parents[2] / "results" / "reference" / "h200-141gb"
RESULTS = ("--results", str(H200))
HALVES = 500
QUESTION = api.fit_question("h200", fields={"model": "llama-8b", "method": "full"})


def test_half_of_the_runs_predicts_the_other_half() -> None:
    errors = [fit_error(QUESTION, *run) for run in measured_trainings(H200, QUESTION.gpu)]
    assert len(errors) == 12
    draw = random.Random(56)
    plain, anchored, covered = [], [], []
    for _ in range(HALVES):
        shuffled = draw.sample(errors, len(errors))
        seen, unseen = shuffled[:6], shuffled[6:]
        anchor = anchor_of(seen, "half")
        left = [abs(error - math.log(anchor.factor)) for error in unseen]
        plain.append(statistics.median(map(abs, unseen)))
        anchored.append(statistics.median(left))
        covered += [error <= anchor.half_width for error in left]
    assert statistics.mean(anchored) < 0.8 * statistics.mean(plain)
    assert statistics.mean(a < b for a, b in zip(anchored, plain, strict=True)) > 0.7
    assert 0.75 <= statistics.mean(covered) <= 0.88


def test_few_runs_move_a_prediction_less_than_many() -> None:
    factors = [math.log(anchor_of([0.3] * count, "made").factor) for count in (1, 4, 64)]
    assert factors == sorted(factors)
    assert 0.2 < factors[0] < 0.3
    assert factors[-1] == pytest.approx(0.3, abs=0.001)
    widths = [anchor_of([0.3, 0.2] * count, "made").half_width for count in (1, 4, 64)]
    assert widths == sorted(widths, reverse=True)
    assert math.exp(1.2816 * math.hypot(BIAS, NOISE)) == pytest.approx(USUAL_FACTOR, abs=0.001)


def test_an_answer_says_what_is_anchored() -> None:
    words = ("llama-8b", "--gpus", "h200", "--seq", "4096", "--json")
    plain, answer = (json.loads(told(fits, *words, *more)) for more in ((), RESULTS))
    assert plain["anchor"] is None
    assert answer["anchor"]["runs"] == 12
    assert answer["peak_bytes"] == plain["peak_bytes"]
    factor = answer["anchor"]["factor"]
    assert answer["tokens_per_second"] == pytest.approx(plain["tokens_per_second"] / factor)
    spans = [one["tokens_high"] / one["tokens_low"] for one in (answer, plain)]
    assert spans[0] < spans[1]


def test_a_plan_is_anchored_with_full_trainings_of_its_device() -> None:
    words = ("--model", "llama-8b", "--gpus", "16 x h200-141gb", "--json")
    plain, answer = (json.loads(told(plan, *words, *more)) for more in ((), RESULTS))
    assert (plain["anchor"], answer["anchor"]["runs"]) == (None, 6)
    seconds = {str(one["layout"]): one for one in plain["candidates"]}
    both = [one for one in answer["candidates"] if str(one["layout"]) in seconds]
    assert both
    for one in both:
        before = seconds[str(one["layout"])]
        ratio = one["seconds"] / before["seconds"]
        assert ratio == pytest.approx(answer["anchor"]["factor"])
        assert one["reserved_bytes"] == before["reserved_bytes"]
        assert sum(one["parts"].values()) == pytest.approx(one["seconds"])


def test_runs_that_cannot_anchor_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no training on a100-80gb"):
        measured_trainings(H200, gpu_named("a100-80gb"))
    without_table = tmp_path / "h200-141gb"
    shutil.copytree(H200, without_table)
    (without_table / TABLE).unlink()
    # Their steps are so short that the processor's launches decide.
    with pytest.raises(UsageError, match="large enough to keep it busy"):
        measured_trainings(without_table, QUESTION.gpu)
    (without_table / TABLE).write_text("model,method\nllama-8b,full\n")
    with pytest.raises(UsageError, match="lacks 'parameters'"):
        measured_trainings(without_table, QUESTION.gpu)


def test_cells_of_the_suite_anchor_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_runs, "TABLE", "none.csv")
    monkeypatch.setattr(own_runs, "launch_bound", lambda *_: False)
    shapes, recipes, seconds = zip(*measured_trainings(H200, QUESTION.gpu), strict=True)
    assert {shape.name for shape in shapes} == {"llama-512x16", "llama-1536x16"}
    kinds = {(recipe.precision, recipe.micro_batch) for recipe in recipes}
    assert kinds == {("bf16", 8), ("fp32", 64)}
    assert all(0.03 < taken < 0.3 for taken in seconds)


def test_rates_that_a_run_measured_replace_those_of_a_data_sheet(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One short run suffices: it measures products and copies before its first trial."""
    monkeypatch.setattr(own_runs, "best_products", dict)
    folder = tmp_path / "h200-141gb"
    shutil.copytree(H200, folder, ignore=lambda *_: {TABLE})
    question = own_runs.with_own_runs(QUESTION, folder)
    assert question.measured == str(folder)
    assert question.anchor is None
    assert question.gpu.memory_bytes == QUESTION.gpu.memory_bytes
    assert (question.gpu.bf16_flops_per_second or 0) * 0.8 == pytest.approx(795e12, rel=0.01)
    assert (question.gpu.memory_bytes_per_second or 0) * 0.85 == pytest.approx(4.15e12, rel=0.01)
    cluster = own_runs.measured_cluster(cluster_of("h200", 8, "nvlink"), folder)
    assert cluster.reached_flops_per_second == pytest.approx(795e12, rel=0.01)
    assert "as measured" in own_runs.anchored(load(), folder, cluster).source
    anchored = own_runs.with_own_runs(QUESTION, H200)
    assert anchored.anchor is not None
