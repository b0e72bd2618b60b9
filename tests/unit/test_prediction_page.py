"""Prediction pages: their contents, and marks on predictions."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

from bench.cli.plan import plan as command
from harness.planner.cluster.calibration import load
from harness.planner.cluster.cluster_plan import device_counts, neighbours, sweep
from harness.planner.cluster.hardware import cluster_of
from harness.planner.cluster.model_names import named_shapes
from harness.planner.cluster.question import ClusterQuestion
from harness.planner.local.local_plan import ScalingCurve, ScalingPoint, straggling
from reports.prediction_page import scaling_page
from tests.commands import told

QUESTION = ClusterQuestion(
    named_shapes()["llama-8b"], cluster_of("h100-80gb", 8, "nvlink"), 2048, 64, 4
)


def test_the_sweep_has_models_of_similar_size_on_whole_nodes() -> None:
    shapes = neighbours(QUESTION.shape)
    assert QUESTION.shape in shapes
    sizes = [shape.parameters for shape in shapes]
    assert sizes == sorted(sizes)
    assert len(sizes) > 2
    linked = cluster_of("h100-80gb", 8, "nvlink,400gbit")
    assert device_counts(dataclasses.replace(QUESTION, cluster=linked)) == [1, 2, 4, 8, 16]
    squares = sweep(QUESTION, load(), "throughput")
    assert {square.devices for square in squares} == {1, 2, 4, 8}, "no link between nodes is given"
    for square in squares:
        if square.winner:
            assert 0 < square.tokens_low < square.tokens_per_second < square.tokens_high
            assert 0 < square.memory_low < square.memory_bytes < square.memory_high
        else:
            assert square.reason
    largest = [square for square in squares if square.parameters == max(sizes)]
    assert "offload" in largest[0].winner, "it does not fit one device otherwise"


def test_the_page_of_a_plan(tmp_path: Path) -> None:
    words = ["--model", "llama-3b", "--devices", "4", "--batch", "64", "--seq", "2048"]
    words += ["--link", "nvlink", "--top", "4", "--json"]
    answer = json.loads(told(command, *words, "--html", str(tmp_path / "plan.html")))
    assert answer["written"] == [f"page: {tmp_path / 'plan.html'}"]
    page = (tmp_path / "plan.html").read_text()
    assert answer["explanation"][0] in page
    assert page.count("<svg") == 2
    assert "Which strategy wins where" in page
    for candidate in answer["candidates"]:
        assert candidate["layout"]["data"] >= 1
    assert len(re.findall(r'<th scope="row">', page)) >= 4 + 3


def points() -> tuple[ScalingPoint, ...]:
    measured = [
        ScalingPoint(1, 40.0, 36.0, 44.0, 41.0, 0.0),
        ScalingPoint(2, 75.0, 68.0, 82.0, 74.0, 0.0),
    ]
    later = [
        ScalingPoint(
            2**k, 70.0 * 2 ** (k - 1), 60.0 * 2 ** (k - 1), 80.0 * 2 ** (k - 1), None, k - 1.0
        )
        for k in range(2, 13)
    ]
    return (*measured, *later)


def test_curves_mark_predictions_and_measurements() -> None:
    curves = [
        ScalingCurve("ddp", points(), ""),
        ScalingCurve("pipeline", points()[:3], "8 devices: no blocks"),
    ]
    page = scaling_page("llama-mini, weak scaling", curves, "a machine")
    assert page.count("<svg") == 1
    assert "outside by 11 doublings" in page
    assert "Nothing was measured beyond the dotted line, at 2 devices." in page
    assert "ends: 8 devices: no blocks" in page
    assert "filled: measured" in page


def test_a_chart_says_how_many_curves_it_draws() -> None:
    curves = [ScalingCurve(f"cell {number}", points()[:3], "") for number in range(9)]
    page = scaling_page("Weak scaling", curves, "a machine")
    assert "Only the first 7 of 9 curves are drawn; the table has all." in page
    assert "cell 8" in page
    assert "are drawn" not in scaling_page("Weak scaling", curves[:7], "a machine")


def test_a_step_ends_with_its_slowest_device() -> None:
    assert straggling(2, 2, 0.05) == 0
    grown = [straggling(2**k, 2, 0.05) for k in range(1, 13)]
    assert grown == sorted(grown)
    assert grown[-1] < 0.05 * 4.1
