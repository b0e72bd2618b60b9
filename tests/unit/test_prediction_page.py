"""Page of a plan, and what it sweeps."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from bench.cli.plan import plan as command
from harness.planner.cluster.calibration import load
from harness.planner.cluster.cluster_plan import ClusterCandidate, device_counts, neighbours, sweep
from harness.planner.cluster.hardware import cluster_of
from harness.planner.cluster.hf_config import named_shapes
from harness.planner.cluster.question import ClusterQuestion
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
    assert {asked.devices for asked, _ in squares} == {1, 2, 4, 8}, "no link between nodes is given"
    first = next(best for asked, best in squares if asked.shape.parameters == max(sizes))
    assert isinstance(first, ClusterCandidate)
    assert "offload" in first.strategy, "it does not fit one device otherwise"


@pytest.mark.parametrize(
    ("devices", "counts"), [(5, [1, 2, 5]), (3, [1, 2, 3, 6]), (7, [1, 2, 4, 7])]
)
def test_each_number_of_devices_is_swept_once(devices: int, counts: list[int]) -> None:
    assert device_counts(dataclasses.replace(QUESTION, devices=devices)) == counts


def test_a_row_of_winners_has_a_square_for_each_number_of_devices(tmp_path: Path) -> None:
    words = ["--model", "llama-3b", "--gpus", "5 x h100", "--batch", "40", "--link", "nvlink"]
    answer = json.loads(told(command, *words, "--json", "--html", str(tmp_path / "plan.html")))
    assert answer["written"] == [f"page: {tmp_path / 'plan.html'}"]
    page = (tmp_path / "plan.html").read_text()
    assert page.count("<svg") == 2
    table = page[page.index('id="winners"') :]
    head, *rows = table[: table.index("</table>")].split("<tr")[1:]
    assert head.count("<th") == 1 + 3
    assert rows
    assert all(row.count("<td") == 3 for row in rows)
